# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that need no GPU still run, on as little as they take. What they measure is not
looked at: a benchmark that nobody runs breaks when what it measures is changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import warm

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

SMALL = ["--dtype", "float32", "--eager", "--kv-bytes", "16777216", "--rounds", "1"]
TPOT = ["--batch", "1", "--tokens", "4", "--prompt", "8", "--warm-up", "16"]
CASES = ["off", "idle", "steer", "capture 1 layer", "bystanders", "rule", "32 features"]
"""Of `benchmarks.tpot`: those that need no tree of upstream's."""


def run(name: str, *arguments: str) -> str:
    """What `python -m benchmarks.NAME` prints."""
    # Engines of several processes would each take the first cores.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = warm.run(f"benchmarks.{name}", *arguments, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def cases(file: Path) -> set[str]:
    """Of the rows in a benchmark's JSON, each of which has a value in each round."""
    rows = json.loads(file.read_text())["rows"]
    assert all(row["values"] for row in rows)
    return {row["case"] for row in rows}


@pytest.fixture(scope="module")
def config(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model's folder, with the context that the benchmarks ask for."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_models.path("llama"), folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_capture_host(tmp_path: Path) -> None:
    small = ["--sites", "1", "2", "--requests", "3", "--hidden", "8", "--steps", "2"]
    run("capture_host", *small, "--rounds", "1", "--messages", "--json", str(tmp_path / "a.json"))
    assert {"rows", "output", "collect", "result"} < cases(tmp_path / "a.json")
    prompts = ["--tokens", "5", *small]
    run("capture_host", *prompts, "--rounds", "1", "--json", str(tmp_path / "b.json"))
    assert cases(tmp_path / "b.json") == cases(tmp_path / "a.json")


def test_host_calls_are_few_and_do_not_grow_with_the_batch(tmp_path: Path) -> None:
    """Of a step in which all decode; results of all tokens so far, at each step, are the twin. The
    engine core makes at most 60 of one in which all capture, beside the taps of an eager CPU."""
    cases_ = ["idle", "deltas", "captured", "mixed", "cumulative"]
    grown, core, taps = dict.fromkeys(cases_, 0.0), 0.0, 2 * 3 * 2
    for requests, sign in ((4, -1), (24, 1)):
        path = tmp_path / f"{requests}.json"
        few = ["--requests", str(requests), "--tokens", "8", "--cases", *cases_]
        run("host_calls", *few, "--json", str(path))
        for row in json.loads(path.read_text())["rows"]:
            if row["quantity"] == "our functions":
                case, part = row["case"].split(", ")
                grown[case] += sign * row["values"][0]
                if sign > 0 and case == "captured" and part != "frontend":
                    core += row["values"][0]
    assert taps < core <= 60 + taps
    assert grown.pop("cumulative") >= 20
    assert all(number < 10 for number in grown.values()), grown


def test_admission(tmp_path: Path) -> None:
    small = ["--requests", "3", "--layers", "2", "--hidden", "64", "--rounds", "1", "--profile"]
    run("admission", *small, "--json", str(tmp_path / "a.json"))
    assert {"plain", "own rows", "object list", "module"} < cases(tmp_path / "a.json")


def test_filesystem(tmp_path: Path) -> None:
    small = ["--sites", "2", "--rows", "4", "--hidden", "64", "--mib", "1", "--repeats", "1"]
    file = tmp_path / "files.json"
    run("filesystem", "--root", str(tmp_path / "files"), *small, "--json", str(file))
    assert cases(file) >= {"disk", "per_file", "packed", "sharded"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("arenas", ["--tokens", "64"]),
        ("kernels", ["--tokens", "1", "--hidden", "64"]),
        ("programs", []),
    ],
)
def test_parts(name: str, arguments: list[str]) -> None:
    assert run(name, *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tpot", [*SMALL, *TPOT, "--cases", *CASES]),
        ("prefill", [*SMALL, "--prompt", "16", "--last-requests", "4", "--last-prompt", "8"]),
        ("attention", [*SMALL, "--batch", "2", "--tokens", "4", "--prompt", "64", "--long", "128"]),
    ],
)
def test_engines(name: str, arguments: list[str], config: str, tmp_path: Path) -> None:
    run(name, "--model", config, *arguments, "--json", str(tmp_path / "run.json"))
    assert "off" in cases(tmp_path / "run.json")


def test_early_stop(config: str, tmp_path: Path) -> None:
    small = ["--model", config, *SMALL, "--prompt", "16", "--requests", "2"]
    run("early_stop", *small, "--json", str(tmp_path / "run.json"))
    assert cases(tmp_path / "run.json") == {"whole", "stopped"}


def test_draft_rows(config: str, tmp_path: Path) -> None:
    """Upstream's arm pins memory, so it needs a GPU."""
    small = ["--model", config, *SMALL, "--prompt", "16", "--requests", "2", "--cases", "ours"]
    run("draft_rows", *small, "--files", str(tmp_path), "--json", str(tmp_path / "run.json"))
    assert cases(tmp_path / "run.json") == {"ours"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("hit_rate", ["--requests", "4"]),
        ("host_time", ["--requests", "8", "--tokens", "4"]),
        ("waiting", ["--waiting", "20"]),
        ("stalls", ["--arrivals", "1", "2", "--max-model-len", "512", *SMALL[2:5]]),
    ],
)
def test_schedulers(name: str, arguments: list[str], config: str) -> None:
    assert run(name, "--model", config, *arguments)
