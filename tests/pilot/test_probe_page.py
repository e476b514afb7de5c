# SPDX-License-Identifier: Apache-2.0
"""docs/probes.md is true: its commands and its program run as printed, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.pilot.test_train_command import run
from tests.support.labelled import planted, write
from vllm.entrypoints.cli.steering import train as command
from vllm.pilot import EngineBench
from vllm.v1.probes.files import load_probe

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "probes.md").read_text()
ENGINE = 'llm = LLM(model=MODEL, enable_steering=True, capture_consumers=["inline"])\n'


@pytest.fixture
def folder(letters: EngineBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's data, in the working directory; commands take the engine that is there."""
    write(planted(80), tmp_path / "texts.jsonl")
    write(planted(40, seed=1), tmp_path / "others.jsonl")
    texts = [e.prompt for e in planted(60, seed=2).entries if not e.label]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "negatives.jsonl").write_text(lines)
    torch.save(torch.nn.Linear(2 * letters.hidden, 1).state_dict(), tmp_path / "state.pt")
    monkeypatch.setattr(command, "start_bench", lambda _: letters)
    monkeypatch.setattr(command, "end_bench", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands(folder: Path) -> None:
    lines = re.findall(r"^    vllm steering (probe .+)$", PAGE, re.MULTILINE)
    assert [line.split()[1] for line in lines] == ["train", "calibrate", "evaluate", "import"]
    assert [run(*shlex.split(line)) for line in lines] == [0, 0, 0, 0]
    assert {path.name for path in folder.iterdir()} == {
        *("texts.jsonl", "others.jsonl", "negatives.jsonl", "state.pt"),
        *("lies", "judged", "calibrated.safetensors", "imported.safetensors"),
    }


def test_program(letters: EngineBench, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python finds the probe that the commands find."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert ENGINE in program
    exec(compile(program.replace(ENGINE, ""), "probes.md", "exec"), {"llm": letters.llm})
    printed = capsys.readouterr().out
    said = dict(re.findall(r"^(trained|calibrated|judged|rule) (.*)$", printed, re.MULTILINE))
    assert said["trained"].startswith("True ") and ": false positives 0.0" in said["calibrated"]
    assert said["judged"].endswith("better than chance: True)")
    made = load_probe(folder / "python.safetensors")
    assert made.threshold is not None and float(said["rule"]) > made.threshold
    trained = "probe train MODEL --data texts.jsonl --sites post_block.1,post_block.2 --pool max"
    assert run(*shlex.split(f"{trained} --out lies")) == 0
    again = load_probe(folder / "lies" / "lies.safetensors")
    assert again.weight.tobytes() == made.weight.tobytes()
    assert again.threshold != made.threshold


@pytest.mark.quick
def test_the_dashboard_draws_metrics_that_there_are() -> None:
    """Of counters and histograms, by labels that they have."""
    dashboard = json.loads((ROOT / "examples" / "grafana-rules.json").read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    names = set(re.findall(r"vllm:(\w+)", " ".join(asked)))
    source = (ROOT / "vllm" / "v1" / "metrics" / "capture_stats.py").read_text()
    made = re.findall(r'_(counter|histogram)_cls\(\s*name="vllm:(rule_\w+)"', source)
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_count")}
    known = {name + ending for kind, name in made for ending in endings[kind]}
    assert names <= known and names >= {f"{name}_total" for kind, name in made if kind == "counter"}
    labels = set(re.findall(r"by \(([\w, ]+)\)", " ".join(asked)))
    assert labels <= {"rule", "rule, then", "rule, le", "result"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == 4
