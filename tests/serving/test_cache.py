# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: what is shared, what must not be, and what a capture keeps out of it.

Blocks are 32 positions, so a prompt of 70 tokens has two full ones: 64 cached tokens are the most
that a request of that prompt can have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

# V2 has the tests of a cache that is shared and cut; keys of blocks are the scheduler's, whichever
# runner there is.
pytestmark = pytest.mark.full

BLOCK = 32
PROMPT = prompt_of(70, 10)
FULL = 64

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=True,
        max_model_len=models.MAX_LENGTH,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


@pytest.fixture
def ask(pair: tuple[LLM, Judge]) -> Iterator[Any]:
    """`ask(fields, prompt)` serves one request, judges it, and returns its cached tokens."""
    llm, judge = pair
    assert llm.reset_prefix_cache()

    def served(fields: Fields, prompt: list[int] = PROMPT) -> int:
        request = Ask(prompt, fields)
        (output,) = serve(llm, [request])
        judge.check(request, output)
        tokens.append([*prompt, *output.outputs[0].token_ids])
        cached: int = output.num_cached_tokens
        return cached

    tokens: list[list[int]] = []
    served.tokens = tokens  # type: ignore[attr-defined]
    yield served


BASE: Fields = {"steering_vectors": {"post_block": {1: vector(20)}}}
SAME: Fields = {"steering_vectors": {"post_block": {1: {"vector": 2 * vector(20), "scale": 0.5}}}}
OTHER: Fields = {"steering_vectors": {"post_block": {1: vector(21)}}}
ELSEWHERE: Fields = {"steering_vectors": {"post_block": {2: vector(20)}}}
PREFILL: Fields = {"prefill_steering_vectors": {"post_block": {1: vector(20)}}}
DECODE: Fields = {"decode_steering_vectors": {"post_block": {1: vector(20)}}}
PLAIN: Fields = {}


@pytest.mark.v2
@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param(PLAIN, PLAIN, FULL, id="plain is shared"),
        pytest.param(BASE, BASE, FULL, id="one content is shared"),
        pytest.param(BASE, SAME, FULL, id="content counts, not how it was said"),
        pytest.param(BASE, PREFILL, FULL, id="a prompt block depends on the prompt's content"),
        pytest.param(PLAIN, DECODE, FULL, id="decode-only uses plain prompt blocks"),
        pytest.param(DECODE, PLAIN, FULL, id="plain uses prompt blocks of decode-only"),
        pytest.param(BASE, PLAIN, 0, id="steered is not served to plain"),
        pytest.param(PLAIN, BASE, 0, id="plain is not served to steered"),
        pytest.param(BASE, DECODE, 0, id="steered is not served to decode-only"),
        pytest.param(PREFILL, PLAIN, 0, id="prefill-only is not served to plain"),
        pytest.param(BASE, OTHER, 0, id="another vector"),
        pytest.param(BASE, ELSEWHERE, 0, id="another layer"),
    ],
)
def test_sharing(ask: Any, first: Fields, second: Fields, cached: int) -> None:
    """Judged against Hugging Face both times, so a wrong hit also shows in the values."""
    assert ask(first) == 0
    assert ask(second) == cached
    assert ask(first) == FULL, "the second request spoiled the first one's blocks"


@pytest.mark.v2
@pytest.mark.parametrize(
    ("positions", "cached"),
    [
        ("last_prompt", FULL),
        ("all_generated", FULL),
        ("last_generated", FULL),
        ([-1, FULL], FULL),
        ([FULL - 1], FULL - BLOCK),
        ([BLOCK], BLOCK),
        ([BLOCK - 1, -1], 0),
        ("all_prompt", 0),
        ("all", 0),
    ],
)
@pytest.mark.parametrize("fields", [PLAIN, BASE, DECODE], ids=["plain", "base", "decode"])
def test_capture_caps_the_hit(ask: Any, positions: Any, cached: int, fields: Fields) -> None:
    """The hit ends below the lowest captured position; the rows are computed and right."""
    assert ask(fields) == 0
    assert ask({**fields, **capture(positions)}) == cached


@pytest.mark.v2
def test_a_mean_is_of_computed_rows(ask: Any) -> None:
    """Positions that are in the cache are computed again; those below the first are not."""
    assert ask(BASE) == 0
    for positions, cached in (([BLOCK + 3, -2], BLOCK), ("all_prompt", 0)):
        field = capture(positions)["capture"]["inline"] | {"reduce": "mean"}
        assert ask({**BASE, "capture": {"inline": field}}) == cached


@pytest.mark.v2
@pytest.mark.parametrize("fields", [PLAIN, BASE, {**BASE, **capture("last_prompt")}])
def test_a_tenant_with_a_salt_finds_no_block_of_another(
    pair: tuple[LLM, Judge], fields: Fields
) -> None:
    """With the same vectors, too; and its own blocks are found again, under its own vectors only.
    So nobody learns from what was cached what another asked for."""
    llm, _ = pair
    assert llm.reset_prefix_cache()

    def cached(salt: str, fields: Fields) -> int | None:
        params = Ask(PROMPT, fields).params()
        prompt: Any = {"prompt_token_ids": PROMPT, "cache_salt": salt}
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(salt, fields) for salt in ("one", "other", "one")] == [0, 0, FULL]
    assert cached("one", OTHER) == 0
    assert serve(llm, [Ask(PROMPT, fields)])[0].num_cached_tokens == 0


@pytest.fixture
def by_any_way(pair: tuple[LLM, Judge]) -> Iterator[Any]:
    """`serve(fields, tiers, meant)` serves one request under global tiers, judges it as one that
    brings `meant` itself, and returns its cached tokens."""
    llm, judge = pair
    assert llm.reset_prefix_cache()
    llm.steering.register_module("module", BASE["steering_vectors"])

    def served(fields: Fields, tiers: dict[str, Any], meant: Fields) -> int:
        llm.steering.set_tiers(tiers, replace=True)
        (output,) = serve(llm, [Ask(PROMPT, fields)])
        judge.check(Ask(PROMPT, meant), output)
        cached: int = output.num_cached_tokens
        return cached

    yield served
    llm.steering.clear()
    llm.steering.unregister_module("module")


ONE, TWO = BASE["steering_vectors"], OTHER["steering_vectors"]
WAYS: dict[str, tuple[Fields, dict[str, Any]]] = {
    "inline": (BASE, {}),
    "module": ({"steering_modules": ["module"]}, {}),
    "global": ({}, {"base": ONE}),
    "global, prompts": ({}, {"prefill": ONE, "decode": ONE}),
}


@pytest.mark.parametrize("first", WAYS)
def test_a_vector_is_shared_whoever_brings_it(by_any_way: Any, first: str) -> None:
    assert by_any_way(*WAYS[first], BASE) == 0
    assert [by_any_way(*way, BASE) for way in WAYS.values()] == [FULL] * len(WAYS)
    # Another vector brought the same ways is not.
    assert by_any_way({}, {"base": TWO}, OTHER) == 0
    assert by_any_way(OTHER, {}, OTHER) == FULL


def test_two_vectors_are_shared_where_workers_add_the_same(by_any_way: Any) -> None:
    both = {**BASE, "prefill_steering_vectors": TWO, "decode_steering_vectors": TWO}
    assert by_any_way(BASE, {"base": TWO}, both) == 0
    for fields, tiers in (
        (OTHER, {"base": ONE}),
        ({}, {"base": ONE, "prefill": TWO, "decode": TWO}),
        ({**OTHER, "steering_modules": ["module"]}, {}),
    ):
        assert by_any_way(fields, tiers, both) == FULL
    # One request's own vectors are added up in float64, and rounded once.
    assert by_any_way(both, {}, both) == 0
    alone = {**BASE, "steering_inherit_global": False}
    assert by_any_way(alone, {"base": TWO}, BASE) == 0


def test_capturing_fills_the_cache(ask: Any) -> None:
    assert ask(capture("all")) == 0
    assert ask(PLAIN) == FULL
    assert ask(capture("all_prompt")) == 0


@pytest.mark.parametrize(
    ("fields", "following", "cached"),
    [
        pytest.param(PLAIN, PLAIN, FULL, id="plain"),
        pytest.param(BASE, BASE, FULL, id="steered throughout"),
        pytest.param(BASE, PLAIN, 0, id="steered, then plain"),
        # In turn 2 what was generated in turn 1 is prompt: unsteered, where turn 1 steered it.
        pytest.param(DECODE, DECODE, BLOCK, id="decode-only"),
        pytest.param(DECODE, PLAIN, BLOCK, id="decode-only, then plain"),
        pytest.param(PLAIN, DECODE, FULL, id="plain, then decode-only"),
        pytest.param(PREFILL, PREFILL, BLOCK, id="prefill-only"),
        pytest.param(PREFILL, BASE, BLOCK, id="prefill-only, then steered throughout"),
    ],
)
def test_second_turn(ask: Any, fields: Fields, following: Fields, cached: int) -> None:
    """Turn 2's prompt is turn 1 and more; turn 1's phase boundary lies inside block 2."""
    assert ask({**fields, "max_tokens": 35}, PROMPT[: BLOCK + 8]) == 0
    history = ask.tokens[-1]
    assert ask({**following, **capture([-1, -3])}, [*history, 7, 8, 9]) == cached


@pytest.mark.v2
def test_one_batch(pair: tuple[LLM, Judge]) -> None:
    """Requests of one prompt and different contents, at once, with a warm cache for two of them."""
    llm, judge = pair
    assert llm.reset_prefix_cache()
    serve(llm, [Ask(PROMPT), Ask(PROMPT, BASE)])
    asks = [
        Ask(PROMPT, {**fields, **capture("predicting")})
        for fields in (PLAIN, BASE, OTHER, DECODE, PREFILL, ELSEWHERE)
    ]
    outputs = serve(llm, asks)
    for request, output in zip(asks, outputs, strict=True):
        judge.check(request, output)
    assert [o.num_cached_tokens for o in outputs] == [FULL, FULL, 0, FULL, FULL, 0]
    assert not serving.same_completion(outputs[0].outputs[0], outputs[1].outputs[0])


LONG = prompt_of(100, 12)
"""Three full blocks."""


@pytest.mark.parametrize("fields", [PLAIN, BASE, DECODE], ids=["plain", "base", "decode"])
@pytest.mark.parametrize(
    ("positions", "start", "computed", "resumed"),
    [
        pytest.param(None, 96, 104, 96, id="no capture"),
        pytest.param("last_prompt", 96, 96, 96, id="last prompt position"),
        pytest.param([50, 80], 32, 72, 64, id="the first delivered, the second not"),
        pytest.param([0, -1], 0, 40, 96, id="further than it had computed"),
        pytest.param("all_prompt", 0, 40, 32, id="all, one chunk"),
        pytest.param("all_prompt", 0, 80, 64, id="all, two chunks"),
        pytest.param("all", 0, 104, 96, id="all, generating"),
    ],
)
def test_resumed(
    pair: tuple[LLM, Judge],
    monkeypatch: pytest.MonkeyPatch,
    fields: Fields,
    positions: Any,
    start: int,
    computed: int,
    resumed: int,
) -> None:
    """Thrown out once it has computed so much: what is not delivered is computed, and no more."""
    llm, judge = pair
    engine, scheduler = llm.llm_engine, serving.scheduler_of(llm)
    assert llm.reset_prefix_cache()
    serve(llm, [Ask(LONG, fields)])
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 40)
    wanted = {} if positions is None else capture(positions)
    ask = Ask(LONG, {**fields, **wanted, "max_tokens": 12})
    name = engine.add_request("resumed", {"prompt_token_ids": LONG}, ask.params())
    outputs: list[Any] = []
    hits: list[int] = []

    def step() -> None:
        waits = request.num_computed_tokens == 0
        outputs.extend(engine.step())
        if waits:
            last = steps.outputs[-1].num_scheduled_tokens[name]
            hits.append(request.num_computed_tokens - last)

    request = scheduler.requests[name]
    with serving.watching(llm) as steps:
        while request.num_computed_tokens < computed:
            step()
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.clear()
        while engine.has_unfinished_requests():
            step()
    assert hits == [start, resumed]
    judge.check(ask, outputs[-1])
    assert outputs[-1].num_cached_tokens == start
