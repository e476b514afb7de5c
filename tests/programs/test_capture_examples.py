# SPDX-License-Identifier: Apache-2.0
"""The examples of examples/capture_consumers do what they say: a plug-in that is installed and
found by name, a probe that learns while the model serves, a view of scores that are the rows'."""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.live import Live

from demo.train import Recipe, cached_model
from examples.capture_consumers.live_view import View, direction, shade, start, watch
from examples.capture_consumers.online_probe import OnlineProbe, demo_texts, read_texts
from tests import ROOT
from tests.conformance.engine import shut_down
from tests.support import warm
from vllm import LLM, SamplingParams
from vllm.v1.capture.registry import parse_consumers

pytestmark = pytest.mark.full

PLUGIN = ROOT / "examples" / "capture_consumers" / "site_statistics"
TINY = Recipe(hidden=64, heads=2, layers=3, intermediate=64, passages=300, steps=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_model(tmp_path_factory.mktemp("model"), TINY, Console(quiet=True))


def run(*command: object, path: Path = ROOT) -> str:
    """What a Python process printed, its engine core in a process of its own."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# -- a package with a consumer ------------------------------------------------------------------

USER = """
import sys

import torch
from vllm import LLM, SamplingParams

model, folder = sys.argv[1:]


def main() -> None:
    llm = LLM(
        model=model,
        capture_consumers=["inline", f"site_statistics:path={folder}/statistics.safetensors"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 28,
    )
    asked = {"hooks": {"post_block": [0, 2]}, "positions": "all"}
    params = SamplingParams(
        max_tokens=9, seed=1, capture={"inline": asked, "site_statistics": asked}
    )
    prompts = ["After supper, Lady Finch returned", "Judge Barrow", "It was the rain that began"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [output.capture_results["inline"].payload for output in outputs]
    counts = [output.capture_results["site_statistics"] for output in outputs]
    assert [c.payload["rows"] for c in counts] == [len(r["post_block", 0]) for r in rows], counts
    sites = {site: torch.cat([r[site].values for r in rows]) for site in rows[0]}
    torch.save(sites, f"{folder}/rows.pt")


if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_a_plugin_is_installed_and_found_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="unknown 'site_statistics'"):
        parse_consumers(["site_statistics:path=x"])
    source, target, out = (tmp_path / name for name in ("source", "target", "out"))
    shutil.copytree(PLUGIN, source)
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--target", target, source)
    out.mkdir()
    (tmp_path / "user.py").write_text(USER)
    run(tmp_path / "user.py", model, out, path=target)

    monkeypatch.syspath_prepend(str(target))
    (spec,) = parse_consumers([f"site_statistics:path={out}/x"]).values()
    assert spec.cls is not None and spec.cls.__module__ == "site_statistics"
    statistics = importlib.import_module("site_statistics").load(out / "statistics.safetensors")
    rows = torch.load(out / "rows.pt")
    assert statistics.keys() == rows.keys() == {("post_block", 0), ("post_block", 2)}
    for site, values in rows.items():
        values = values.double()
        found = statistics[site]
        assert found.count == len(values) > 30
        torch.testing.assert_close(found.mean, values.mean(dim=0))
        torch.testing.assert_close(found.variance, values.var(dim=0, correction=0))
    one, other = statistics.values()
    assert float((one.variance - other.variance).norm() / one.variance.norm()) > 0.1
    assert [path.name for path in out.iterdir() if "unfinished" in path.name] == []


# -- a training loop ----------------------------------------------------------------------------


def test_a_probe_learns_online(model: Path, tmp_path: Path) -> None:
    """The last words tell the label; which rows are whose matters, as the control shows."""
    lines = []
    for i in range(100):
        lines += [f"1\tLady Finch, {i}, was merry", f"0\tLady Finch, {i}, was dreadful"]
    (tmp_path / "texts").write_text("\n".join(lines))
    assert read_texts(tmp_path / "texts")[1] == ("Lady Finch, 0, was dreadful", 0)
    texts = ("--model", str(model), "--texts", str(tmp_path / "texts"))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = warm.run("examples.capture_consumers.online_probe", *texts, env=environment)
    printed = done.stdout
    assert done.returncode == 0, done.stderr[-4000:]
    reports = re.findall(r"^(\d+) rows: accuracy", printed, re.MULTILINE)
    assert reports == ["50", "100", "150", "200"]
    last = re.search(r"^second half: accuracy ([\d.]+), control ([\d.]+)$", printed, re.MULTILINE)
    assert last is not None, printed
    assert float(last[1]) > 0.9
    assert float(last[2]) < 0.75


def test_a_probe_is_judged_before_it_learns() -> None:
    """Rows that repeat are known the second time, not the first."""
    torch.manual_seed(0)
    rows = torch.randn(40, 64)
    labels = (torch.arange(40) % 2).float()
    probe = OnlineProbe(64, learning_rate=0.1)
    probe.learn(rows, labels)
    assert probe.accuracy(40) == 0.5  # of weights that are zero
    for _ in range(20):
        probe.learn(rows, labels)
    assert probe.accuracy(40) > 0.95
    assert sum(label for _, label in demo_texts(20)) == 10


# -- a view -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def viewed(model: Path) -> Iterator[tuple[LLM, View]]:
    view = View(decode=None, names=["mood", "ones"])
    llm = start(model, view, "float32")
    view.decode = llm.get_tokenizer().decode
    yield llm, view
    shut_down(llm)


def test_the_view_shows_the_projections(viewed: tuple[LLM, View]) -> None:
    llm, view = viewed
    found = direction(llm, 1, ["Lady Finch was merry"], ["Lady Finch was dreadful"])
    assert float(found.norm()) == pytest.approx(1)
    directions = torch.stack([found, torch.ones_like(found)])
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    prompt = "After supper, Lady Finch returned to the"
    with Live(view, console=console, refresh_per_second=20):
        output = watch(llm, prompt, 1, directions, 10)
    assert output.capture_results["view"].status == "ok"
    read = {"inline": {"hooks": {"post_block": [1]}, "positions": "all"}}
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=1, capture=read)
    (again,) = llm.generate([prompt], params, use_tqdm=False)
    assert again.capture_results is not None
    rows = again.capture_results["inline"].payload["post_block", 1]
    want = rows.values @ directions.T
    torch.testing.assert_close(torch.stack(view.scores), want, atol=1e-4, rtol=1e-4)
    assert float((want[:, 0] - want[:, 1]).abs().max()) > 0.1
    assert "".join(view.tokens) == llm.get_tokenizer().decode(rows.token_ids.tolist())
    assert len(view.tokens) == len(output.prompt_token_ids) + 9
    console.file = io.StringIO()  # the last frame, drawn once more
    console.print(view)
    frame = console.file.getvalue()
    assert "Finch" in frame and f"mood  {want[-1, 0]:+.2f}" in frame


def test_shades() -> None:
    assert shade(0.0) == shade(-0.0) == "black on rgb(255,255,255)"
    assert shade(1.0) == "black on rgb(255,0,0)"
    assert shade(-1.0) == "black on rgb(0,0,255)"
