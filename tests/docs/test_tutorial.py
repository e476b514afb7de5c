# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md is one program. On the first layers of its model all of it runs, and finds
nothing; on the whole model (tier long) it finds what the page says, and what it saves is served and
evaluated by the program for another terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.test_docs import programs, run, said_by_scale
from tests.http.server import serve
from tests.support.real import first_layers, model_folder

pytestmark = pytest.mark.full

PLACE = "http://localhost:8000"
SERVED = ("--dtype=float32", "--enforce-eager", "--max-model-len=256", "--max-num-seqs=16",
          "--kv-cache-memory-bytes=67108864", "--seed=0", "--generation-config=vllm")  # fmt: skip


LAYERS = 4
REGISTERS = 'llm.steering.register_module("happy", "happy/happy.safetensors")'
IN_ITS_PLACE = 'llm.steering.register_module("happy", {"post_block": {layer: caa}})'


def here() -> str:
    """Return the page's program, without the one for another terminal."""
    return "".join(block for block in programs("docs/tutorial.md") if PLACE not in block)


def check_printed(printed: str, folder: Path, layers: int) -> None:
    """Check what any model of SmolLM2's width prints and leaves in the folder."""
    table = re.findall(r"^ +\d+ ((?: *[+-]\d+\.\d+){5})$", printed, re.M)
    swept = [list(map(float, row.split())) for row in table]
    assert len(swept) == len(range(1, layers, 4)) and all(row[2] == 0 for row in swept), printed
    assert all(abs(row[4] - row[0]) > 0.1 for row in swept), printed
    assert len(re.findall(r"^caa ([+-]\d) .+$", printed, re.M)) == 3, printed
    read = dict(re.findall(r"^probe ([+-]\d+\.\d) The party had been (\w+)\.", printed, re.M))
    [(glad, _), (sad, _)] = sorted(read.items(), key=lambda found: -float(found[0]))
    assert float(glad) > 0 > float(sad), printed
    assert read == {glad: "delightful", sad: "miserable"}, printed
    ruled = dict(re.findall(r"^rule (\S+) The party had been (\w+)\.", printed, re.M))
    assert ruled == {"rule:glad": "delightful", "None": "miserable"}, printed
    assert len(said_by_scale(printed)) == 3, printed
    assert "saved ['straight.safetensors']" in printed
    assert re.search(rf"^\(8, {layers}, 576\) .* ' felt'$", printed, re.M), printed
    kept = re.findall(r"^kept (\w+)", printed, re.M)
    assert kept == ["RowTable", "Trained", "Sweep", "CaptureResult"]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_program_on_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no direction that is better than random ones, so no vectors are saved."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the page needs the installed package alone
    model = first_layers(model_folder(), LAYERS, tmp_path / "model")
    assert here().count(REGISTERS) == 1
    printed = run(here().replace(REGISTERS, IN_ITS_PLACE), model, tmp_path)
    check_printed(printed, tmp_path, LAYERS)
    assert re.search(r"^held False layer \d scale", printed, re.M), printed
    numbers = json.loads((tmp_path / "happy" / "report.json").read_text())
    assert not numbers["held"] and not (tmp_path / "happy" / "happy.safetensors").exists()


@pytest.mark.long
def test_program_and_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    model = model_folder()
    printed = run(here(), model, tmp_path)
    check_printed(printed, tmp_path, 30)
    assert re.search(r"^held True layer \d+ scale", printed, re.M), printed
    texts = said_by_scale(printed)
    assert texts["-1.0"] != texts["+1.0"], printed
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
    sad, plain, glad = (float(moods[scale]) for scale in ("-1.0", "+0.0", "+1.0"))
    assert sad + 0.3 < plain < glad - 0.3, done.stdout
    # What is served is what was tested here: it writes the same.
    served = dict(re.findall(r"^([+-]\d\.\d) mood [+-]\d+\.\d+ (.+)$", done.stdout, re.M))
    assert served == texts
