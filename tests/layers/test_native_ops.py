# SPDX-License-Identifier: Apache-2.0
"""The CPU build of csrc/: bit for bit what torch's ops give, and loud about what it does not take.

tests/gpu/native.py does the same with the CUDA build.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import profile

from tests.conformance import models
from tests.conformance.engine import engine
from tests.conformance.runner import Reference
from tests.support.native_rows import cases, equal, unnoticed, wrong
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from tools import native
from vllm.config.points import STREAM_POINTS
from vllm.model_executor.layers import native_rows
from vllm.model_executor.layers.native_rows import NativeTap, load
from vllm.model_executor.layers.residual_taps import SiteTap
from vllm.v1.interventions.worker import runner

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full


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


def run_tap(tap: SiteTap, h: torch.Tensor, r: torch.Tensor) -> list[torch.Tensor]:
    """What a decoder's calls of a tap come to, captured rows included."""
    arena = tap.arena if tap.arena is not None else torch.empty(0)
    found: list[torch.Tensor] = []
    for call in (
        lambda: tap(h),
        lambda: tap.steer_pair(h, r)[1],
        lambda: tap.steer_pair(h, None)[0],
        lambda: tap.steer_and_capture_pair(h, r)[1],
        lambda: tap.steer_and_capture_pair(h, None)[0],
        lambda: tap.read(h),
    ):
        arena.zero_()
        out = call()
        found += [arena.clone()] if out is None else [out.clone(), arena.clone()]
    return found


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["same dtype", "float32 stream"])
def test_a_native_tap_is_a_tap(library: Path, steered: bool, captured: bool, wide: bool) -> None:
    _, case = next(item for item in cases("cpu") if "bfloat16 33 x" in item[0])
    h = torch.randn(33, 1000, dtype=torch.float32 if wide else torch.bfloat16)
    r = torch.randn_like(h)

    def made(kind: type[SiteTap], table: torch.Tensor) -> SiteTap:
        arena = torch.empty_like(case.arena)
        places = (arena, case.dest, torch.tensor(True)) if captured else (None, None, None)
        return kind(table if steered else None, None, case.slots, *places)

    want = run_tap(made(SiteTap, case.table), h, r)
    got = run_tap(made(NativeTap, case.table), h, r)
    assert all(equal(g, w) for g, w in zip(got, want, strict=True))
    if steered:
        twin = run_tap(made(NativeTap, 2 * case.table), h, r)
        assert not any(equal(g, w) for g, w in zip(got[:-1:2], twin[:-1:2], strict=True))
    if captured:
        assert all(rows.any() for rows in (*got[1:2], *got[7:10:2], got[-1]))


def test_an_eager_engine_uses_native_taps(
    library: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every point read and written, against transformers."""
    monkeypatch.setattr(runner, "NATIVE_ROWS", True)
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    judge = Judge(Reference(row, models.load(row, path)))
    asks = [
        Ask(prompt_of(19, 7), {"steering_vectors": {point: {1: vector(9)}}, **capture("all")})
        for point in STREAM_POINTS
    ]
    asks += [Ask(prompt_of(11, 8), capture("all")), Ask(prompt_of(7, 9))]
    options = {"enable_steering": True, "capture_consumers": ["inline"]}
    with engine(path, **options) as llm, profile() as seen:
        answers = serve(llm, asks)
    ops = {event.name for event in seen.events()}
    assert "pilot::add_and_capture_rows" in ops
    assert "vllm::capture_rows" not in ops
    for ask, answer in zip(asks, answers, strict=True):
        judge.check(ask, answer)


def test_what_the_ops_do_not_take_is_an_error(library: Path) -> None:
    ops = torch.ops.pilot
    h, table = torch.zeros(4, 16), torch.zeros(2, 16)
    slots = torch.zeros(4, dtype=torch.int32)
    ops.add_rows(h, table, slots)
    for said, bad in {
        "stream: neither float32": (h.double(), table.double(), slots),
        "table: not of the stream's dtype": (h, table.half(), slots),
        "table: not .rows, hidden": (h, table[:, :8], slots),
        "slots: not an int32": (h, table, slots.long()),
        "slots: not an int32 vector of at": (h, table, slots[:3]),
        "stream: not .tokens, hidden": (h[0], table, slots),
    }.items():
        with pytest.raises(RuntimeError, match=said):
            ops.add_rows(*bad)
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
