# SPDX-License-Identifier: Apache-2.0
"""Which tests a tier has; and a module without a tier is an error that says what to do."""

from __future__ import annotations

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
