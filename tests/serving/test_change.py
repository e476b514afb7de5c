# SPDX-License-Identifier: Apache-2.0
"""Requests whose steering is changed while they run, in engines that chunk, preempt, cache, draft
and run ahead.

The oracle is a request that asks for both from its start: what the first says up to the position
that the change names, and what the second says from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conformance.engine import make_llm, shut_down
from tests.serving import test_speculation
from tests.serving.test_async_scheduling import asynchronous
from tests.serving.test_force import forcing
from tests.serving.test_rules import CHUNKED, DRAFTS
from tests.support import serving
from tests.support.serving import Ask, capture, prompt_of, serve, vector, worst_row
from vllm import LLM
from vllm.outputs import RequestOutput
from vllm.v1.interventions.errors import InterventionError

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPTS = [prompt_of(n, 40 + n) for n in (37, 9, 64, 33)]
LENGTH = 14
SITE = "post_attn", 1
CLOSE = 1e-2
"""Distance of a row, as a share of its length, that chunks and TF32 on a GPU make."""
ALL = "all_generated"

Op = dict[str, Any]


def add(seed: int, point: str = "post_attn", layer: int = 0, norm: float = 24.0) -> Op:
    return {"op": "add", "point": point, "layers": [layer], "vector": vector(seed, norm)}


def gated(seed: int, when: str) -> Op:
    gate = {"probe": vector(seed + 1, 1.0), "threshold": -1e6, "sharpness": 1.0, "when": when}
    return {**add(seed), "gate": gate}


def ablate(seed: int, layer: int = 1) -> Op:
    return {
        "op": "ablate",
        "point": "post_block",
        "layers": [layer],
        "direction": vector(seed, 1.0),
    }


def focus(layer: int, factor: float) -> Op:
    return {"op": "focus", "layers": [layer], "span": [0, 1, 2, 3, 4], "factor": factor}


CHANGES: dict[str, tuple[list[Op], list[Op]]] = {
    "to a vector": ([], [add(1)]),
    "to nothing": ([add(1), ablate(2)], []),
    "other numbers": ([add(1, norm=8.0)], [add(1, norm=40.0)]),
    "other operations": ([ablate(3), ablate(4, 2)], [gated(5, "row"), add(6, layer=1)]),
    "more at a site": ([ablate(3)], [ablate(4), ablate(5), gated(6, "row")]),
    "a decision of the prompt": ([gated(7, "last_prompt"), ablate(2)], [add(8, layer=1)]),
    "other focus": ([focus(1, 40.0)], [focus(0, 0.0), add(9)]),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("chunked", marks=pytest.mark.v2),
        pytest.param("cached", marks=pytest.mark.v2),
        pytest.param("async", marks=pytest.mark.v2),
        "drafts",  # upstream's ngram drafter does not run under the Triton interpreter
    ],
)
def llm(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "enable_steering": True,
        "capture_consumers": ["inline"],
        "capture_points": ["pre_attn", "post_attn", "post_block", "q", "z"],
        "steering_families": ["all", "focus"],
        "max_steering_rows": 64,
    }
    path = tiny_models.path("llama")
    if request.param == "async":
        with asynchronous():
            engine = make_llm(path, **options, max_num_seqs=8)
    elif request.param == "drafts":
        test_speculation.keep_engines_startable()
        engine = make_llm(path, **options, **DRAFTS)
    else:
        engine = make_llm(path, **options, **(CHUNKED if request.param == "chunked" else {}))
    yield engine
    shut_down(engine)


def fields(ops: list[Op], **more: Any) -> dict[str, Any]:
    asked = {"steering": ops} if ops else {}
    return {"max_tokens": LENGTH, **capture("all", [SITE[0]], [SITE[1]]), **asked, **more}


def run(llm: LLM, asks: Mapping[str, Ask], changes: Mapping[str, tuple[int, list[Op]]]) -> Any:
    """Run requests, each of which is changed once it has a number of tokens.

    Returns:
        the last outputs, and the future of each change.
    """
    engine, done, futures = llm.llm_engine, dict[str, Any](), dict[str, Future[dict[int, int]]]()
    for name, ask in asks.items():
        engine.add_request(name, {"prompt_token_ids": ask.prompt}, ask.params(False))
    for _ in range(2000):
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            done[output.request_id] = output
            at, ops = changes.get(output.request_id, (LENGTH, []))
            count = min(len(c.token_ids) for c in output.outputs)
            if count >= at and output.request_id not in futures and not output.finished:
                asked = {"steering": ops} if ops else {}
                futures[output.request_id] = llm.steering.change(output.request_id, asked)
        if not engine.has_unfinished_requests():
            break
    assert done.keys() == asks.keys() and all(output.finished for output in done.values())
    return done, futures


def part(ops: list[Op], prompt: list[int], first: int, stop: int) -> list[Op]:
    """Operations from position `first` on, up to `stop`; none acts before its gate is decided."""
    made = []
    for op in ops:
        decided = op.get("gate", {}).get("when") == "last_prompt"
        start = max(first, len(prompt) - 1) if decided else first
        made.append({**op, "positions": {"start": start, "stop": stop}})
    return made


def rows_of(output: Any) -> Any:
    got = output.outputs[0].capture_results["inline"]
    assert got.status == "ok", got.error
    return got.payload[SITE]


def check(llm: LLM, ask: Ask, output: Any, before: list[Op], after: list[Op], at: int) -> None:
    """The answer is that of a request that asked for both, each on its side of `at`."""
    end = len(ask.prompt) + LENGTH - 1
    both = [*part(before, ask.prompt, 0, at), *part(after, ask.prompt, at, end)]
    [want] = serve(llm, [Ask(ask.prompt, fields(both))], log_probs=False)
    assert list(output.outputs[0].token_ids) == list(want.outputs[0].token_ids)
    got, wanted = rows_of(output), rows_of(want)
    assert got.positions.tolist() == wanted.positions.tolist() == list(range(end))
    assert worst_row(got.values, wanted.values) <= CLOSE
    for ops in (before, after):
        other = fields(part(ops, ask.prompt, 0, end))
        [unlike] = serve(llm, [Ask(ask.prompt, other)], log_probs=False)
        assert worst_row(got.values, rows_of(unlike).values) > 4 * CLOSE


@pytest.mark.parametrize("name", CHANGES)
def test_an_answer_goes_on_with_another_steering(llm: LLM, name: str) -> None:
    """Each prompt of a batch is changed at a token of its own; a request beside them is not."""
    before, after = CHANGES[name]
    asks = {f"r{i}": Ask(prompt, fields(before)) for i, prompt in enumerate(PROMPTS[:3])}
    beside = Ask(PROMPTS[3], fields(before))
    changes = {f"r{i}": (1 + 2 * i, after) for i in range(3)}
    done, futures = run(llm, {**asks, "beside": beside}, changes)
    positions = []
    for i, (request_id, ask) in enumerate(asks.items()):
        [(completion, at)] = futures[request_id].result(timeout=0).items()
        assert completion == 0 and len(ask.prompt) + 1 + 2 * i <= at < len(ask.prompt) + LENGTH - 1
        positions.append(at)
        check(llm, ask, done[request_id], before, after, at)
    [alone] = serve(llm, [beside], log_probs=False)
    assert done["beside"].outputs[0].token_ids == alone.outputs[0].token_ids
    scheduler = serving.scheduler_of(llm)
    assert not scheduler.running and not scheduler.requests
    for pool in (scheduler.interventions.tables.terms, scheduler.interventions.tables.programs):
        assert pool.in_use == 0
    assert not llm.llm_engine.output_processor.external_req_ids


def test_many_changes_of_many_requests(llm: LLM) -> None:
    """Prompts that share blocks, changed several times at random: no request has another's blocks,
    and what the cache keeps of each is what acted there."""
    random = np.random.default_rng(5)
    kinds = [[add(11)], [], [ablate(12)], [add(11, norm=60.0), gated(13, "row")]]
    asks, plans, said = {}, {}, dict[str, list[tuple[int, list[Op]]]]()
    for i in range(10):
        prompt = PROMPTS[2][: int(random.integers(34, 64))]
        first = kinds[int(random.integers(len(kinds)))]
        asks[f"r{i}"] = Ask(prompt, fields(first))
        said[f"r{i}"] = [(0, first)]
        times = np.sort(random.choice(LENGTH - 3, int(random.integers(3)), replace=False)) + 1
        plans[f"r{i}"] = [(int(t), kinds[int(random.integers(len(kinds)))]) for t in times]
    engine, done = llm.llm_engine, dict[str, Any]()
    waiting: dict[str, tuple[Future[dict[int, int]], list[Op]]] = {}
    names = list(asks)
    for step in range(2000):
        if names and step % 2 == 0:
            name = names.pop()
            engine.add_request(
                name, {"prompt_token_ids": asks[name].prompt}, asks[name].params(False)
            )
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            name, done[output.request_id] = output.request_id, output
            if name in waiting and waiting[name][0].done():
                future, ops = waiting.pop(name)
                said[name].append((future.result()[0], ops))
            left = plans[name]
            if left and len(output.outputs[0].token_ids) >= left[0][0] and name not in waiting:
                ops = left.pop(0)[1]
                if not output.finished:
                    new = {"steering": ops} if ops else {}
                    waiting[name] = llm.steering.change(name, new), ops
        if not names and not engine.has_unfinished_requests():
            break
    assert sum(len(each) for each in said.values()) > 15 and not any(plans.values())
    for name, output in done.items():
        assert output.finished
        prompt = asks[name].prompt
        end = len(prompt) + LENGTH - 1
        stops = [at for at, _ in said[name][1:]] + [end]
        both = [
            op
            for (at, ops), stop in zip(said[name], stops, strict=True)
            for op in part(ops, prompt, at, stop)
        ]
        answer = list(output.outputs[0].token_ids)
        # By what it left in the cache, and computed anew, of which the rows are captured.
        asked: dict[str, Any] = {"max_tokens": LENGTH, **({"steering": both} if both else {})}
        [cached] = serve(llm, [Ask(prompt, asked)], log_probs=False)
        [anew] = serve(llm, [Ask(prompt, fields(both))], log_probs=False)
        assert answer == list(cached.outputs[0].token_ids) == list(anew.outputs[0].token_ids)
        assert worst_row(rows_of(output).values, rows_of(anew).values) <= CLOSE


def test_a_turn_finds_the_blocks_of_what_acted(llm: LLM) -> None:
    """A request that asks for the same at the same positions finds the changed answer's blocks,
    and one that asks for either alone finds those up to the change."""
    if not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        return
    llm.reset_prefix_cache()
    before, after = [add(1)], [add(2)]
    prompt = PROMPTS[2][:40]
    ask = Ask(prompt, {"max_tokens": 54, "steering": before})
    done, futures = run(llm, {"r": ask}, {"r": (20, after)})
    at = futures["r"].result(timeout=0)[0]
    history = [*prompt, *done["r"].outputs[0].token_ids]
    assert 64 > at > 40 and len(history) == 94
    changed = [*part(before, prompt, 0, at), *part(after, prompt, at, 95)]
    for ops, cached in ((changed, 64), (part(before, prompt, 0, 95), 32), (after, 0), ([], 0)):
        asked: dict[str, Any] = {"max_tokens": 2, **({"steering": ops} if ops else {})}
        [output] = serve(llm, [Ask(history, asked)], log_probs=False)
        assert output.num_cached_tokens == cached


def test_a_module_that_is_gone_acts_on(llm: LLM) -> None:
    """Nothing of a running request depends on what a name means later."""
    llm.steering.register_module("there", {"post_attn": {0: vector(21)}})
    llm.steering.register_module("then", {"post_attn": {1: vector(22)}})
    engine, prompt = llm.llm_engine, PROMPTS[0]
    plain = {k: v for k, v in fields([]).items() if k != "steering"}
    asked = Ask(prompt, {**plain, "steering_modules": ["there"]})
    engine.add_request("r", {"prompt_token_ids": prompt}, asked.params(False))
    output: Any = None
    changes: list[Future[dict[int, int]]] = []
    steps: list[dict[str, Any]] = [{"steering_modules": ["then"]}, {"steering": [add(1)]}]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if len(output.outputs[0].token_ids) >= 2 + 3 * len(changes) and len(changes) < 2:
                changes.append(llm.steering.change("r", steps[len(changes)]))
                if len(changes) == 1:
                    llm.steering.unregister_module("there")
                    llm.steering.unregister_module("then")
                    modules = serving.scheduler_of(llm).interventions.modules
                    modules._kept = deque((0.0, module) for _, module in modules._kept)
                    modules.forget()
                    assert not modules._sets
    first, second = (change.result(timeout=0)[0] for change in changes)
    end = len(prompt) + LENGTH - 1
    both = [
        *part([add(21)], prompt, 0, first),
        *part([add(22, layer=1)], prompt, first, second),
        *part([add(1)], prompt, second, end),
    ]
    [want] = serve(llm, [Ask(prompt, fields(both))], log_probs=False)
    assert list(output.outputs[0].token_ids) == list(want.outputs[0].token_ids)
    assert worst_row(rows_of(output).values, rows_of(want).values) <= CLOSE


def test_several_completions(llm: LLM) -> None:
    """All completions of a request are changed, each from a position of its own: their rows are
    those of their texts as prompts, steered so."""
    prompt, asked = PROMPTS[1], fields([add(1)], n=3, temperature=1.0)
    done, futures = run(llm, {"r": Ask(prompt, asked)}, {"r": (3, [add(2)])})
    found = futures["r"].result(timeout=0)
    assert found.keys() == {0, 1, 2}
    end = len(prompt) + LENGTH - 1
    for completion in done["r"].outputs:
        at = found[completion.index]
        got = completion.capture_results["inline"].payload[SITE].values
        text = [*prompt, *completion.token_ids[:-1]]
        changed = [*part([add(1)], prompt, 0, at), *part([add(2)], prompt, at, end)]
        for ops, close in ((changed, True), (part([add(1)], prompt, 0, end), False)):
            [want] = serve(llm, [Ask(text, fields(ops, max_tokens=1))], log_probs=False)
            assert (worst_row(got, rows_of(want).values) <= CLOSE) == close


def test_beside_a_rule_that_forces(llm: LLM) -> None:
    """An answer is cut, goes on, and is changed; or changed, and then cut."""
    prompt = PROMPTS[0]
    rules = [forcing(-1e30, over=[len(prompt) + at]) for at in (3,)]
    for when in (1, 6):
        ask = Ask(prompt, fields([add(1)], rules=rules))
        done, futures = run(llm, {"r": ask}, {"r": (when, [add(2)])})
        at = futures["r"].result(timeout=0)[0]
        end = len(prompt) + LENGTH - 1
        both = [*part([add(1)], prompt, 0, at), *part([add(2)], prompt, at, end)]
        [want] = serve(llm, [Ask(prompt, fields(both, rules=rules))], log_probs=False)
        assert list(done["r"].outputs[0].token_ids) == list(want.outputs[0].token_ids)
        assert done["r"].outputs[0].rules["r"].forced_at == want.outputs[0].rules["r"].forced_at
        assert worst_row(rows_of(done["r"]).values, rows_of(want).values) <= CLOSE


def test_an_answer_that_goes_on_keeps_what_its_prompt_decided(llm: LLM) -> None:
    """A gate that the last prompt token decides is open where the answer goes on, too, though
    these positions come from the prefix cache, and its rows were those of a gate that was shut."""
    prompt = PROMPTS[2]
    rules = [forcing(-1e30, over=[len(prompt) + 5])]
    [shut] = [gated(7, "last_prompt")]
    shut["gate"] = {**shut["gate"], "threshold": 1e6}
    ungated = {**add(7), "positions": {"start": len(prompt) - 1}}
    answers = []
    for ops in ([gated(7, "last_prompt")], [ungated], []):
        first = Ask(prompt_of(12, 3), {"max_tokens": 2, "steering": [shut]})
        asks = [first, Ask(prompt, fields(ops, rules=rules))]
        answers.append(list(serve(llm, asks, log_probs=False)[1].outputs[0].token_ids))
    assert answers[0] == answers[1] != answers[2]


def test_ends_before_a_change_comes(llm: LLM) -> None:
    """Whoever waits is told, and nothing is left of the request."""
    engine, prompt = llm.llm_engine, PROMPTS[0]
    ask = Ask(prompt, fields([]))
    engine.add_request("r", {"prompt_token_ids": prompt}, ask.params(False))
    future = llm.steering.change("r", {"steering": [add(1)]})
    with pytest.raises(InterventionError, match="is being changed already"):
        llm.steering.change("r", {})
    engine.abort_request(["r"])
    with pytest.raises(LookupError, match="ended before"):
        future.result(timeout=0)
    with pytest.raises(LookupError, match="no request of yours"):
        llm.steering.change("r", {})
    serve(llm, [Ask(PROMPTS[1], fields([]))], log_probs=False)
    assert not serving.scheduler_of(llm).requests


def test_what_cannot_act_or_has_no_room_leaves_an_answer_as_it_was(llm: LLM) -> None:
    prompt = PROMPTS[1]
    [want] = serve(llm, [Ask(prompt, fields([add(1)]))], log_probs=False)
    past = [{**add(2), "positions": {"start": 0, "stop": len(prompt) + 1}}]
    done, futures = run(llm, {"r": Ask(prompt, fields([add(1)]))}, {"r": (4, past)})
    with pytest.raises(InterventionError, match=r"^steering: can act on no position from \d+ on"):
        futures["r"].result(timeout=0)
    assert list(done["r"].outputs[0].token_ids) == list(want.outputs[0].token_ids)


def test_all_that_acted_needs_room_until_the_answer_ends(llm: LLM) -> None:
    """An engine of 64 rows has them for 32 operations of a request, and for 32 more, not 33."""
    prompt = PROMPTS[2]

    def many(seed: int, first: int, count: int) -> list[Op]:
        places = [(p, layer) for p in ("pre_attn", "post_attn", "post_block") for layer in range(3)]
        made = []
        for i in range(count):
            point, layer = places[i // 4]
            at = {"start": first + i % 4, "stop": first + i % 4 + 1}
            made.append({**ablate(seed + i, layer), "point": point, "positions": at})
        return made

    before = many(100, 0, 32)
    [want] = serve(llm, [Ask(prompt, fields(before))], log_probs=False)
    for count, fits in ((32, True), (33, False)):
        after = many(200, len(prompt) + 6, count)
        done, futures = run(llm, {"r": Ask(prompt, fields(before))}, {"r": (1, after)})
        if fits:
            assert futures["r"].result(timeout=0)
            continue
        with pytest.raises(InterventionError, match="max_steering_rows=64 with what acted"):
            futures["r"].result(timeout=0)
        assert list(done["r"].outputs[0].token_ids) == list(want.outputs[0].token_ids)
