# SPDX-License-Identifier: Apache-2.0
"""`vllm steering probe`: options, files, exit statuses, and what is wrong beforehand."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pilot.test_train_command import parse, run
from tests.support.labelled import planted, shuffled, write
from vllm.entrypoints.cli.steering import train as command
from vllm.entrypoints.cli.steering.probe_options import pool_of, sites_of
from vllm.pilot import EngineBench
from vllm.v1.probes import pools
from vllm.v1.probes.files import load_probe

pytestmark = pytest.mark.full

SITES = "--sites=post_block.0,post_block.-1"


@pytest.fixture
def running(letters: EngineBench, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options with which the command takes the engine that is there, and leaves it running."""
    monkeypatch.setattr(command, "start_bench", lambda _: letters)
    return ("model", "--url=there")


def test_train_calibrate_evaluate(
    running: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(planted(80), tmp_path / "texts.jsonl")
    asked = ("probe", "train", *running, f"--data={data}", SITES, "--pool=max")
    assert run(*asked, f"--out={tmp_path / 'lies'}") == 0
    folder = tmp_path / "lies"
    names = {"lies.safetensors", "README.md", "report.html", "report.json"}
    assert {path.name for path in folder.iterdir()} == names
    numbers = json.loads((folder / "report.json").read_text())
    probe = load_probe(folder / "lies.safetensors")
    assert numbers["held"] and numbers["about"] == json.loads(json.dumps(probe.about))
    assert len(numbers["evaluation"]["data"]["sha256"]) == 64 and probe.threshold is not None
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1 and not re.search(r"(src|href)=.https?:", page)
    card = (folder / "README.md").read_text()
    assert "| sites | post_block.0, post_block.3 |" in card and "## Limits" in card
    assert "at no rate of false positives" in card
    # Into the same folder is refused, and labels that say nothing are no result.
    assert run(*asked, f"--out={tmp_path / 'lies'}") == 2
    noise = write(shuffled(planted(80)), tmp_path / "noise.jsonl")
    asked = ("probe", "train", *running, f"--data={noise}", SITES, "--pool=max")
    assert run(*asked, f"--out={tmp_path / 'noise'}") == 1
    assert not list((tmp_path / "noise").glob("*.safetensors"))
    assert "No better than chance" in (tmp_path / "noise" / "README.md").read_text()

    # Calibrated on negatives without labels.
    negatives = tmp_path / "negatives.jsonl"
    texts = [e.prompt for e in planted(60, seed=1).entries if not e.label]
    negatives.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    given = (f"--probe={folder / 'lies.safetensors'}", f"--out={tmp_path / 'at.safetensors'}")
    asked = ("probe", "calibrate", *running, f"--data={negatives}", *given)
    capsys.readouterr()
    assert run(*asked, "--fpr=0.001") == 2
    assert "fpr: 0.001 takes 1000 negative texts at least" in capsys.readouterr().err
    assert run(*asked, "--fpr=0.1") == 0
    assert "false positives 0.1 (" in capsys.readouterr().out
    at = load_probe(tmp_path / "at.safetensors")
    assert at.threshold != probe.threshold and np.array_equal(at.weight, probe.weight)
    assert at.about["calibration"]["negative"] == 60 and "evaluation" in at.about
    assert run(*asked, "--fpr=0.1") == 2  # it is there

    # Judged on others; drawn labels are no better than chance.
    others = write(planted(60, seed=2), tmp_path / "others.jsonl")
    asked = ("probe", "evaluate", *running, f"--probe={tmp_path / 'at.safetensors'}")
    assert run(*asked, f"--data={others}", f"--out={tmp_path / 'judged'}") == 0
    assert {path.name for path in (tmp_path / "judged").iterdir()} == names - {"lies.safetensors"}
    assert "at no rate of false" not in (tmp_path / "judged" / "README.md").read_text()
    noise = write(shuffled(planted(60, seed=2)), tmp_path / "other-noise.jsonl")
    assert run(*asked, f"--data={noise}") == 1
    assert "no better than chance: AUROC 0." in capsys.readouterr().out


def test_heads_of_the_command(running: tuple[str, ...], tmp_path: Path) -> None:
    data = write(planted(80), tmp_path / "texts.jsonl")
    test = write(planted(30, seed=4), tmp_path / "test.jsonl")
    asked = ("probe", "train", *running, f"--data={data}", f"--test={test}", "--layers=0,-1")
    assert run(*asked, f"--out={tmp_path / 'heads'}", "--head=attention", "--heads=2") == 0
    made = load_probe(tmp_path / "heads" / "heads.safetensors")
    assert isinstance(made.pool, pools.Attention) and made.head.outputs == 4
    assert made.sites == (("post_block", 0), ("post_block", 3))
    assert made.about["evaluation"]["positive"] == 30
    asked = (*asked, "--head=mlp", "--units=6", "--pool=rolling_max:2", "--activation=tanh")
    assert run(*asked, f"--out={tmp_path / 'mlp'}", "--score=last") == 0
    made = load_probe(tmp_path / "mlp" / "mlp.safetensors")
    assert made.pool == pools.RollingMax(2) and made.head.units == 6
    assert made.about["score"] == "last"


def test_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 1)
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    asked = ("probe", "import", f"{tmp_path}/state.pt", f"{tmp_path}/made.safetensors", SITES)
    assert run(*asked, "--pool=exponential:0.2", "--threshold=1.5") == 0
    made = load_probe(tmp_path / "made.safetensors")
    assert made.pool == pools.Exponential(0.2) and made.threshold == 1.5
    assert made.hidden_size == 4 and made.about == {"imported": {"file": "state.pt"}}
    rows = torch.randn(3, 2, 4)
    wanted = linear(rows.flatten(1))[:, 0].detach().numpy()
    assert made.numbers(rows)[:, 0] == pytest.approx(wanted, abs=1e-6)
    assert made.numbers(rows + 1)[:, 0] != pytest.approx(wanted, abs=1e-3)
    # A pickle is not read.
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(print))
    capsys.readouterr()
    assert run("probe", "import", f"{tmp_path}/model.pkl", f"{tmp_path}/b", SITES) == 2
    assert "a pickle runs code when it is read" in capsys.readouterr().err
    (tmp_path / "model.pt").write_bytes(pickle.dumps(print))
    assert run("probe", "import", f"{tmp_path}/model.pt", f"{tmp_path}/b", SITES) == 2
    assert "cannot be read: no state dict" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data={tmp}/none.jsonl", SITES], "none.jsonl: does not exist"),
        (["--data={tmp}/broken.jsonl", SITES], "broken.jsonl:2: is not JSON"),
        (["--data={tmp}/few.jsonl", SITES], "split 'train' has no negative examples"),
        ([], "--sites: name them, or --layers"),
        ([SITES, "--layers=1"], "--sites: name them, or --layers"),
        ([SITES, "--head=attention", "--pool=mean"], "--pool: --head attention is a linear head"),
        ([SITES, "--head=attention", "--heads=17"], "heads: 17 make 34 numbers a row"),
        ([SITES, "--head=mlp", "--units=0"], "units: 0 make 0 numbers a row"),
        ([SITES, "--head=mlp", "--activation=step"], "activation: use one of relu, "),
        ([SITES, "--penalty=0"], "penalty: 0.0 is not above 0"),
        ([SITES, "--pool=median"], "argument --pool: 'median' is none of each, mean"),
        ([SITES, "--pool=exponential:2"], "argument --pool: 'exponential:2' is none of"),
        ([SITES, "--pool=exponential"], "argument --pool: 'exponential' is none of"),
        (["--sites=post_block"], "argument --sites: 'post_block' is not such as post_block.6"),
        ([SITES, "--out={tmp}"], "there is something in it"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "start_bench", lambda _: pytest.fail("it was loaded"))
    write(planted(40), tmp_path / "texts.jsonl")
    write(planted(1), tmp_path / "few.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{')
    asked = ["model", f"--data={tmp_path}/texts.jsonl", f"--out={tmp_path}/out"]
    asked += [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert run("probe", "train", *asked) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(planted(40), tmp_path / "texts.jsonl")
    asked = ("probe", "train", "model", f"--data={data}", f"--out={tmp_path}/out", SITES)
    assert run(*asked, "--url=http://127.0.0.1:9") == 2
    assert "error: http://127.0.0.1:9: ConnectError(" in capsys.readouterr().err


def test_as_people_write_them() -> None:
    assert sites_of("post_block.6, pre_attn.-1") == [("post_block", 6), ("pre_attn", -1)]
    assert pool_of("rolling_max:8") == pools.RollingMax(8) and pool_of("each") == pools.Each()
    parsed = parse("probe", "train", "model", "--data=a", "--out=b", "--layers=3,5-6")
    assert parsed.layers == [3, 5, 6] and parsed.model_tag == "model"
