# SPDX-License-Identifier: Apache-2.0
"""Operations of requests in real engines, against Hugging Face with the same done in float64.

Fused, unfused and parallel blocks; every operation at every point; order, gates, positions; with
chunked prefill, the prefix cache and preemption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, Reference
from tests.support import serving
from tests.support.serving import GENERATED, Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.operations import STREAM_OPERATIONS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

LONG, MIDDLE, SHORT = prompt_of(41, 70), prompt_of(17, 71), prompt_of(5, 72)
PROMPT, BLOCK, FULL = prompt_of(70, 73), 32, 64
FAMILIES = [*STREAM_OPERATIONS, "gate"]

Pair = tuple[LLM, Judge]


def start(tiny_models: TinyModels, name: str, **options: Any) -> Pair:
    path, row = tiny_models.path(name), tiny_models.row(name)
    settings: dict[str, Any] = {
        "enable_steering": True,
        "steering_families": FAMILIES,
        "max_steering_ops": 8,
        "capture_consumers": ["inline"],
        "enable_prefix_caching": False,
    }
    llm = make_llm(path, **{**settings, **options})
    return llm, Judge(Reference(row, models.load(row, path)))


def op(name: str, point: str, layers: Any, seed: int = 1, **more: Any) -> dict[str, Any]:
    """An operation strong enough to be seen on streams of norm about 10."""
    fields: dict[str, dict[str, Any]] = {
        "add": {"vector": vector(seed), "scale": 1.6},
        "norm_match": {"direction": vector(seed, 1.0), "scale": 1.6},
        "ablate": {"direction": vector(seed), "strength": 20.0},
        "clamp": {"direction": vector(seed), "lo": 22.0, "hi": 25.0},
        "pin": {"direction": vector(seed), "value": -24.0},
        "replace": {"values": torch.stack([vector(seed + i, 40.0) for i in range(3)])},
        "normalize": {},
        "swap": {"direction": vector(seed), "other": vector(seed + 1)},
        "feature": {
            "encoder": vector(seed, 1.0),
            "decoder": vector(seed + 1, 1.0),
            "bias": 2.0,
            "threshold": 1.0,
            "value": 72.0,
        },
        "low_rank": {
            "A": torch.stack([vector(seed + i, 1.0) for i in range(3)]),
            "B": torch.stack([vector(seed + i, 1.0) for i in (1, 2, 3)], dim=1),
            "c": torch.tensor([2.0, -3.0, 1.0]),
            "strength": 10.0,
        },
    }
    if name == "replace" and "positions" not in more:
        more["positions"] = [-1, 0, -3]
    return {"op": name, "point": point, "layers": layers, **fields[name], **more}


def gate(seed: int, when: str = "row") -> dict[str, Any]:
    """More than half open on average, and different from row to row."""
    if seed % 2:
        return {
            "probe": vector(seed), "threshold": -0.1, "sharpness": 5.0, "when": when, "cosine": True
        }  # fmt: skip
    return {"probe": vector(seed, 1.0), "threshold": -2.0, "sharpness": 0.7, "when": when}


def ask(prompt: list[int], *ops: dict[str, Any], **fields: Any) -> Ask:
    return Ask(prompt, {"steering": list(ops), **capture("all"), **fields})


def asks_of(points: Sequence[str]) -> list[Ask]:
    """Each operation at each point: some gated, some limited to positions."""
    places: list[Any] = [None, "predicting", {"start": 3}, ["last_prompt", "all_generated"]]
    found = []
    for i, name in enumerate(STREAM_OPERATIONS):
        for j, point in enumerate(points):
            turn = i + j
            more: dict[str, Any] = {}
            if turn % 3 == 0:
                more["gate"] = gate(turn)
            where = places[turn % 4]
            if name != "replace" and where is not None:
                more["positions"] = where
            layer = (0, models.LAYERS // 2, models.LAYERS - 1)[turn % 3]
            if name == "swap":
                more["direction"] = vector(turn + 50)
            ops = [op(name, point, layer, turn, **more)]
            if name in ("normalize", "swap"):  # there must be something to undo, or to exchange
                ops.insert(0, op("add", point, layer, turn + 50))
            found.append(ask((MIDDLE, SHORT, LONG)[turn % 3], *ops, **capture("all", points)))
    return found


def check(judge: Judge, asks: Sequence[Ask], outputs: Sequence[Any]) -> None:
    for asked, output in zip(asks, outputs, strict=True):
        judge.check(asked, output)


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "cohere"])
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Pair]:
    """Deferred sums, plain sums, norms on both sides, parallel blocks."""
    llm, judge = start(tiny_models, request.param)
    yield llm, judge
    shut_down(llm)


def test_every_operation_at_every_point(pair: Pair) -> None:
    llm, judge = pair
    asks = asks_of(judge.reference.row.adapter.points)
    plain = Ask(MIDDLE, capture("all", judge.reference.row.adapter.points))
    (alone,) = serve(llm, [plain])
    *outputs, beside = serve(llm, [*asks, plain])
    check(judge, asks, outputs)
    assert serving.same_completion(alone.outputs[0], beside.outputs[0]), "a neighbour was touched"


def test_operations_of_all_requests(pair: Pair) -> None:
    """Set beside vectors, for requests that say nothing, before the ops of those that do."""
    llm, judge = pair
    rows = capture("all", judge.reference.row.adapter.points)
    flat, pin = op("ablate", "post_block", [1], 5), op("pin", "post_block", [1], 6)
    plain = Ask(MIDDLE, rows)
    (alone,) = serve(llm, [plain])
    llm.steering.set([flat], tier="ops")
    assert llm.steering.state()["ops"] == ["ablate"] and llm.steering.modules() == {}
    own, apart = Ask(MIDDLE, rows | {"steering": [pin]}), {"steering_inherit_global": False}
    outputs = serve(llm, [plain, own, Ask(MIDDLE, rows | apart)])
    judge.check(Ask(MIDDLE, rows | {"steering": [flat]}), outputs[0])
    judge.check(Ask(MIDDLE, rows | {"steering": [flat, pin]}), outputs[1])
    judge.check(plain, outputs[2])
    with pytest.raises(AssertionError, match="off by"):
        judge.check(plain, outputs[0])
    llm.steering.clear()
    (after,) = serve(llm, [plain])
    assert serving.same_completion(alone.outputs[0], after.outputs[0])


def test_several_operations_and_tiers_together(pair: Pair) -> None:
    """In the order given, behind the additive tiers of the same point."""
    llm, judge = pair
    points = judge.reference.row.adapter.points
    tiers = {
        "steering_vectors": {point: {1: vector(80)} for point in points},
        "decode_steering_vectors": {"post_block": {2: vector(81)}},
    }
    asks = [
        ask(
            LONG,
            op("norm_match", point, 1, 2),
            op("pin", point, [1, 2], 3, positions=[-1, -2, 4]),
            op("replace", point, 1, 4, alpha=0.5, gate=gate(5)),
            op("ablate", point, 1, 6, strength=1.0, gate=gate(7, "last_prompt")),
            op("normalize", point, 1),
            **(tiers | capture("all", points)),
        )
        for point in points
    ]
    check(judge, asks, serve(llm, asks))


def rows_differ(judge: Judge, one: Ask, other: Ask, output: Any) -> float:
    """How far the reference's rows under `other` are from those under `one`, generated part."""
    sequence = [*one.prompt, *output.outputs[0].token_ids][:-1]
    runs = [judge.reference.run(sequence, judge.deltas(a, sequence)).logits for a in (one, other)]
    generated = slice(len(one.prompt), None)
    return serving.relative(runs[1][generated], runs[0][generated])


def test_order(pair: Pair) -> None:
    llm, judge = pair
    add = op("add", "post_block", 1, 8)
    ablate = op("ablate", "post_block", 1, 8, strength=1.0)
    rows = capture("all", judge.reference.row.adapter.points)
    one, other = ask(MIDDLE, add, ablate, **rows), ask(MIDDLE, ablate, add, **rows)
    outputs = serve(llm, [one, other])
    check(judge, [other], outputs[1:])
    judge.check_rows(one, outputs[0].outputs[0])
    assert rows_differ(judge, one, other, outputs[0]) > LEAST_MOVE


def frozen(positions: Any = None, seed: int = 9) -> dict[str, Any]:
    where = {} if positions is None else {"positions": positions}
    more = {"gate": gate(seed + 1, "last_prompt"), "scale": 8.0}
    return op("add", "post_block", 1, seed, **more, **where)


def row_gated(asked: Ask) -> Ask:
    """The twin: gates decided at every row."""
    ops = [o | {"gate": o["gate"] | {"when": "row"}} for o in asked.fields["steering"]]
    return Ask(asked.prompt, {**asked.fields, "steering": ops})


def test_gates_decided_at_the_last_prompt_row(pair: Pair) -> None:
    llm, judge = pair
    rows = capture("all", judge.reference.row.adapter.points)
    asked = zip(
        (MIDDLE, LONG, SHORT), (frozen(), frozen("all_generated", 12), frozen()), strict=True
    )
    asks = [ask(prompt, op, **rows) for prompt, op in asked]
    outputs = serve(llm, asks)
    check(judge, asks, outputs)
    moved = [
        rows_differ(judge, a, row_gated(a), output) for a, output in zip(asks, outputs, strict=True)
    ]
    assert max(moved) > LEAST_MOVE, moved


def serving_asks() -> list[Ask]:
    """What differs by position, phase and step."""
    return [
        ask(LONG, frozen(), op("clamp", "pre_attn", 2, 20)),
        ask(LONG, op("replace", "post_block", 0, 21, positions=[30, 6, 44])),
        Ask(MIDDLE, capture("all")),
        ask(
            LONG, frozen("all_generated", 22), op("pin", "post_attn", 1, 23, positions={"step": 3})
        ),
        ask(MIDDLE, op("norm_match", "pre_attn", 0, 24), op("normalize", "pre_attn", 0)),
        ask(LONG, op("ablate", "post_block", [0, 1], 25, gate=gate(26))),
        ask(LONG, frozen(), steering_vectors={"post_attn": {1: vector(27)}}),
    ]


def test_chunked_prefill(tiny_models: TinyModels) -> None:
    llm, judge = start(
        tiny_models,
        "llama",
        max_num_batched_tokens=24,
        long_prefill_token_threshold=7,
        max_num_seqs=8,
    )
    try:
        asks = serving_asks()
        with serving.watching(llm) as steps:
            outputs = serve(llm, asks)
        assert len(steps.chunks(0)) >= 6 + GENERATED - 1
        check(judge, asks, outputs)
    finally:
        shut_down(llm)


def preempted_ops() -> list[list[dict[str, Any]]]:
    return [
        [frozen()],
        [frozen("all_generated", 30), op("replace", "pre_attn", 1, positions=[40, 3, 25])],
        [op("pin", "post_attn", 2, 31, positions="all_generated")],
        [op("norm_match", "post_block", 0, 32, positions="all_prompt")],
        [frozen(seed=33), op("clamp", "pre_attn", 1, 34)],
        [op("low_rank", "post_block", 1, 35, positions={"start": 7})],
    ]


@pytest.mark.parametrize("cached", [False, True])
def test_preemption(tiny_models: TinyModels, cached: bool) -> None:
    """Decided gates outlive a preemption, and what was generated is recomputed as generated."""
    llm, judge = start(
        tiny_models, "llama", num_gpu_blocks_override=8, enable_prefix_caching=cached
    )
    try:
        asks = [
            ask(prompt_of(20, 90 + i), *ops, max_tokens=45) for i, ops in enumerate(preempted_ops())
        ]
        with serving.watching(llm) as steps:
            outputs = serve(llm, asks)
        assert {0, 1, 2, 4, 5} & set(steps.recomputed), "no operation was recomputed"
        check(judge, asks, outputs)
    finally:
        shut_down(llm)


@pytest.fixture(scope="module")
def caching(tiny_models: TinyModels) -> Iterator[Pair]:
    llm, judge = start(
        tiny_models, "llama", enable_prefix_caching=True, max_model_len=models.MAX_LENGTH
    )
    yield llm, judge
    shut_down(llm)


def one(*ops: dict[str, Any]) -> dict[str, Any]:
    return {"steering": list(ops)}


PIN, ADD = op("pin", "post_block", 1, 40), op("add", "post_block", 1)
RANKED = op("low_rank", "post_block", 1, 40)
CACHE_CASES = {
    "one operation is shared": (one(PIN), one(PIN), FULL),
    "not with plain": ({}, one(PIN), 0),
    "nor plain with it": (one(PIN), {}, 0),
    "another direction": (one(PIN), one(op("pin", "post_block", 1, 41)), 0),
    "another value": (one(PIN), one(PIN | {"value": 30.0}), 0),
    "a low-rank change is shared": (one(RANKED), one(RANKED), FULL),
    "another shift": (one(RANKED), one(RANKED | {"c": torch.tensor([2.0, -3.0, 2.0])}), 0),
    "a rank fewer": (
        one(RANKED),
        one(RANKED | {"A": RANKED["A"][:2], "B": RANKED["B"][:, :2], "c": RANKED["c"][:2]}),
        0,
    ),
    "another layer": (one(PIN), one(op("pin", "post_block", 2, 40)), 0),
    "another order": (
        one(PIN, op("add", "post_block", 1)),
        one(op("add", "post_block", 1), PIN),
        0,
    ),
    "a replaced row leaves the blocks before it": (
        {},
        one(op("replace", "post_block", 1, positions=[40, -2, -1])),
        BLOCK,
    ),
    "generated positions leave the prompt": ({}, one(PIN | {"positions": "all_generated"}), FULL),
    "so does a frozen gate": ({}, one(frozen()), FULL),
    "another gate": (one(PIN | {"gate": gate(1)}), one(PIN | {"gate": gate(2)}), 0),
}


@pytest.mark.parametrize("case", CACHE_CASES)
def test_prefix_cache(caching: Pair, case: str) -> None:
    """Judged against Hugging Face each time, so that a wrong hit shows in the values, too."""
    llm, judge = caching
    assert llm.reset_prefix_cache()
    first, second, shared = CACHE_CASES[case]
    cached = []
    for fields in (first, second, first, second):
        asked = Ask(PROMPT, {**fields, **capture("predicting")})
        (output,) = serve(llm, [asked])
        judge.check(asked, output)
        cached.append(output.num_cached_tokens)
    assert cached == [0, shared, FULL, FULL]


def test_decided_gates_are_not_shared_by_the_cache(caching: Pair) -> None:
    """Turn 2 decides at its own last prompt row: what turn 1 generated is prompt now."""
    llm, judge = caching
    assert llm.reset_prefix_cache()
    asked = Ask(PROMPT[: BLOCK + 8], {**one(frozen()), "max_tokens": 35, **capture("all")})
    (output,) = serve(llm, [asked])
    judge.check(asked, output)
    history = [*asked.prompt, *output.outputs[0].token_ids]
    turn2 = Ask([*history, 7, 8, 9], {**one(frozen()), **capture("predicting")})
    (output,) = serve(llm, [turn2])
    judge.check(turn2, output)
    assert output.num_cached_tokens == BLOCK


def test_replaced_rows_are_those_of_another_run(caching: Pair) -> None:
    """Activation patching: captured rows put in elsewhere come out bit for bit."""
    llm, _ = caching
    source, target = Ask(MIDDLE, capture("all")), prompt_of(17, 99)
    (output,) = serve(llm, [source])
    rows = serving.row_tensors(output.outputs[0])["post_block", 1]
    at = [3, 16, 9]
    patch = op("replace", "post_block", 1, values=rows[at], positions=at)
    patched, plain = serve(llm, [ask(target, patch), Ask(target, capture("all"))])
    got = serving.row_tensors(patched.outputs[0])["post_block", 1]
    assert torch.equal(got[at], rows[at])
    assert not torch.equal(serving.row_tensors(plain.outputs[0])["post_block", 1][at], rows[at])


def test_an_additive_engine_adds_at_positions(tiny_models: TinyModels) -> None:
    """Families left at their default: `add` alone, in its short and its long form."""
    llm, judge = start(tiny_models, "llama", steering_families=["add"])
    try:
        short = Ask(MIDDLE, {"steering_vectors": {"post_block": {1: vector(60)}}, **capture("all")})
        long = ask(MIDDLE, op("add", "post_block", 1, vector=vector(60), scale=1.0))
        some = ask(MIDDLE, op("add", "post_block", 1, positions=[2, -1]))
        outputs = serve(llm, [short, long, some])
        check(judge, [short, long, some], outputs)
        assert serving.same_completion(outputs[0].outputs[0], outputs[1].outputs[0])
        assert not serving.same_completion(outputs[0].outputs[0], outputs[2].outputs[0])
        for asked in (ask(SHORT, PIN), ask(SHORT, op("add", "pre_attn", 0, gate=gate(1)))):
            with pytest.raises(ValueError, match=r"steering\[0\]\.(op|gate): .*which has add$"):
                serve(llm, [asked])
    finally:
        shut_down(llm)
