# SPDX-License-Identifier: Apache-2.0
"""The cells of examples/first_hour.ipynb run in their order, on the real model that it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.links import broken_links
from tests.support.real import model_folder

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]

pytestmark = pytest.mark.quick


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == kind]


def test_its_form() -> None:
    """Links lead somewhere, names of cells differ, and no output is kept, which would go stale."""
    assert broken_links("\n".join(sources("markdown")), NOTEBOOK.parent) == []
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    assert all(not cell.get("outputs") for cell in CELLS)
    for source in sources("code"):
        compile(source, str(NOTEBOOK), "exec")


@pytest.mark.long
def test_cells_run(tmp_path: Path) -> None:
    """As in a notebook, with the engine core in a process of its own."""
    model_folder()
    body = "\n".join(f"    exec({source!r}, globals())" for source in sources("code"))
    program = tmp_path / "program.py"
    program.write_text(f'if __name__ == "__main__":\n{body}\n')
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(ROOT / "build" / "vllm-cache"),
    }
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = dict(re.findall(r"^([+-]\d\.\d) (.+)$", done.stdout, re.M))
    assert list(said) == ["-1.5", "+0.0", "+1.5"] and len(set(said.values())) == 3
    found = re.search(r"(\d+)% of held-out prompts", done.stdout)
    assert found is not None and int(found[1]) >= 75
    assert done.stdout.rstrip().splitlines()[-1].startswith(("'", '"'))
