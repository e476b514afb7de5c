# SPDX-License-Identifier: Apache-2.0
"""Global tiers changed while the next step is already decided: asynchronous scheduling, alone and
with drafts that may be rejected on either side of a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import shut_down
from tests.serving.test_async_scheduling import start
from tests.support import serving
from tests.support.serving import Judge, capture, prompt_of, vector
from tests.support.timeline import Timeline, Vectors
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

DRAFTS = 3
ROWS = capture("all")
A: Vectors = {"post_block": {1: vector(300)}}
B: Vectors = {"post_block": {1: vector(301)}}
ELSEWHERE: Vectors = {"pre_attn": {2: vector(302)}}
DECODE = {"decode_steering_vectors": {"post_attn": {1: vector(303)}}}


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    llm, judge = start(
        tiny_models,
        num_gpu_blocks_override=14,
        max_num_batched_tokens=24,
        max_model_len=models.MAX_LENGTH,
        enable_prefix_caching=True,
    )
    yield llm, judge
    shut_down(llm)


@pytest.mark.v2
def test_asynchronous(pair: tuple[LLM, Judge]) -> None:
    """The step under way keeps what it was decided with."""
    llm, judge = pair
    line = Timeline(llm, judge)
    decoding = line.add(prompt_of(20, 300), {"max_tokens": 40, **ROWS})
    steered = line.add(prompt_of(20, 301), {"max_tokens": 40, **DECODE, **ROWS})
    line.until(decoding, 6)
    amid = line.add(prompt_of(70, 302), ROWS)
    line.step(2)
    line.set("base", A)
    line.step(5)
    line.set_tiers({"base": B, "prefill": ELSEWHERE})
    line.step()
    line.clear()
    line.step(4)
    line.set("decode", A)
    after = line.add(prompt_of(20, 300), ROWS)
    line.finish()
    for name in (decoding, steered, amid, after):
        line.check(name)
    assert not line.preempted
    assert len(line.boundaries(decoding)) == 4
    assert 0 < line.boundaries(amid)[0] < 70
    line.close()


def test_blocks_of_steps_under_way(pair: tuple[LLM, Judge]) -> None:
    """A block that fills in the very step that was decided before the change."""
    llm, judge = pair
    line = Timeline(llm, judge)
    line.set("base", A)
    for generated in range(11, 15):  # with a prompt of 20 the first block is full after 12
        assert llm.reset_prefix_cache()
        name = line.add(prompt_of(20, 310), {"max_tokens": 20, **ROWS})
        line.until(name, generated)
        line.set("base", B)
        line.finish()
        line.check(name)
        for vectors in (B, A):
            line.set("base", vectors)
            follower = line.serve(line.sequence(name), {"max_tokens": 3})
            line.check(follower)
            if vectors is A:
                (boundary,) = line.boundaries(name)
                assert line.cached(follower) == (32 if boundary >= 32 else 0)
            else:
                assert line.cached(follower) == 0
    line.close()


def test_preempted(tiny_models: TinyModels) -> None:
    """Rows that a step under way computed for a request which is preempted meanwhile."""
    llm, judge = start(tiny_models, num_gpu_blocks_override=8, enable_prefix_caching=True)
    try:
        line = Timeline(llm, judge)
        fields: list[dict[str, Any]] = [{}, DECODE, {}, {"steering_inherit_global": False}, DECODE]
        names = [
            line.add(prompt_of(20, 320 + i), {"max_tokens": 45, **f, **ROWS})
            for i, f in enumerate(fields)
        ]
        for tiers in ({"base": A}, {"prefill": B}, {}, {"decode": ELSEWHERE}):
            line.step(12)
            line.set_tiers(tiers, replace=True)
        line.finish()
        assert line.preempted
        for name in names:
            line.check(name)
        line.close()
    finally:
        shut_down(llm)


def test_drafts_across_a_change(tiny_models: TinyModels) -> None:
    """Positions of drafts under way may be computed again after the change: their rows are those
    of the accepted time, and their blocks nobody else's."""
    path = tiny_models.path("llama")
    llm, judge = start(
        tiny_models,
        enable_prefix_caching=True,
        max_model_len=models.MAX_LENGTH,
        speculative_config={
            "method": "draft_model",
            "model": str(path),
            "num_speculative_tokens": DRAFTS,
            "max_model_len": models.MAX_LENGTH,
        },
    )
    try:
        line = Timeline(llm, judge)
        asks: list[tuple[list[int], dict[str, Any]]] = [
            (prompt_of(20, 330), {}),
            # Drafts for it are wrong: the drafter is not steered.
            (prompt_of(20, 331), {"steering_vectors": {"post_attn": {1: vector(303)}}}),
        ]
        split = 0
        for generated in range(9, 13):  # the first block is full after 12
            for prompt, fields in asks:
                assert llm.reset_prefix_cache()
                line.clear()
                name = line.add(prompt, {"max_tokens": 30, **fields, **ROWS})
                line.until(name, generated)
                seen = 20 + line.tokens[name] - 1
                line.set("base", A)
                line.finish()
                runs = line.told(name)
                line.check(name, runs=runs)
                at = runs[0].index(runs[0][-1])
                assert 0 <= at - seen <= 2 * (1 + DRAFTS)
                split += at < 32 <= seen + 1 + DRAFTS
                for vectors in (A, {}):
                    line.set("base", vectors, replace=True)
                    again = {"max_tokens": 3, **fields, **capture([-1])}
                    follower = line.serve(line.sequence(name), again)
                    line.check(follower)
                    assert line.cached(follower) <= (0 if vectors else at // 32 * 32)
        assert split, "no drafts filled a block that the change fell into"
        line.close()
        assert serving.scheduler_of(llm).vllm_config.speculative_config is not None
    finally:
        shut_down(llm)
