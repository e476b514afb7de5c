# SPDX-License-Identifier: Apache-2.0
"""The CPU build of csrc/: bit for bit what torch's ops give, and loud about what it does not take.

tests/gpu/native.py does the same with the CUDA build.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.native_rows import cases, unnoticed, wrong
from tools import native
from vllm.model_executor.layers import native_rows
from vllm.model_executor.layers.native_rows import load


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := native.missing():
        pytest.skip(f"csrc/ cannot be built here: {lacking} not found")
    path = native.build(tmp_path_factory.mktemp("native"))
    assert load(path, "CPU")
    return path


def test_native_ops_have_the_bits_of_torch(library: Path) -> None:
    count = 0
    for name, case in cases("cpu"):
        assert wrong(case) == [], name
        assert unnoticed(case) == [], name
        count += 1
    assert count == 144


def test_what_the_ops_do_not_take_is_an_error(library: Path) -> None:
    ops = torch.ops.pilot
    h, table = torch.zeros(4, 16), torch.zeros(2, 16)
    slots = torch.zeros(4, dtype=torch.int32)
    ops.steer_rows(h, table, slots)
    for said, bad in {
        "stream: neither float32": (h.double(), table.double(), slots),
        "table: not of the stream's dtype": (h, table.half(), slots),
        "table: not .rows, hidden": (h, table[:, :8], slots),
        "slots: not an int32": (h, table, slots.long()),
        "slots: not an int32 vector of at": (h, table, slots[:3]),
        "stream: not .tokens, hidden": (h[0], table, slots),
    }.items():
        with pytest.raises(RuntimeError, match=said):
            ops.steer_rows(*bad)
    with pytest.raises(RuntimeError, match="addend: not the stream's tokens"):
        ops.capture_rows(h, h[:3], torch.zeros(4, 16), slots)


def test_a_platform_without_kernels_and_a_damaged_library_are_not_used(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(native_rows.logger, "warning", lambda text, *_: warnings.append(text))
    assert not load(library, "XPU")
    assert not load(tmp_path / "none.so", "CPU")
    assert warnings == []
    damaged = tmp_path / "_pilot.so"
    damaged.write_text("no library")
    assert not load(damaged, "CPU")
    assert len(warnings) == 1
