# SPDX-License-Identifier: Apache-2.0
"""Gates that latch in real engines, against Hugging Face with the same done in float64: whatever
cuts the rows into steps, computes some again or takes them from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import Runner, shut_down
from tests.conformance.runner import LEAST_MOVE
from tests.serving import test_async_scheduling, test_speculation
from tests.serving.test_force import forcing
from tests.serving.test_steering_ops import (
    FAMILIES,
    FULL,
    Pair,
    ask,
    check,
    frozen,
    gate,
    op,
    rows_differ,
    start,
)
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]


def latching(seed: int = 4, positions: Any = None) -> dict[str, Any]:
    """It opens a little further at some rows, and would shut at others."""
    where = {} if positions is None else {"positions": positions}
    own = {**gate(seed), "latch": True, "sharpness": 4.0, "threshold": 0.5, "cosine": False}
    return op("add", "post_block", 1, seed, gate=own, **where, scale=3.0)


def asks_of(length: int, **fields: Any) -> list[Ask]:
    """At all positions, from within the prompt on, and at generated ones; beside other gates, and
    after one that latches at the same place."""
    ops = [
        [latching(4)],
        [latching(6, {"start": 5}), frozen()],
        [latching(8, "all_generated"), latching(10)],
        [op("low_rank", "pre_attn", 2, 3, gate=latching(12)["gate"])],
        [op("pin", "post_attn", 1, 31)],
    ]
    return [ask(prompt_of(length, 90 + i), *each, **fields) for i, each in enumerate(ops)]


def by_row(asked: Ask) -> Ask:
    """The twin: each row opens the gate for itself."""
    ops = [
        {**each, "gate": {**each["gate"], "latch": False}} if each["gate"].get("latch") else each
        for each in asked.fields["steering"]
    ]
    return Ask(asked.prompt, {**asked.fields, "steering": ops})


@pytest.fixture(scope="module")
def chunking(tiny_models: TinyModels) -> Iterator[Pair]:
    llm, judge = start(
        tiny_models, "llama", max_num_batched_tokens=24, long_prefill_token_threshold=7
    )
    yield llm, judge
    shut_down(llm)


def test_chunks(chunking: Pair) -> None:
    llm, judge = chunking
    asks = asks_of(41, **capture("all"))
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert len(steps.chunks(0)) >= 6 + serving.GENERATED - 1
    check(judge, asks, outputs)
    moved = [
        rows_differ(judge, a, by_row(a), output)
        for a, output in zip(asks[:4], outputs[:4], strict=True)
    ]
    assert min(moved) > LEAST_MOVE, moved


def check_recomputed(llm: LLM, judge: Judge) -> None:
    """Long answers with too few blocks for all: some are taken out, and computed again."""
    asks = asks_of(20, **capture("all"), max_tokens=45)
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert {0, 1, 2, 3} & set(steps.recomputed), "no gate latched again"
    check(judge, asks, outputs)


@pytest.mark.parametrize("cached", [False, True])
def test_preemption(tiny_models: TinyModels, cached: bool) -> None:
    """What is computed again latches again, and knows nothing of what it knew."""
    llm, judge = start(
        tiny_models, "llama", num_gpu_blocks_override=8, enable_prefix_caching=cached
    )
    try:
        check_recomputed(llm, judge)
    finally:
        shut_down(llm)


CACHED = {
    "all": (latching(4), 0),
    "from the second block": (latching(4, {"start": 40}), 32),
    "generated": (latching(4, "all_generated"), FULL),
}
"""What latches, and how much of a prompt of two blocks the cache gives."""


@pytest.mark.parametrize("case", CACHED)
def test_prefix_cache(tiny_models: TinyModels, case: str) -> None:
    """A hit ends where the first gate begins to latch: what it knew is in no block."""
    latched, shared = CACHED[case]
    llm, judge = start(
        tiny_models, "llama", enable_prefix_caching=True, max_model_len=models.MAX_LENGTH
    )
    try:
        asked = ask(prompt_of(70, 73), latched, **capture("predicting"))
        for cached in (0, shared):
            (output,) = serve(llm, [asked])
            judge.check(asked, output)
            assert output.num_cached_tokens == cached
        (output,) = serve(llm, [by_row(asked)])
        judge.check(by_row(asked), output)
        assert output.num_cached_tokens == shared
    finally:
        shut_down(llm)


def test_rejected_drafts_latch_nothing_and_low_rank_changes_are_exact(
    tiny_models: TinyModels, runner: Runner
) -> None:
    if runner == "v2":
        pytest.skip("upstream's ngram drafter does not run under Triton's interpreter")
    options: dict[str, Any] = {"steering_families": ["add", "low_rank", "gate"]}
    llm, judge = test_speculation.start(tiny_models, **options, num_gpu_blocks_override=16)
    try:
        ops = [[latching(seed, "all_generated")] for seed in range(4, 30, 2)] + [[latching()]]
        for [each] in ops:  # never so far open that a draft could not open it further
            each["gate"] |= {"sharpness": 0.7, "threshold": 3.0}
        ops.append([op("low_rank", "post_block", 1, 3, strength=1.0, gate=latching(8)["gate"])])
        ops += [
            [op("low_rank", "post_block", 1, 3, positions=at)] for at in ("all", "all_generated")
        ]
        limit = {"max_tokens": 24}
        asks = [ask(test_speculation.PROMPT, *each, **limit) for each in ops]
        with serving.watching(llm) as steps:
            outputs = serve(llm, asks)
        accepted, rejected = test_speculation.accepted_and_rejected(steps, outputs)
        assert accepted >= 10 and rejected >= 10, (accepted, rejected)
        check(judge, asks, outputs)
    finally:
        shut_down(llm)


def test_asynchronous_scheduling(tiny_models: TinyModels) -> None:
    """A step ahead of the tokens, with chunks and preemptions."""
    llm, judge = test_async_scheduling.start(
        tiny_models,
        steering_families=FAMILIES,
        num_gpu_blocks_override=8,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=7,
    )
    try:
        check_recomputed(llm, judge)
    finally:
        shut_down(llm)


def test_an_answer_that_goes_on_after_forced_tokens(tiny_models: TinyModels) -> None:
    """It is sent anew, and what gates knew of its rows is computed once more."""
    llm, judge = start(tiny_models, "llama", enable_prefix_caching=True)
    try:
        prompt = prompt_of(40, 73)
        for latched in (latching(4), latching(6, "all_generated")):
            rules = [forcing(-1e30, over=[len(prompt) + 5])]
            asked = ask(prompt, latched, **capture("all"), rules=rules, max_tokens=20)
            [output] = serve(llm, [asked], log_probs=False)
            assert output.outputs[0].rules["r"].forced_at is not None
            judge.check_rows(asked, output.outputs[0])
            with pytest.raises(AssertionError, match="off by"):
                judge.check_rows(by_row(asked), output.outputs[0])
    finally:
        shut_down(llm)


def test_two_workers(tiny_models: TinyModels, runner: Runner) -> None:
    """Tensor-parallel ranks know the same; of pipeline stages each knows of its own layers."""
    split = "tensor_parallel_size" if runner == "v1" else "pipeline_parallel_size"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm, judge = start(tiny_models, "llama", **{split: 2}, max_num_batched_tokens=24)
        try:
            asks = asks_of(30, **capture("all"))
            check(judge, asks, serve(llm, asks))
        finally:
            shut_down(llm)
