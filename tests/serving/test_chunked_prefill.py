# SPDX-License-Identifier: Apache-2.0
"""Prompts computed in pieces: by the token budget, by the long-prefill threshold, by the rows that
fit into the capture buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import GENERATED, Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

LONG, MIDDLE, SHORT = prompt_of(41, 40), prompt_of(17, 41), prompt_of(5, 42)
ALL_SITES = len(STREAM_POINTS) * models.LAYERS
ROW_BYTES = models.HIDDEN * 4


def start(tiny_models: TinyModels, **options: Any) -> tuple[LLM, Judge]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=False,
        max_num_seqs=8,
        **options,
    )
    return llm, Judge(Reference(row, models.load(row, path)))


BASE = {"steering_vectors": {"pre_attn": {0: vector(40)}, "post_block": {2: vector(41)}}}
PREFILL = {"prefill_steering_vectors": {"post_attn": {1: vector(40)}}}
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(40)}}}

ASKS = [
    Ask(LONG, {**BASE, **capture("all")}),
    Ask(MIDDLE),
    Ask(LONG, {**PREFILL, **capture(["last_prompt", 6, 7, 8, 20])}),
    Ask(LONG, {**DECODE, **capture("predicting")}),
    Ask(SHORT, {**BASE, **capture("last_generated")}),
    Ask(LONG, capture({"start": 1, "stop": 46, "step": 3})),
    Ask(SHORT, {**PREFILL, **capture("all_prompt")}),
]


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    llm, judge = start(tiny_models, max_num_batched_tokens=24, long_prefill_token_threshold=7)
    yield llm, judge
    shut_down(llm)


def test_chunks_split_the_rows(pair: tuple[LLM, Judge]) -> None:
    """Prompts in chunks of 7 and less, beside requests that already generate."""
    llm, judge = pair
    with serving.watching(llm) as steps:
        outputs = serve(llm, ASKS)
    assert max(steps.chunks(0)[:6]) == 7 and len(steps.chunks(0)) >= 6 + GENERATED - 1
    sizes = {n for i in range(len(ASKS)) for n in steps.chunks(i)}
    assert len(sizes - {1, 7}) >= 2, f"chunks of one size only: {sizes}"
    for ask, output in zip(ASKS, outputs, strict=True):
        judge.check(ask, output)


@pytest.mark.parametrize("ask", ASKS[:4], ids=["base", "plain", "prefill", "decode"])
def test_alone(pair: tuple[LLM, Judge], ask: Ask) -> None:
    """A single prompt is cut by the token budget only."""
    llm, judge = pair
    with serving.watching(llm) as steps:
        (output,) = serve(llm, [ask])
    expected = [24, 17] if len(ask.prompt) == 41 else [17]
    assert steps.chunks(0) == expected + [1] * (GENERATED - 1)
    judge.check(ask, output)


@pytest.fixture(scope="module")
def tight(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Room for the rows of three positions at all sites."""
    llm, judge = start(tiny_models, capture_buffer_bytes=3 * ALL_SITES * ROW_BYTES)
    yield llm, judge
    shut_down(llm)


def test_row_budget(tight: tuple[LLM, Judge]) -> None:
    """Prompts are computed as finely as the buffer wants; what captures nothing is not cut."""
    llm, judge = tight
    asks = [
        Ask(MIDDLE, {**BASE, **capture("all")}),
        Ask(LONG, PREFILL),
        Ask(LONG, {**DECODE, **capture("all")}),
        Ask(LONG),
        Ask(LONG, capture(["last_prompt", 3, 4, 5, 6, 7, 30])),
        Ask(SHORT, capture("all", ("post_block",), [2])),
        Ask(SHORT, {**BASE, **capture("predicting")}),
        Ask(SHORT, capture("last_generated")),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.largest_row_count == 3 * ALL_SITES, "the buffer was never full"
    sizes = list(steps.outputs[0].num_scheduled_tokens.values())
    assert sizes.count(len(LONG)) == 2, "bystanders did not start whole in the first step"
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)


def test_bystanders_end_first(tight: tuple[LLM, Judge]) -> None:
    """Requests without rows are served while many with rows take turns."""
    llm, judge = tight
    greedy = [Ask(LONG, capture("all"))] * 4
    asks = [*greedy, Ask(LONG, BASE), Ask(SHORT)]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    last = [
        max(n for n, o in enumerate(steps.outputs) if i in o.num_scheduled_tokens)
        for i in steps.ids
    ]
    assert max(last[4:]) < GENERATED + 1 < min(last[:4])


def test_what_can_never_fit_is_refused(tiny_models: TinyModels) -> None:
    """One position with more rows than the buffer, and two contents for one slot."""
    llm, judge = start(tiny_models, capture_buffer_bytes=2 * ROW_BYTES, max_steering_configs=1)
    try:
        with pytest.raises(ValueError, match=rf"needs? {3 * ROW_BYTES} bytes"):
            serve(llm, [Ask(SHORT, capture("all", ("post_block",), [0, 1, 2]))])
        with pytest.raises(ValueError, match="needs 2 slots"):
            serve(llm, [Ask(SHORT, {**PREFILL, **DECODE})])
        twins = [
            Ask(SHORT, {**DECODE, **capture("all", ("post_block",), [0, 2])}),
            Ask(SHORT, PREFILL),
        ]
        for twin, output in zip(twins, serve(llm, twins), strict=True):
            judge.check(twin, output)
    finally:
        shut_down(llm)
