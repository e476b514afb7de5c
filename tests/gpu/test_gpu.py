# SPDX-License-Identifier: Apache-2.0
"""The checks of a GPU host, one test a script: `pytest -m gpu tests/gpu`.

A script prints a line a check, and ends with status 1 if one fails. Those that need another
project's wheel, a compiler or upstream's tree are run by hand: CONTRIBUTING.md has all of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT
from tests.gpu.run import MODES

pytestmark = pytest.mark.gpu

SCRIPTS = (
    "sleep",
    "starts",
    "stale",
    "offload",
    "extractor",
    "terms",
    "invariant",
    "quantised",
    "features",
    "early_stop",
)
TWO = (
    "run --only full_and_piecewise heads focus",
    "invariant",
    "features",
    "early_stop",
    "orphans",
)
"""Scripts, with arguments, that run tensor-parallel, too."""


def run(script: str) -> None:
    """Run a script, show what it prints, and fail with it."""
    name, *arguments = script.split()
    command = [sys.executable, "-m", f"tests.gpu.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}"


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_mode(mode: str) -> None:
    run(f"run --only {mode}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script(script: str) -> None:
    run(script)


@pytest.mark.parametrize("script", TWO)
def test_two_gpus(script: str) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("this host has one GPU")
    run(f"{script} --tp 2")
