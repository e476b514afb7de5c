# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md is one program, which finds on the demo's model what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from demo.train import Recipe, cached_model
from tests import ROOT
from tests.docs.test_docs import programs, run

pytestmark = pytest.mark.full


def test_tutorial_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached_model(ROOT / "build" / "demo-model", Recipe(), Console(quiet=True))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for demo.corpus
    printed = run("".join(programs("docs/tutorial.md")), model, tmp_path, multiprocess=False)
    assert re.search(r"^held True layer \d scale", printed, re.M), printed
    assert "Sweep of post_block" in printed
    texts = dict(re.findall(r"^([+-]\d\.\d) (.+)$", printed, re.M))
    assert len(texts) == 3 and texts["-1.0"] != texts["+1.0"]
    assert "saved ['straight.safetensors']" in printed
    assert re.search(r"^RowTable\(\[20, 5, 128\] of 20 outputs, layers \[0, ", printed, re.M)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "happy" / "report.json").read_text())
    assert numbers["held"] and (tmp_path / "happy" / "happy.safetensors").is_file()
