# SPDX-License-Identifier: Apache-2.0
"""Runs mypy on our files, those of vllm/ at their places among upstream's in build/tree."""

from __future__ import annotations

import os
import subprocess
import sys

from tools.assemble import overlay_files
from tools.pins import ROOT


def main() -> int:
    """Run mypy; return its exit status."""
    tree = ROOT / "build" / "tree"
    files = [name for name in overlay_files() if name.endswith(".py")]
    files.append(os.path.relpath(ROOT / "setup.py", tree))
    for folder in ("vllm_pilot", "tools", "patches", "tests", "demo", "examples", "benchmarks"):
        files += [os.path.relpath(path, tree) for path in sorted((ROOT / folder).rglob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / "build" / "mypy"), *files]
    # From build/tree, where `vllm` is the whole package; in the repository it is a part of it.
    return subprocess.run(
        command, cwd=tree, env=os.environ | {"MYPYPATH": str(ROOT)}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
