# SPDX-License-Identifier: Apache-2.0
"""The page of a training, in a real browser: its pictures are those of its numbers.

Chromium comes from the system's package; without it this says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pilot.test_training import QUICK, make_pairs
from tests.support.browser import browser
from vllm.pilot import EngineBench, train
from vllm.pilot.report import save_trained

pytestmark = pytest.mark.long


def test_pictures(bench: EngineBench, tmp_path: Path) -> None:
    folder = save_trained(train(bench, make_pairs(), **QUICK), tmp_path / "happy")
    numbers: dict[str, Any] = json.loads((folder / "report.json").read_text())
    layers, sweep = list(numbers["separation"]), numbers["sweep"]
    with browser() as tab:
        page = tab()
        page.open((folder / "report.html").as_uri(), ready="document.readyState === 'complete'")
        page.wait("document.querySelector('#separation svg') && document.querySelector('canvas')")
        assert json.loads(page.evaluate("$('numbers').textContent")) == numbers
        heights = page.evaluate(
            "[...document.querySelectorAll('#separation .bar')].map((b) => "
            "Number(b.getAttribute('height')))"
        )
        aurocs = [numbers["separation"][layer]["auroc"] for layer in layers]
        span = 1 - min(0.5, *aurocs)
        wanted = [max(0.5, abs(auroc - 0.5) / span * 130) for auroc in aurocs]
        assert heights == pytest.approx(wanted, abs=1e-3) and max(wanted) > 1
        chosen = f"layer {numbers['choice']['layer']} "
        assert page.evaluate("document.querySelector('#separation output').textContent").startswith(
            chosen
        )
        said = page.evaluate("document.querySelector('#sweep output').textContent")
        row = sweep["layers"].index(numbers["choice"]["layer"])
        value = sweep["effect"][row][sweep["scales"].index(numbers["choice"]["scale"])]
        assert said.startswith(chosen) and said.endswith(
            f"{page.evaluate(f'shown({value})')} {sweep['unit']}"
        )
        # The twin: the arrows read another layer.
        page.evaluate("document.querySelector('#sweep canvas').focus()")
        page.press("ArrowUp" if row + 1 < len(sweep["layers"]) else "ArrowDown")
        assert page.evaluate("document.querySelector('#sweep output').textContent") != said
        assert not page.problems
        assert all(url.startswith("file:") for url in page.requests)
