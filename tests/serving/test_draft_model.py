# SPDX-License-Identifier: Apache-2.0
"""Speculation with a draft model, which here is the target model itself: its layers are of a wired
class, but it is neither steered nor captured, so drafts for steered requests are often wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import MAX_MODEL_LEN, make_llm, shut_down
from tests.conformance.runner import Reference
from tests.serving.test_async_scheduling import start as start_async
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

LIMIT = {"max_tokens": 24}
BASE = {"steering_vectors": {"pre_attn": {0: vector(140)}}}
DECODE = {"decode_steering_vectors": {"post_block": {1: vector(141)}}}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_draft_model(tiny_models: TinyModels, asynchronous: bool) -> None:
    """With asynchronous scheduling the scheduler's positions are only a guess: the rows say which
    ones they are, and all of them must be there once."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    options: dict[str, Any] = {
        "speculative_config": {
            "method": "draft_model",
            "model": str(path),
            "num_speculative_tokens": 3,
            "max_model_len": MAX_MODEL_LEN,
        }
    }
    if asynchronous:
        llm, judge = start_async(tiny_models, **options)
    else:
        llm = make_llm(path, enable_steering=True, capture_consumers=["inline"], **options)
        judge = Judge(Reference(row, models.load(row, path)))
    fields: list[dict[str, Any]] = [
        capture("all"),
        {**BASE, **capture("all")},
        {**DECODE, **capture("all_generated")},
        capture([2, 18, 19, 22, 27, 36]),
        {**DECODE, **capture({"start": 1, "stop": 38, "step": 6})},
        {**BASE, **capture(["last_prompt", "last_generated"])},
        DECODE,
        {},
    ]
    asks = [Ask(prompt_of(17, 140 + i), {**LIMIT, **f}) for i, f in enumerate(fields)]
    try:
        with serving.watching(llm) as steps:
            outputs = serve(llm, asks)
        for ask, output in zip(asks, outputs, strict=True):
            judge.check(ask, output)
        plain, steered = len(steps.chunks(0)), len(steps.chunks(2))
        assert plain <= 10, f"24 tokens took {plain} steps: a plain request's drafts are wrong"
        assert steered > plain, "the drafts for a steered request are all right: is it steered?"
    finally:
        shut_down(llm)
