# SPDX-License-Identifier: Apache-2.0
"""Runs import-linter on our files and seams: pyproject.toml says who may import whom."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.assemble import overlay_files
from tools.pins import ROOT
from vllm_pilot import udiff

_IMPORT = re.compile(r"\s*(from vllm\S* import [^(]+|import vllm\S*)$")


def seam_imports(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each of upstream's files with the imports that a seam adds to it."""
    for patch in udiff.series(root / "patches" / "seams"):
        for diff in patch.diffs:
            added = [line for hunk in diff.hunks for line in hunk.added]
            yield diff.path, [line.strip() for line in added if _IMPORT.match(line)]


def lay_out(folder: Path, root: Path = ROOT) -> None:
    """Lay out our modules, and of upstream's those with a seam, with nothing in them but what the
    seam imports, as a package `vllm`.

    With all of upstream's in between, everything would import everything.
    """
    for name in overlay_files(root):
        if name.endswith(".py"):
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(root / name)
    for name, lines in seam_imports(root):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(f"{line}\n" for line in lines))
    packages = {
        parent for path in folder.rglob("*.py") for parent in path.relative_to(folder).parents
    }
    for package in packages - {Path(".")}:
        (folder / package / "__init__.py").touch()


def main(root: Path = ROOT) -> int:
    """Exit status 1, and the imports that a contract forbids, if there are any."""
    settings = f"config_filename={str(root / 'pyproject.toml')!r}, no_cache=True, no_logo=True"
    check = f"import sys, importlinter.cli as cli; sys.exit(cli.lint_imports({settings}))"
    with tempfile.TemporaryDirectory() as made:
        lay_out(Path(made), root)
        return subprocess.run([sys.executable, "-c", check], cwd=made, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
