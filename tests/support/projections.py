# SPDX-License-Identifier: Apache-2.0
"""Capture requests that project: matrices, and what consumers ask of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import parse_capture
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.plan import CapturePlan
from vllm.v1.interventions.shape import TapShape

SPECS = {name: ConsumerSpec(name) for name in ("inline", "one", "two")}


def matrix(k: int, seed: int = 0, hidden: int = HIDDEN) -> torch.Tensor:
    """float32 [k, hidden]."""
    return torch.randn(k, hidden, generator=torch.Generator().manual_seed(seed))


def parse(shape: TapShape = SHAPE, **consumers: dict[str, Any]) -> CapturePlan:
    """The plan of what each consumer asks, at layer 1 and all positions if it does not say."""
    asked = {
        name: {"hooks": {"post_block": [1]}, "positions": "all", **request}
        for name, request in consumers.items()
    }
    plan = parse_capture(asked, "capture", shape, Prompt([1, 2, 3], 4, None, Work(1 << 23)), SPECS)
    assert plan is not None
    return plan
