# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafts are steered as generated tokens, and rows of rejected ones never
leave. Upstream's ngram drafter does not run under the Triton interpreter, so this is V1 only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick

DRAFTS = 3
ALL_SITES = len(STREAM_POINTS) * models.LAYERS
ROW_BYTES = models.HIDDEN * 4
TIGHT = 6
"""Positions whose rows fit into the small buffer: more than 1 + DRAFTS, less than twice that."""
LIMIT = {"max_tokens": 24}

# The same few tokens again and again, so that the drafter has something to propose.
PATTERN = prompt_of(4, 100)
PROMPT = PATTERN * 5
OTHER = prompt_of(3, 101) * 4


@cache
def keep_engines_startable() -> None:
    """Upstream's CPU worker looks for kernels among the attributes of all imported modules, with
    `vars(x).get`. llvmlite, which the ngram drafter imports, has an object that makes up any
    attribute, `__dict__` too, and no engine of this process starts after that."""
    from llvmlite.binding import ffi

    made_up = ffi._lib_wrapper.__getattr__

    def honest(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return made_up(self, name)

    ffi._lib_wrapper.__getattr__ = honest


def start(tiny_models: TinyModels, **options: Any) -> tuple[LLM, Judge]:
    keep_engines_startable()
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        **options,
    )
    return llm, Judge(Reference(row, models.load(row, path)))


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    llm, judge = start(tiny_models)
    yield llm, judge
    shut_down(llm)


def asks() -> list[Ask]:
    base = {"steering_vectors": {"pre_attn": {0: vector(100)}}}
    prefill = {"prefill_steering_vectors": {"post_attn": {1: vector(100)}}}
    decode = {"decode_steering_vectors": {"post_block": {1: vector(101)}}}
    fields: list[dict[str, Any]] = [
        capture("all"),
        {**base, **capture("all")},
        {**decode, **capture("all_generated")},
        {**prefill, **decode, **capture([2, 21, 22, 25, 30, 38])},
        capture({"start": 1, "stop": 40, "step": 6}),
        {**base, **capture("last_generated", ("post_block",), [1])},
        {**decode, **capture("last_prompt")},
        {**decode, **capture("all", ("embed", "mlp_out", "final"))},
        {},
        prefill,
    ]
    return [Ask(PROMPT, {**LIMIT, **f}) for f in fields] + [
        Ask(OTHER, {**LIMIT, **capture("predicting")}),
        Ask(OTHER, {**LIMIT, **decode, **capture(["last_prompt", 13, 16, 19])}),
    ]


def accepted_and_rejected(steps: serving.Steps, outputs: list[Any]) -> tuple[int, int]:
    """Draft tokens of a run. Every step of a request past its prompt gives one token more than it
    accepts."""
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    giving = sum(len(steps.chunks(i)) for i in range(len(outputs)))
    accepted = generated - giving
    return accepted, steps.drafted - accepted


def test_speculation(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    batch = asks()
    with serving.watching(llm) as steps:
        outputs = serve(llm, batch)
    accepted, rejected = accepted_and_rejected(steps, outputs)
    assert accepted >= 10 and rejected >= 10, (accepted, rejected)
    for ask, output in zip(batch, outputs, strict=True):
        judge.check(ask, output)


@pytest.fixture(scope="module")
def tight(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Rows for one request's drafts and half of another's, and too few KV blocks."""
    llm, judge = start(
        tiny_models,
        capture_buffer_bytes=TIGHT * ALL_SITES * ROW_BYTES,
        num_gpu_blocks_override=8,
        enable_prefix_caching=True,
    )
    yield llm, judge
    shut_down(llm)


def test_tight_row_budget(tight: tuple[LLM, Judge]) -> None:
    """Rows of a request's drafts are all in a step or none."""
    llm, judge = tight
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks())
    assert steps.largest_row_count <= TIGHT * ALL_SITES
    for ask, output in zip(asks(), outputs, strict=True):
        judge.check(ask, output)


def test_prompt_padded_with_drafts(tight: tuple[LLM, Judge]) -> None:
    """Upstream pads a prompt of which one token is left to draft size: not to be cut either."""
    llm, judge = tight
    prompt = (PATTERN * 9)[:33]
    serve(llm, [Ask(prompt)])
    batch = [Ask(prompt, capture("predicting"))] * 3
    with serving.watching(llm) as steps:
        outputs = serve(llm, batch)
    for ask, output in zip(batch, outputs, strict=True):
        judge.check(ask, output)
        assert output.num_cached_tokens == 32
    assert [steps.chunks(i)[0] for i in range(3)] == [DRAFTS + 1] * 3


def test_recomputed_tokens_are_no_drafts(tight: tuple[LLM, Judge]) -> None:
    """What a preemption threw away is more than the buffer holds at once: cut, not for ever 0."""
    llm, judge = tight
    decode = {"decode_steering_vectors": {"post_block": {1: vector(103)}}}
    batch = [
        Ask(prompt_of(32, 110 + i), {"max_tokens": 60, **decode, **capture("all_generated")})
        for i in range(3)
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, batch)
    assert steps.recomputed, "nothing was preempted"
    for ask, output in zip(batch, outputs, strict=True):
        judge.check(ask, output)


def test_buffer_too_small_for_the_drafts_is_refused(tiny_models: TinyModels) -> None:
    """A request whose drafts never fit at once must not wait for ever."""
    llm, judge = start(tiny_models, capture_buffer_bytes=2 * ALL_SITES * ROW_BYTES)
    try:
        with pytest.raises(ValueError, match=f"{(DRAFTS + 1) * ALL_SITES * ROW_BYTES} bytes"):
            serve(llm, [Ask(PROMPT, {**LIMIT, **capture("all")})])
        twin = Ask(PROMPT, {**LIMIT, **capture("all_prompt")})
        judge.check(twin, serve(llm, [twin])[0])
    finally:
        shut_down(llm)
