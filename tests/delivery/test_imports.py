# SPDX-License-Identifier: Apache-2.0
"""The contracts on imports: kept by the tree as it is, and red where somebody breaks one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import imports
from tools.pins import ROOT

pytestmark = pytest.mark.quick

IN = "vllm/v1/interventions/"
BROKEN = [
    (f"{IN}frontend/request/selectors.py", "vllm.v1.interventions.scheduler.pools"),
    (f"{IN}scheduler/pools.py", "vllm.v1.interventions.worker.token_map"),
    (f"{IN}worker/token_map.py", "vllm.v1.interventions.frontend.request.segments"),
    (f"{IN}plan.py", "vllm.v1.interventions.messages"),
    (f"{IN}errors.py", "vllm.v1.interventions.scheduler.state"),
    ("vllm/v1/capture/registry.py", "vllm.v1.interventions.frontend.request.capture"),
    ("vllm/v1/capture/results.py", "vllm.v1.capture.reader"),
    ("vllm/entrypoints/serve/steering/body.py", "vllm.v1.interventions.scheduler.changes"),
    ("vllm/config/steering.py", "vllm.config.capture"),
    ("vllm/pilot/directions.py", "vllm.v1.interventions.vectors"),
    ("vllm/v1/capture/results.py", "vllm.pilot"),
    (f"{IN}frontend/request/resolve.py", "vllm.entrypoints.serve.steering.body"),
    ("vllm/model_executor/layers/steering_terms.py", "vllm.v1.interventions.errors"),
]
SEAMS = [
    ("request.patch", "frontend.compat.doors import is_asked", "vllm.entrypoints.llm"),
    ("results.patch", "lens_activations import", "vllm.v1.interventions.frontend.compat.lens"),
]
"""Seam, a part of an import that it adds, a module that it may not import in its place."""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The repository's own files and settings, to be broken."""
    shutil.copytree(ROOT / "vllm", tmp_path / "vllm")
    shutil.copytree(ROOT / "patches" / "seams", tmp_path / "patches" / "seams")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_tree_keeps_them(copied: Path) -> None:
    assert imports.main(copied) == 0


@pytest.mark.parametrize(("importer", "imported"), BROKEN)
def test_an_import_that_is_forbidden(
    copied: Path, importer: str, imported: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where it is hidden in a function."""
    file = copied / importer
    file.write_text(f"{file.read_text()}\n\ndef _late() -> None:\n    import {imported}\n")
    assert imports.main(copied) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert Path(importer).stem in said
    assert "BROKEN" in said


@pytest.mark.parametrize(("seam", "part", "imported"), SEAMS)
def test_a_seam_that_imports_what_is_forbidden(
    copied: Path, seam: str, part: str, imported: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = copied / "patches" / "seams" / seam
    lines = file.read_text().splitlines(keepends=True)
    [at] = [i for i, line in enumerate(lines) if line.startswith("+from vllm") and part in line]
    lines[at] = f"+import {imported}\n"
    file.write_text("".join(lines))
    assert imports.main(copied) == 1
    assert "BROKEN" in capfd.readouterr().out
