# SPDX-License-Identifier: Apache-2.0
"""Preemption: too few KV blocks for the batch, so that requests are thrown out and recomputed.

What a request generated before comes back as prefill, and must be steered as what was generated;
rows that were delivered before must not be delivered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

GENERATED = 45
"""With a prompt of 20: three blocks each at the end, one at the start."""

BASE = {"steering_vectors": {"pre_attn": {0: vector(50)}}}
PREFILL = {"prefill_steering_vectors": {"post_attn": {1: vector(50)}}}
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(50)}}}
BOTH = {
    "prefill_steering_vectors": {"post_block": {1: vector(51)}},
    "decode_steering_vectors": {"post_block": {1: vector(52)}},
}


@pytest.fixture(scope="module", params=[False, True], ids=["uncached", "cached"])
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Seven usable blocks of 32 (block 0 is upstream's null block)."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        enable_prefix_caching=request.param,
        num_gpu_blocks_override=8,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def test_preempted_requests(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    limit = {"max_tokens": GENERATED}
    asks = [
        Ask(prompt_of(20, 50), {**limit, **DECODE, **capture("all")}),
        Ask(prompt_of(20, 51), {**limit, **BOTH, **capture("all")}),
        Ask(prompt_of(20, 52), {**limit, **BASE, **capture("predicting")}),
        Ask(prompt_of(20, 53), {**limit, **PREFILL, **capture([3, 25, 40, "last_prompt"])}),
        Ask(prompt_of(20, 54), {**limit, **capture("all")}),
        Ask(prompt_of(20, 55), {**limit, **DECODE, **capture(["last_prompt", "last_generated"])}),
        Ask(prompt_of(20, 56), limit),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.preempted, "nothing was preempted"
    assert {0, 1, 5} & set(steps.recomputed), "no decode-steered request was recomputed"
    for ask, output in zip(asks, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == GENERATED
        judge.check(ask, output)


def test_recomputed_tokens_keep_their_phase(pair: tuple[LLM, Judge]) -> None:
    """The twin: the reference with the generated tokens taken for prompt disagrees."""
    llm, judge = pair
    asks = [
        Ask(prompt_of(20, 60 + i), {"max_tokens": GENERATED, **DECODE, **capture("all")})
        for i in range(5)
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.recomputed
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
        completion = output.outputs[0]
        forgotten = Ask([*ask.prompt, *completion.token_ids[:20]], DECODE)
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        right = judge.reference.run(sequence, serving.deltas_of(ask, len(sequence)))
        wrong = judge.reference.run(sequence, serving.deltas_of(forgotten, len(sequence)))
        late = slice(45, None)
        assert serving.relative(wrong.logits[late], right.logits[late]) >= 0.02
