# SPDX-License-Identifier: Apache-2.0
"""Rows of cached prefixes: a capture whose rows are kept computes nothing of them again, and gets
the bits that the request before it had, under all that a block's identity covers.

Blocks are 32 positions. Every answer is judged against Hugging Face, so rows of another request
would show. The twins are engines and requests that must compute: tests/serving/test_cache.py has
them without the option.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.serving.test_async_scheduling import asynchronous, need_asynchronous
from tests.serving.test_speculation import keep_engines_startable
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, row_tensors, serve, vector
from vllm import LLM
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    Location,
    RequestInfo,
    RowBatch,
)

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

BLOCK = 32
PROMPT = prompt_of(70, 30)
FULL = 64
PLENTY = 1 << 24

PLAIN: dict[str, Any] = {}
BASE = {"steering_vectors": {"post_block": {1: vector(20)}}}
OTHER = {"steering_vectors": {"post_block": {1: vector(21)}}}
LAST = {"steering_vectors": {"post_block": {models.LAYERS - 1: vector(22)}}}
"""Changes no key or value of any block, but the last row of the stream."""
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(20)}}}
PREFILL = {"prefill_steering_vectors": {"post_block": {1: vector(20)}}}


class Heard(CaptureConsumer):
    """Returns the positions and values that it got, in the order in which they came."""

    location: ClassVar[Location] = "engine"

    def open(self, request: RequestInfo) -> CaptureSession:
        return HeardRows()


class HeardRows(CaptureSession):
    def __init__(self) -> None:
        self.batches: list[RowBatch] = []

    def rows(self, batch: RowBatch) -> None:
        self.batches.append(batch)

    def done(self, end: Any) -> Any:
        return {
            "positions": [p for batch in self.batches for p in batch.positions.tolist()],
            "values": torch.cat([batch.values for batch in self.batches], dim=1).tolist(),
        }


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 40},
    "async": {},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
}


def start(tiny_models: TinyModels, **options: Any) -> tuple[LLM, Judge]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    settings: dict[str, Any] = {
        "enable_steering": True,
        "capture_consumers": ["inline", {"consumer": Heard, "instance_name": "heard"}],
        "enable_prefix_caching": True,
        "max_model_len": models.MAX_LENGTH,
        "capture_keep_bytes": PLENTY,
    }
    llm = make_llm(path, **{**settings, **options})
    return llm, Judge(Reference(row, models.load(row, path)))


@pytest.fixture(scope="module", params=WAYS)
def pair(
    request: pytest.FixtureRequest, tiny_models: TinyModels, runner: str
) -> Iterator[tuple[LLM, Judge]]:
    if request.param == "drafts":
        if runner == "v2":
            pytest.skip("upstream's ngram drafter does not run under the Triton interpreter")
        keep_engines_startable()
    ahead = request.param == "async"
    with asynchronous() if ahead else nullcontext():
        llm, judge = start(tiny_models, **WAYS[request.param])
    if ahead:
        need_asynchronous(llm)
    yield llm, judge
    shut_down(llm)


@pytest.fixture
def ask(pair: tuple[LLM, Judge]) -> Iterator[Any]:
    """`ask(fields, prompt)` serves one request, judges it, and returns its output."""
    llm, judge = pair
    assert llm.reset_prefix_cache()

    def served(fields: dict[str, Any], prompt: list[int] = PROMPT, **more: Any) -> Any:
        request = Ask(prompt, fields)
        given: Any = {"prompt_token_ids": prompt, **more}
        (output,) = llm.generate([given], request.params(), use_tqdm=False)
        judge.check(request, output)
        return output

    yield served


def kept(llm: LLM) -> Any:
    return serving.scheduler_of(llm).interventions.kept


def assert_same_bits(one: Any, other: Any, stop: int) -> None:
    """The rows of positions before `stop` are equal, and those behind it need not be."""
    rows, again = row_tensors(one.outputs[0]), row_tensors(other.outputs[0])
    assert rows.keys() == again.keys()
    for site, values in rows.items():
        assert torch.equal(values[:stop], again[site][:stop]), site
        assert not torch.equal(values[: stop - 1], again[site][1:stop]), "all rows are alike"


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param(PLAIN, PLAIN, FULL, id="plain"),
        pytest.param(BASE, BASE, FULL, id="one content"),
        pytest.param(BASE, PREFILL, FULL, id="of prompts alone"),
        pytest.param(PLAIN, DECODE, FULL, id="of what is generated"),
        pytest.param(BASE, PLAIN, 0, id="steered, plain"),
        pytest.param(PLAIN, BASE, 0, id="plain, steered"),
        pytest.param(BASE, OTHER, 0, id="another vector"),
        pytest.param(PLAIN, LAST, 0, id="at the last layer"),
        pytest.param(LAST, PLAIN, 0, id="at the last layer, plain"),
        pytest.param(LAST, LAST, FULL, id="at the last layer, again"),
    ],
)
def test_rows_of_a_cached_prompt(
    ask: Any, first: dict[str, Any], second: dict[str, Any], cached: int
) -> None:
    one = ask({**first, **capture("all")})
    assert one.num_cached_tokens == 0
    two = ask({**second, **capture("all")})
    assert two.num_cached_tokens == cached
    if cached:
        assert_same_bits(one, two, cached)
    else:
        three = ask({**first, **capture("all")})
        assert three.num_cached_tokens == FULL, "the second request spoiled the first one's rows"
        assert_same_bits(one, three, FULL)


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param(capture("all"), capture("all_prompt"), FULL, id="fewer positions"),
        pytest.param(capture("all_prompt"), capture([3, 40, 50]), FULL, id="some positions"),
        pytest.param(capture("all"), capture("all", layers=[2, 0]), FULL, id="fewer layers"),
        pytest.param(capture("all"), capture("all", ["post_attn"]), FULL, id="one point"),
        pytest.param(capture("all", layers=[1]), capture("all"), 0, id="more layers"),
        pytest.param(capture("all", ["pre_attn"]), capture("all", ["post_attn"]), 0, id="others"),
        pytest.param(capture([*range(32, 70)]), capture("all"), 0, id="the second block alone"),
        pytest.param(capture([*range(32, 70)]), capture([33]), FULL, id="of that one"),
        pytest.param(capture([*range(31), 40]), capture([3]), 0, id="a block with a gap"),
        pytest.param(PLAIN, capture("all"), 0, id="nothing captured before"),
    ],
)
def test_what_is_kept(ask: Any, first: Any, second: Any, cached: int) -> None:
    """Rows of whole blocks, for whoever wants no other sites; judged as ever where they are not."""
    ask(first)
    assert ask(second).num_cached_tokens == cached


def test_the_hit_ends_where_kept_rows_end(ask: Any) -> None:
    """A longer prompt finds the blocks of two requests; rows are kept of the first one's alone."""
    longer = [*PROMPT[:FULL], *prompt_of(26, 31)]
    ask(capture("all"))
    assert ask(PLAIN, [*longer[:-2], 1, 2]).num_cached_tokens == FULL
    assert ask(capture("all"), longer).num_cached_tokens == FULL


def test_salts_part_rows(ask: Any) -> None:
    first = ask(capture("all"), cache_salt="one")
    assert ask(capture("all"), cache_salt="other").num_cached_tokens == 0
    assert ask(capture("all")).num_cached_tokens == 0
    again = ask(capture("all"), cache_salt="one")
    assert again.num_cached_tokens == FULL
    assert_same_bits(first, again, FULL)


def test_global_tiers_part_rows(pair: tuple[LLM, Judge], ask: Any) -> None:
    """Rows say the version under which they are delivered, with which those that were kept agree:
    it says what acts."""
    llm, judge = pair

    def served(meant: dict[str, Any]) -> Any:
        (output,) = serve(llm, [Ask(PROMPT, capture("all"))])
        judge.check(Ask(PROMPT, {**meant, **capture("all")}), output)
        return output

    try:
        assert served(PLAIN).num_cached_tokens == 0
        llm.steering.set_tiers({"base": BASE["steering_vectors"]}, replace=True)
        steered = served(BASE)
        assert steered.num_cached_tokens == 0
        llm.steering.clear()
        assert served(PLAIN).num_cached_tokens == FULL
        llm.steering.set_tiers({"base": BASE["steering_vectors"]}, replace=True)
        again = served(BASE)
        assert again.num_cached_tokens == FULL
        assert_same_bits(steered, again, FULL)
        for rows in again.outputs[0].capture_results["inline"].payload.values():
            assert set(rows.versions.tolist()) == {llm.steering.state()["version"]}
    finally:
        llm.steering.clear()


@pytest.mark.parametrize("fields", [PLAIN, BASE, DECODE], ids=["plain", "base", "decode"])
def test_second_turn(ask: Any, fields: dict[str, Any]) -> None:
    """What was generated is kept, too; where the next turn steers it otherwise it is computed."""
    length = {"max_tokens": 35}
    first = ask({**fields, **length, **capture("all")}, PROMPT[: BLOCK + 8])
    history = [*PROMPT[: BLOCK + 8], *first.outputs[0].token_ids, 7, 8, 9]
    second = ask({**fields, **capture("all")}, history)
    cached = BLOCK if fields is DECODE else FULL
    assert second.num_cached_tokens == cached
    assert_same_bits(first, second, cached)


def test_a_consumer_gets_kept_rows_once_and_in_order(ask: Any) -> None:
    hooks = {"post_block": "all"}
    both = {"heard": {"hooks": hooks, "positions": "all"}} | capture("all")["capture"]
    first = ask({"capture": both})
    again = ask({"capture": both})
    few = {"hooks": hooks, "positions": [5, 20, 34, 66]}
    alone = ask({"capture": {"heard": few, "inline": few}})
    assert [first.num_cached_tokens, again.num_cached_tokens] == [0, FULL]
    assert alone.num_cached_tokens == FULL
    one, two, three = (o.outputs[0].capture_results["heard"].payload for o in (first, again, alone))
    assert two["positions"] == one["positions"] == [*range(len(PROMPT) + serving.GENERATED - 1)]
    values, same = torch.tensor(one["values"]), torch.tensor(two["values"])
    assert torch.equal(values[:, :FULL], same[:, :FULL])
    assert three["positions"] == [5, 20, 34, 66]
    assert torch.equal(torch.tensor(three["values"])[:, :3], values[:, [5, 20, 34]])


def test_what_is_made_of_rows_is_made_anew(ask: Any) -> None:
    """Means, and whatever else the device makes of rows; a request that wants both, too."""
    ask(capture("all"))
    mean = capture("all_prompt")["capture"]["inline"] | {"reduce": "mean"}
    assert ask({"capture": {"inline": mean}}).num_cached_tokens == 0
    both = {"inline": mean, "heard": {"hooks": {"post_block": [1]}, "positions": "all"}}
    assert ask({"capture": both}).num_cached_tokens == 0


def test_many_at_once(pair: tuple[LLM, Judge]) -> None:
    """Requests of few prompts and contents in random order, in batches: what is found differs from
    run to run, and never what it is."""
    llm, judge = pair
    assert llm.reset_prefix_cache()
    chance = random.Random(7)
    prompts = [prompt_of(70, 40), prompt_of(70, 40)[:50] + prompt_of(25, 41), prompt_of(40, 42)]
    wants = [
        capture("all"),
        capture("all", layers=[1]),
        capture("all_prompt", ["post_block"]),
        capture([2, 33, -1]),
        PLAIN,
    ]
    found = 0
    for _ in range(4):
        asks = [
            Ask(chance.choice(prompts), {**chance.choice([PLAIN, BASE, DECODE]), **fields})
            for fields in chance.choices(wants, k=8)
        ]
        outputs = serve(llm, asks)
        for request, output in zip(asks, outputs, strict=True):
            judge.check(request, output)
            found += bool(output.num_cached_tokens) and "all" in str(request.fields.get("capture"))
    assert found > 5


def test_a_reset_forgets_rows(pair: tuple[LLM, Judge], ask: Any) -> None:
    llm, _ = pair
    ask(capture("all"))
    assert kept(llm).stats().num_bytes > 0
    assert llm.reset_prefix_cache()
    assert kept(llm).stats().num_bytes == 0
    assert ask(capture("all")).num_cached_tokens == 0


def test_what_is_asked_and_found_is_counted(pair: tuple[LLM, Judge], ask: Any) -> None:
    llm, _ = pair
    kept(llm).stats()
    ask(capture("all"))
    stats = kept(llm).stats()
    assert (stats.queries, stats.hits) == (len(PROMPT) - 1, 0)
    row = models.HIDDEN * 4 * models.LAYERS * 3
    assert stats.num_bytes == FULL * row
    ask(capture([*range(40)]))
    ask(PLAIN)
    stats = kept(llm).stats()
    assert (stats.queries, stats.hits, stats.num_bytes) == (40, 40, FULL * row)


def test_a_block_begun_under_something_else(
    pair: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is taken out in the middle of a block, and what acts changes before it goes on:
    the block's rows are of both, and kept as rows of neither."""
    llm, judge = pair
    engine, scheduler = llm.llm_engine, serving.scheduler_of(llm)
    assert llm.reset_prefix_cache()
    ask = Ask(PROMPT, capture([*range(33, 50)]))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "max_num_scheduled_tokens", 40)
            prompt: Any = {"prompt_token_ids": PROMPT}
            name = engine.add_request("0", prompt, Ask(PROMPT, capture("all")).params())
            request = scheduler.requests[name]
            while not request.num_computed_tokens:
                engine.step()
            assert request.num_computed_tokens == 40
            while request.interventions.next_row < 40:
                engine.step()
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.clear()
            llm.steering.set_tiers({"base": BASE["steering_vectors"]}, replace=True)
            while engine.has_unfinished_requests():
                engine.step()
        (output,) = serve(llm, [ask])
        judge.check(Ask(PROMPT, {**BASE, **ask.fields}), output)
        assert output.num_cached_tokens == BLOCK, "the blocks are steered, and the second computed"
    finally:
        llm.steering.clear()


class TestSmall:
    """Engines with room for few rows, or few blocks."""

    def test_the_oldest_make_room(self, tiny_models: TinyModels) -> None:
        """Room for two prompts and the block that a third request begins; results that hold rows
        keep their memory."""
        row = models.HIDDEN * 4 * models.LAYERS * 3
        room = (2 * FULL + BLOCK) * row
        llm, judge = start(tiny_models, capture_keep_bytes=room)
        prompts = [prompt_of(70, 50 + i) for i in range(3)]

        def cached(number: int) -> int:
            ask = Ask(prompts[number], capture("all"))
            (output,) = serve(llm, [ask])
            judge.check(ask, output)
            outputs.append(output)
            return int(output.num_cached_tokens)

        outputs: list[Any] = []
        try:
            assert [cached(0), cached(1)] == [0, 0]
            assert [cached(0), cached(1), cached(0)] == [FULL] * 3
            held, before = outputs[2], row_tensors(outputs[2].outputs[0])
            copies = {site: values.clone() for site, values in before.items()}
            outputs.clear()
            assert cached(2) == 0 and kept(llm).stats().num_bytes <= room
            assert cached(0) == FULL, "it was asked for last"
            assert cached(1) == 0, "it made room"
            for _ in range(3):
                cached(2), cached(1)
            assert all(torch.equal(values, copies[site]) for site, values in before.items())
            del held, before
            outputs.clear()
            gc.collect()
            assert cached(0) == 0, "its rows were evicted"
            assert cached(0) == FULL
        finally:
            shut_down(llm)

    @pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "async"])
    def test_preempted_requests(self, tiny_models: TinyModels, ahead: bool) -> None:
        """Too few KV blocks for the batch, global tiers that change in its middle: what was begun
        under the first is not kept as a row of the second."""
        with asynchronous() if ahead else nullcontext():
            llm, judge = start(tiny_models, num_gpu_blocks_override=8, max_num_seqs=8)
        try:
            asks = [Ask(prompt_of(20, 60 + i % 3), capture("all")) for i in range(6)]
            for ask in asks:
                ask.fields["max_tokens"] = 45  # type: ignore[index]
            with serving.watching(llm) as steps:
                engine = llm.llm_engine
                for i, ask in enumerate(asks):
                    prompt: Any = {"prompt_token_ids": ask.prompt}
                    engine.add_request(str(i), prompt, ask.params())
                for _ in range(30):
                    engine.step()
                llm.steering.set_tiers({"base": BASE["steering_vectors"]}, replace=True)
                while engine.has_unfinished_requests():
                    engine.step()
            assert steps.preempted
            # Rows of requests that saw both are not judged; those that come after are.
            for _ in range(2):
                for meant, tiers in ((BASE, BASE["steering_vectors"]), (PLAIN, {})):
                    llm.steering.set_tiers({"base": tiers} if tiers else {}, replace=True)
                    outputs = serve(llm, asks)
                    for ask, output in zip(asks, outputs, strict=True):
                        judge.check(Ask(ask.prompt, {**ask.fields, **meant}), output)
        finally:
            shut_down(llm)


def test_in_a_process_of_its_own(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Rows are read where they are kept, and stay as they are when others take their place."""
    if runner == "v2":
        pytest.skip("the frontend is the same")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    row = models.HIDDEN * 4 * models.LAYERS * 3
    llm, judge = start(tiny_models, capture_keep_bytes=3 * FULL * row)
    try:
        places = llm.llm_engine.engine_core.row_places  # type: ignore[attr-defined]
        prompts = [prompt_of(70, 70 + i) for i in range(6)]
        hits, results = 0, []
        for number in (0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 4, 0, 0):
            ask = Ask(prompts[number], capture("all"))
            (output,) = serve(llm, [ask])
            hits += output.num_cached_tokens == FULL
            results.append((ask, output))
        assert hits >= 4 and places.kept.size > 0
        for ask, output in results:
            judge.check(ask, output)
        results.clear()
        del output
        gc.collect()
        assert places.kept.held == 0
    finally:
        llm.llm_engine.engine_core.shutdown()
        gc.collect()
