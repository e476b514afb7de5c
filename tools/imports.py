# SPDX-License-Identifier: Apache-2.0
"""Runs import-linter on our files: pyproject.toml says who may import whom."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.assemble import overlay_files
from tools.pins import ROOT


def lay_out(folder: Path, root: Path = ROOT) -> None:
    """Our modules alone as a package `vllm`: upstream's call ours from everywhere, so with them in
    between everything would import everything."""
    for name in overlay_files(root):
        if name.endswith(".py"):
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(root / name)
    packages = {
        parent for path in folder.rglob("*.py") for parent in path.relative_to(folder).parents
    }
    for package in packages - {Path(".")}:
        if not (folder / package / "__init__.py").exists():
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
