# SPDX-License-Identifier: Apache-2.0
"""vLLM-Lens's own tests, as its wheel ships them, against engines with `compat=["lens"]`.

Its model's name is a folder of the working directory with a random model of as many layers; see
`tests/peers/lens_suite.py` for what else is said to it. docs/coming-from.md lists what cannot pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch

from tests import ROOT
from tests.conformance import models
from tests.http.server import save_tokenizer
from tests.peers.packages import folder_of

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
LAYERS = 24
HOOKS = "extra_args.apply_hooks: is for vLLM-Lens"
OFFLINE = {
    "test_steering_offline": (4, {
        "test_hook_values_and_request_cleanup[generate]": HOOKS,
        "test_hook_values_and_request_cleanup[chat]": HOOKS,
    }),
    "test_activations_offline": (5, {}),
}  # fmt: skip
"""Module -> how many of its tests pass on one device, and those that do not, with our words."""
LONGER: dict[str, tuple[int, dict[str, str]]] = {
    "test_steering": (6, {}),
    "test_activations_match": (3, {}),
    "test_activations_chunked_prefill": (3, {}),
}
"""The same of those that take longer: most start engines in processes."""
NEEDS = ("requires at least 2 GPUs", "snapshot was recorded on")
"""What their own tests skip for."""


@pytest.fixture
def working(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """A folder in which their model's name is one of a model."""
    row = tiny_models.row("qwen2")

    def config() -> Any:
        plain = row.config()
        fields = {**plain.to_dict(), "layer_types": None, "max_position_embeddings": 2048}
        return type(plain)(**{**fields, "num_hidden_layers": LAYERS})

    saved = models.save(replace(row, name="qwen2-lens", config=config), tmp_path / "saved")
    (tmp_path / MODEL).parent.mkdir()
    saved.rename(tmp_path / MODEL)
    save_tokenizer(tmp_path / MODEL)
    return tmp_path


def run(working: Path, modules: list[str]) -> dict[str, list[ElementTree.Element]]:
    """The cases of modules of theirs, by module."""
    theirs, report = folder_of("lens"), working / "report.xml"
    options = [
        "asyncio_mode=auto",
        "asyncio_default_fixture_loop_scope=module",
        "asyncio_default_test_loop_scope=module",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={theirs}"]
    for plugin in ("tests.peers.lens_suite", "pytest_asyncio", "syrupy", "no:cacheprovider"):
        command += ["-p", plugin]
    command += [f"-o={option}" for option in options]
    command += [f"--junitxml={report}"]
    command += [str(theirs / "vllm_lens" / "tests" / f"{module}.py") for module in modules]
    import vllm

    paths = [str(Path(vllm.__file__).parents[1]), str(theirs), str(ROOT)]
    settings = {"VLLM_LENS_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        command, cwd=working, env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert report.exists(), (done.stdout + done.stderr)[-4000:]
    found: dict[str, list[ElementTree.Element]] = {module: [] for module in modules}
    for case in ElementTree.parse(report).iter("testcase"):
        module = next(m for m in modules if m in case.attrib["classname"].split("."))
        found[module].append(case)
    return found


def judged(cases: list[ElementTree.Element]) -> tuple[int, dict[str, str]]:
    """How many passed, and why the others did not; what they skip themselves is left out."""
    passed, failed = 0, {}
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        why = " ".join(f"{part.attrib.get('message', '')} {part.text}" for part in bad)
        if not bad:
            passed += 1
        elif bad[0].tag != "skipped" or not any(said in why for said in NEEDS):
            failed[case.attrib["name"]] = why
    return passed, failed


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(OFFLINE, id="offline"),
        pytest.param(LONGER, id="longer", marks=pytest.mark.long),
    ],
)
def test_theirs(working: Path, modules: dict[str, tuple[int, dict[str, str]]]) -> None:
    for module, cases in run(working, [*modules]).items():
        expected, refused = modules[module]
        passed, failed = judged(cases)
        wrong = {name: why for name, why in failed.items() if name not in refused}
        assert not wrong, json.dumps(wrong)[:4000]
        assert failed.keys() == refused.keys()
        for name, said in refused.items():
            assert said in failed[name]
        on_two = len(cases) - expected - len(refused)  # those that want two GPUs
        assert expected <= passed <= expected + (on_two if torch.cuda.is_available() else 0)
