# SPDX-License-Identifier: Apache-2.0
"""A collector of made-up rows, and what it gives for a request of five prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.capture import CaptureResult
from vllm.v1.capture.copies import CopyThreads
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import parse_capture
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.results.collector import RowCollector, Texts
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan
from vllm.v1.interventions.shape import TapShape

PROMPT_IDS = [100, 101, 102, 103, 104]
PROMPT = len(PROMPT_IDS)
MAX_TOKENS = 4
VERSION = 7
SITES = [("pre_attn", 1), ("post_block", 0)]
HOOKS = {"pre_attn": [1], "post_block": [0]}


def specs_of(*names: str) -> dict[str, ConsumerSpec]:
    return {name: ConsumerSpec(name) for name in names}


def plan_for(
    positions: Any, shape: TapShape = SHAPE, max_tokens: int = MAX_TOKENS, **more: Any
) -> CapturePlan:
    consumers = {"inline": {"hooks": HOOKS, "positions": positions}}
    consumers |= {name: {"hooks": HOOKS, "positions": p} for name, p in more.items()}
    plan = parse_capture(
        consumers,
        "capture",
        shape,
        Prompt([0] * PROMPT, max_tokens, None, Work(1 << 23)),
        specs_of(*consumers),
    )
    assert plan is not None
    return plan


def texts_of(token_ids: Sequence[int]) -> list[str]:
    return [f"t{one}" for one in token_ids]


def collector_for(plan: CapturePlan, texts: Texts = texts_of) -> RowCollector:
    copied = CopyThreads("test"), KeptMemory()
    return RowCollector(plan, PROMPT_IDS, plan.consumers, {}, *copied, texts)


def chunk(
    positions: list[int], dtype: torch.dtype = torch.float32, version: int = VERSION
) -> CapturedChunk:
    """Rows that say where they are from: site index, position, column."""
    at = np.array(positions, dtype=np.int64)
    values = torch.zeros(len(positions), len(SITES), HIDDEN, dtype=dtype)
    for i in range(len(SITES)):
        values[:, i] = 100 * i + torch.from_numpy(at)[:, None] + torch.arange(HIDDEN) / 8
    return CapturedChunk(at, [values], version, [("r", len(at))])


def results_of(
    collector: RowCollector, num_output: int, *, end: str | None = "stop", only_new: bool = False
) -> dict[str, CaptureResult]:
    tokens = list(range(200, 200 + num_output))
    if end is None and not only_new:
        return collector.so_far(tokens)
    return collector.results(
        tokens,
        finished=end is not None,
        aborted=end == "abort",
        only_new=only_new,
    )


def collect(
    collector: RowCollector, num_output: int, *, end: str | None = "stop", only_new: bool = False
) -> CaptureResult:
    return results_of(collector, num_output, end=end, only_new=only_new)["inline"]
