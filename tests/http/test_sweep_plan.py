# SPDX-License-Identifier: Apache-2.0
"""The cells of a sweep, without a server: their order, their number, and what is said of them."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.errors.sweeps import ADD, plan
from vllm.entrypoints.serve.steering.sweep_plan import NOISE_CELLS, Grid
from vllm.entrypoints.serve.steering.sweep_request import MOST_CELLS
from vllm.entrypoints.serve.steering.sweep_run import MOST_HOLDING, SweepRun, SweepSlots
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.pilot.patching import _read
from vllm.v1.capture import CaptureResult
from vllm.v1.capture.results import SiteRows

pytestmark = pytest.mark.quick


def test_cells_of_one_position_follow_each_other() -> None:
    """From behind, so that the cache has what is before a position."""
    cells = list(plan(points=["post_attn", "pre_attn"], layers=[0, 1], positions=[0, 2]).cells())
    assert [at for _, _, at, _ in cells] == [2] * 4 + [0] * 4
    assert cells[:2] == [("pre_attn", 0, 2, None), ("post_attn", 0, 2, None)]
    assert len(set(cells)) == len(cells)


def test_no_more_cells_than_are_allowed() -> None:
    """Four layers, three positions."""
    most = MOST_CELLS // 12
    full = plan(**ADD, scales=list(range(most)))
    assert full.num_cells == 12 * most and full.noise_cells() == []
    with pytest.raises(ValueError, match=f"make {12 * (most + 1)} cells"):
        plan(**ADD, scales=[0.0] * (most + 1))


def test_noise_is_looked_for_everywhere() -> None:
    whole = plan(points=["pre_attn", "post_block"])
    noise = whole.noise_cells()
    assert len(set(noise)) == len(noise) == NOISE_CELLS < whole.num_cells == 24
    assert {at for _, _, at, _ in noise} == {0, 1, 2}
    assert {cell.point for cell in noise} == {"pre_attn", "post_block"}
    hooks = whole.of_prompt()["capture"]["inline"]["hooks"]
    assert {(cell.point, cell.layer) for cell in noise} == {
        (point, layer) for point, layers in hooks.items() for layer in layers
    }


def test_cells_are_made_one_by_one() -> None:
    """What comes before the first cell costs the same with a thousand times as many."""

    def calls(positions: int) -> int:
        few = plan(points=["pre_attn"])
        whole = replace(few, places=replace(few.places, positions=list(range(positions))))
        counted = 0

        def called(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(called)
        whole.noise_cells()
        whole.of_prompt()
        next(whole.cells())
        sys.setprofile(None)
        assert whole.num_cells == 4 * positions
        return counted

    assert calls(16_000) < calls(16) + 200
    whole = plan(points=["pre_attn", "post_block"])
    noise = whole.noise_cells()
    assert [cell for cell in whole.cells() if cell in noise] == noise, "in the order of the cells"


@pytest.mark.parametrize("metric", ["diff", "recovered"])
def test_a_grid(metric: str, tmp_path: Path) -> None:
    """Layer 2 of the made-up model lacks post_attn, and one value is no number."""
    made = plan(points=["post_attn", "post_block"], layers="all", metric=metric)
    grid = Grid(made, -1.0, -3.0)
    for number, cell in enumerate(made.cells()):
        want = number / 2 if metric == "recovered" else number - 3.0
        assert grid.add(cell, number - 3.0) == want
    grid.add(cell, math.inf)
    grid.note_noise([-3.0, -3.25])
    answer: dict[str, Any] = {**grid.head(), "grid": grid.table()}
    assert answer["points"] == ["post_attn", "post_block"] and answer["tokens"] == list("abc")
    assert answer["noise_floor"] == 0.25 and answer["grid"][0][2] == [None] * 3
    found = _read(answer)
    assert found.values.shape == (2, 4, 3) and np.isnan(found.values).sum() == 4
    strongest = 9.5 if metric == "recovered" else 16.0
    said = repr(found).splitlines()
    assert said[1] == f"  post_attn 3 position 0 'a': {strongest:+.3f}" and len(said) == 6
    found.draw(tmp_path / "map.svg")
    assert (tmp_path / "map.svg").stat().st_size > 1000


class Engine:
    """An engine that answers at once: a token's log probability, and rows where these are asked."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        await asyncio.sleep(0)
        logprobs = [{token: Logprob(-1.0) for token in (100, 101)}]
        made = SiteRows([], lambda site: site)
        rows = {"inline": CaptureResult("ok", None, made)}
        output = CompletionOutput(0, "", [100], None, logprobs, capture_results=rows)
        yield SimpleNamespace(outputs=[output])


def test_sweeps_that_hold_rows_wait_for_their_turn() -> None:
    """So that any number of sweeps holds a bounded number of bytes."""

    async def turns() -> tuple[list[bool], list[bool], list[bool]]:
        engine: Any = Engine()
        slots = SweepSlots(engine)
        prompt: Any = {}
        clean = replace(plan(), patches=False)
        holding = [
            SweepRun(engine, slots, clean, prompt, prompt, None) for _ in range(MOST_HOLDING + 3)
        ]
        others = [SweepRun(engine, slots, plan(**ADD), prompt, None, None) for _ in range(3)]
        begun = [asyncio.create_task(one.begin()) for one in holding]
        free = [asyncio.create_task(one.begin()) for one in others]
        await asyncio.sleep(0.2)
        before = [task.done() for task in begun]
        begun[MOST_HOLDING].cancel()  # while it waits
        cells = holding[0].cells()
        with pytest.raises(KeyError):  # its rows have no site
            await anext(cells)
        await asyncio.sleep(0.2)
        after = [task.done() for task in begun]
        begun[-1].cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        return before, [task.done() for task in free], after

    before, others, after = asyncio.run(turns())
    assert before == [True] * MOST_HOLDING + [False] * 3
    assert others == [True] * 3
    assert after == [True] * (MOST_HOLDING + 2) + [False]
