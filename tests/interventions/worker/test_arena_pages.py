# SPDX-License-Identifier: Apache-2.0
"""The arena's memory on a CPU is there when rows are written, and not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm.v1.interventions.worker.rows.arena import _zeros

pytestmark = pytest.mark.quick

CPU, ROWS, HIDDEN = torch.device("cpu"), 1 << 12, 1 << 13
MIB = ROWS * HIDDEN * 2 >> 20
"""64: far more than what else a process takes meanwhile."""


def resident() -> int:
    """MiB of this process that are in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


def taken(make: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """MiB that `make` puts into memory, and what it makes."""
    before = resident()
    made = make()
    return resident() - before, made


def test_pages_come_as_they_are_written() -> None:
    size, arena = taken(lambda: _zeros(ROWS, HIDDEN, torch.bfloat16, CPU))
    assert size < MIB // 4
    assert (arena.shape, arena.dtype) == ((ROWS, HIDDEN), torch.bfloat16)
    size, _ = taken(lambda: arena[: ROWS // 2].fill_(1))
    assert MIB // 3 < size < MIB * 2 // 3
    assert arena[0, 0] == arena[ROWS // 2 - 1, -1] == 1
    assert not arena[ROWS // 2 :].any()


def test_zeros_of_torch_are_all_there() -> None:
    """The twin: what the arena was."""
    size, _ = taken(lambda: torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16))
    assert size > MIB * 2 // 3
