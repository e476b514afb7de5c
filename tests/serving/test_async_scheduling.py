# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: the next step is decided before this one's tokens are known.

The CPU platform switches it off whatever is asked, so the fixture puts it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

pytestmark = [pytest.mark.full, pytest.mark.v2]

GENERATED = 45

BASE = {"steering_vectors": {"pre_attn": {0: vector(80)}}}
PREFILL = {"prefill_steering_vectors": {"post_attn": {1: vector(80)}}}
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(80)}}}


@contextmanager
def asynchronous() -> Iterator[None]:
    """Engines started within schedule asynchronously."""
    from vllm.platforms.cpu import CpuPlatform

    original = vars(CpuPlatform)["check_and_update_config"].__func__

    def keep(cls: type[CpuPlatform], config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
        yield


def start(tiny_models: TinyModels, **options: Any) -> tuple[LLM, Judge]:
    """An engine that schedules asynchronously.

    Raises:
        AssertionError: it does not.
    """
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    with asynchronous():
        llm = make_llm(
            path, enable_steering=True, capture_consumers=["inline"], max_num_seqs=8, **options
        )
    need_asynchronous(llm)
    return llm, Judge(Reference(row, models.load(row, path)))


def need_asynchronous(llm: LLM) -> None:
    """Raises AssertionError: the engine does not schedule asynchronously."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(serving.scheduler_of(llm), AsyncScheduler)
    assert serving.core_of(llm).batch_queue is not None


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    llm, judge = start(
        tiny_models,
        num_gpu_blocks_override=8,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=7,
        max_steering_configs=3,
    )
    yield llm, judge
    shut_down(llm)


def test_everything_at_once(pair: tuple[LLM, Judge]) -> None:
    """Chunks, preemptions, too few slots and the prefix cache, a step ahead of the tokens."""
    llm, judge = pair
    limit = {"max_tokens": GENERATED}
    fields: list[dict[str, Any]] = [
        {**DECODE, **capture("all")},
        {**BASE, **capture("predicting")},
        {**PREFILL, **DECODE, **capture([3, 25, 40, "last_prompt"])},
        capture("all"),
        {**DECODE, **capture(["last_prompt", "last_generated"])},
        {},
        {"steering_vectors": {"post_block": {2: vector(81)}}, **capture("all_generated")},
    ]
    asks = [Ask(prompt_of(20, 80 + i), {**limit, **f}) for i, f in enumerate(fields)]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert steps.recomputed, "nothing was preempted"
    for ask, output in zip(asks, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == GENERATED
        judge.check(ask, output)


@pytest.mark.parametrize("fields", [{}, BASE, DECODE], ids=["plain", "base", "decode"])
def test_stop_token(pair: tuple[LLM, Judge], fields: dict[str, Any]) -> None:
    """The step after the stop was already under way: its row is not delivered."""
    llm, judge = pair
    prompt = prompt_of(9, 90)
    (output,) = serve(llm, [Ask(prompt, fields)])
    token = output.outputs[0].token_ids[3]
    asks = [
        Ask(prompt, {**fields, "stop_token_ids": [token], **capture(positions)})
        for positions in ("all", "last_generated")
    ]
    for ask, stopped in zip(asks, serve(llm, asks), strict=True):
        assert len(stopped.outputs[0].token_ids) <= 4
        judge.check(ask, stopped)
    # A slot or block freed by the stop is reused at once.
    (after,) = serve(llm, [Ask(prompt, {**PREFILL, **capture("all")})])
    judge.check(Ask(prompt, {**PREFILL, **capture("all")}), after)
