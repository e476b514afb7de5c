# SPDX-License-Identifier: Apache-2.0
"""Tests of each tier; a module without a tier is an error that says what to do; and the programs
that make runs set their process up before they import vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.quick

MARKED = "pytestmark = [pytest.mark.quick, pytest.mark.v2]\n"
TESTS = """
def test_module(): pass

@pytest.mark.full
def test_more(): pass

@pytest.mark.v2("full")
def test_more_in_v2(): pass
"""


def collected(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(f"import pytest\n{text}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "-q"]
    command += [*options, "-c", str(ROOT / "pyproject.toml"), str(folder / "test_it.py")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tier=quick"], ["test_module", "test_more_in_v2"]),
        (["--tier=full"], ["test_module", "test_more", "test_more_in_v2"]),
        ([], ["test_module", "test_more", "test_more_in_v2"]),
        (["--tier=quick", "--runner=v2"], ["test_module"]),
        (["--tier=full", "--runner=v2"], ["test_module", "test_more", "test_more_in_v2"]),
        (["--tier=long"], []),
    ],
)
def test_a_tier(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    out = collected(tmp_path, MARKED + TESTS, *options).stdout
    assert [line.split("::")[1] for line in out.splitlines() if "::" in line] == expected


def test_a_module_without_a_tier(tmp_path: Path) -> None:
    got = collected(tmp_path, TESTS)
    assert got.returncode != 0
    assert "test_it.py is in no tier: put `pytestmark = pytest.mark.quick`" in got.stderr


def prepared() -> list[str]:
    """Modules that make runs, and that prepare an environment."""
    names = re.findall(r"-m (tests[\w.]*)", (ROOT / "Makefile").read_text())
    files = {name: ROOT / name.replace(".", "/") for name in names}
    sources = {
        name: (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for name, path in files.items()
    }
    return [
        name
        for name, source in sources.items()
        if re.search(r"[ .]prepare(d|_environment)\(", source)
    ]


UNTIL_PREPARED = """
import runpy, sys
from tests.conformance import engine

def prepare(*given, really=engine.prepare_environment):
    really(*given)
    sys.exit("prepared")

engine.prepare_environment = prepare
sys.argv = [sys.argv[1]]
{late}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", prepared())
def test_programs_prepare_before_they_import(name: str) -> None:
    """With a twin in which something of that name was imported first."""
    ends = []
    for late in ("", "sys.modules['vllm'] = sys"):
        code = UNTIL_PREPARED.format(late=late)
        done = subprocess.run(
            [sys.executable, "-c", code, name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        ends.append(done.stderr.strip().splitlines()[-1])
    assert ends[0] == "prepared"
    assert "call it first" in ends[1]


def test_programs_are_found() -> None:
    assert {"tests.http.fuzz", "tests.peers.lens_fuzz", "tests.mutations"} <= set(prepared())
