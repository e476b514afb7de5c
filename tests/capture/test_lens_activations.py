# SPDX-License-Identifier: Apache-2.0
"""What vLLM-Lens's users get of captured rows, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm.v1.capture import CapturedRows, CaptureResult
from vllm.v1.capture.lens_activations import activations_of

pytestmark = pytest.mark.quick

POSITIONS = np.arange(3)


def heads(count: int, width: int, scale: float | None = None) -> CapturedRows:
    """Rows of all heads of a layer; `scale` of queries."""
    values = torch.randn(3, count * width, generator=torch.Generator().manual_seed(count))
    form = None if scale is None else {"scale": scale, "group": 2}
    chosen = tuple(range(count))
    return CapturedRows(POSITIONS, POSITIONS, values, POSITIONS, heads=chosen, form=form)  # type: ignore[arg-type]


def results(widths: dict[int, int]) -> dict[str, CaptureResult]:
    """Queries and keys of layers, with heads of a width."""
    payload = {("q", n): heads(4, width, 0.5) for n, width in widths.items()}
    payload |= {("k", n): heads(2, width) for n, width in widths.items()}
    return {"inline": CaptureResult("ok", None, payload)}


def test_layers_that_are_alike_are_one_tensor() -> None:
    made = activations_of(results({1: 8, 3: 8}))
    assert made is not None and made["qk_layers"] == [1, 3]
    assert made["attn_q"].shape == (2, 3, 4, 8) and made["attn_k"].shape == (2, 3, 2, 8)
    assert [meta["head_size"] for meta in made["qk_meta"]] == [8, 8]


def test_layers_that_differ_have_none() -> None:
    assert activations_of(results({1: 8, 3: 16})) is None
