# SPDX-License-Identifier: Apache-2.0
"""Taps of several lanes between kernels that write back late: what is mixed again, and what the
next kernel is handed."""

from __future__ import annotations

import pytest
import torch

from vllm.model_executor.layers.residual_taps import LanesTap

pytestmark = pytest.mark.quick

TOKENS, LANES, HIDDEN = 5, 3, 8
Parts = tuple[torch.Tensor, torch.Tensor]


def tap(steered: bool, arena: torch.Tensor | None = None) -> LanesTap:
    """Steers tokens 0, 2 and 4 with one vector of all lanes, and captures token 1."""
    table = torch.zeros(2, LANES * HIDDEN)
    table[1] = torch.linspace(-1, 1, LANES * HIDDEN)
    slots = torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32)
    dest = torch.tensor([-1, 0, -1, -1, -1], dtype=torch.int32)
    return LanesTap(table if steered else None, None, slots, arena, dest, torch.tensor(True))


def write(branch: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    return lanes + branch.unsqueeze(1)


def nothing_to_add(lanes: torch.Tensor) -> Parts:
    return torch.zeros(TOKENS, HIDDEN), lanes


def stream() -> torch.Tensor:
    return torch.randn(TOKENS, LANES, HIDDEN, generator=torch.Generator().manual_seed(3))


def moved(lanes: torch.Tensor) -> torch.Tensor:
    """The stream as the steered tap leaves it."""
    vector = torch.linspace(-1, 1, LANES * HIDDEN).view(LANES, HIDDEN)
    return lanes + torch.tensor([1.0, 0, 1, 0, 1])[:, None, None] * vector


def test_what_was_changed_is_mixed_again() -> None:
    lanes = stream()
    mixed, new = tap(steered=True).renorm(lanes.mean(1), lanes, lambda s: s.mean(1))
    assert torch.equal(new, moved(lanes)) and torch.equal(mixed, new.mean(1))
    assert (mixed - lanes.mean(1)).abs().max() > 0.1


def test_what_was_not_changed_keeps_its_mixture() -> None:
    lanes, mixed = stream(), torch.ones(TOKENS, HIDDEN)
    kept, same = tap(steered=False).renorm(mixed, lanes, lambda s: s.mean(1))
    assert kept is mixed and same is lanes


@pytest.mark.parametrize("steered", [False, True])
def test_parts_are_written_back_to_the_steered_stream(steered: bool) -> None:
    lanes, branch = stream(), torch.randn(TOKENS, HIDDEN)
    arena = torch.zeros(LANES, HIDDEN)
    made = tap(steered, arena).settle((branch, lanes), write, nothing_to_add)
    whole = write(branch, lanes)
    want = moved(whole) if steered else whole
    assert torch.equal(write(*made), want)
    assert torch.equal(arena, want[1]), "lane after lane"
    assert (want - lanes).abs().max() > 0.1 and torch.equal(want, whole) is not steered
