# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md is one program, which finds on the demo's model what it says; and what it saves
is served and evaluated by the program for another terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from demo.train import Recipe, cached_model
from tests import ROOT
from tests.docs.test_docs import programs, run, said_by_scale
from tests.http.server import serve

pytestmark = pytest.mark.full

PLACE = "http://localhost:8000"
SERVED = ("--dtype=float32", "--enforce-eager", "--max-model-len=256", "--max-num-seqs=16",
          "--kv-cache-memory-bytes=67108864", "--seed=0", "--generation-config=vllm")  # fmt: skip


def test_tutorial_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached_model(ROOT / "build" / "demo-model", Recipe(), Console(quiet=True))
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the page needs the installed package alone
    here = [block for block in programs("docs/tutorial.md") if PLACE not in block]
    printed = run("".join(here), model, tmp_path, multiprocess=False)
    assert re.search(r"^held True layer \d scale", printed, re.M), printed
    assert "Sweep of post_block" in printed
    caa = dict(re.findall(r"^caa ([+-]\d)  (\w+)", printed, re.M))
    assert caa["-1"] in "misty ruined empty frozen", printed
    assert caa["+1"] in "sunny golden blooming friendly", printed
    read = dict(re.findall(r"^probe ([+-]\d+\.\d) .* (\w+) orchard", printed, re.M))
    [(glad, _), (sad, _)] = sorted(read.items(), key=lambda found: -float(found[0]))
    assert float(glad) > 0 > float(sad) and read == {glad: "blooming", sad: "frozen"}, printed
    ruled = dict(re.findall(r"^rule (\S+) .* (\w+) orchard", printed, re.M))
    assert ruled == {"rule:glad": "blooming", "None": "frozen"}, printed
    texts = said_by_scale(printed)
    assert len(texts) == 3 and texts["-1.0"] != texts["+1.0"]
    assert "saved ['straight.safetensors']" in printed
    assert re.search(r"^RowTable\(\[20, 5, 128\] of 20 outputs, layers \[0, ", printed, re.M)
    kept = re.findall(r"^kept (\w+)", printed, re.M)
    assert kept == ["RowTable", "Trained", "Sweep", "CaptureResult"]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "happy" / "report.json").read_text())
    assert numbers["held"] and (tmp_path / "happy" / "happy.safetensors").is_file()

    # The page's own command, in the folder where the program was.
    page = (ROOT / "docs" / "tutorial.md").read_text()
    [options] = re.findall(r"^    vllm serve /path/to/model (.*)$", page, re.M)
    monkeypatch.chdir(tmp_path)
    with serve(model, tmp_path / "log", *options.split(), base=SERVED) as server:
        [evaluated] = [block for block in programs("docs/tutorial.md") if PLACE in block]
        done = subprocess.run(
            [sys.executable, "-c", evaluated.replace(PLACE, server.url)],
            env=os.environ, capture_output=True, text=True, timeout=1800, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    moods = dict(re.findall(r"^([+-]\d\.\d) mood ([+-]\d+\.\d+) ", done.stdout, re.M))
    assert float(moods["-1.0"]) < -0.5 < 0.5 < float(moods["+1.0"]), done.stdout
    # What is served is what was tested here: it writes the same.
    served = dict(re.findall(r"^([+-]\d\.\d) mood [+-]\d+\.\d+ (.+)$", done.stdout, re.M))
    assert served == texts
