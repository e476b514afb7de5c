# SPDX-License-Identifier: Apache-2.0
"""Writes requirements/cuda.txt, with hashes, from a lock file that a resolver wrote (PEP 751).

    echo 'vllm==VERSION' >vllm.txt          # and the first entries of `requires` in upstream.toml
    uv pip compile vllm.txt --format pylock.toml -o pylock.cuda.toml \\
        --python-version 3.12 --python-platform x86_64-manylinux_2_28
    python -m tools.lock pylock.cuda.toml

The resolver reads the metadata of wheels alone: no GPU is needed, and nothing large is downloaded.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

CUDA = Path(__file__).parents[1] / "requirements" / "cuda.txt"
HEADER = """\
# vLLM and all that it needs on a GPU host, with the hashes of the wheels: CPython 3.12, Linux on
# x86-64. Made by tools/lock.py. `pip install --require-hashes -r requirements/cuda.txt`, then
# `pip install --no-deps vllm-pilot`.
"""


def requirements(lock: dict[str, Any]) -> str:
    """Return the lines of a requirements file.

    Args:
        lock: content of a pylock.toml for one version of Python and one platform.

    Raises:
        KeyError: a package has no file with a SHA-256.
    """
    lines = []
    for package in lock["packages"]:
        files = package.get("wheels") or [package["sdist"]]
        hashes = sorted({file["hashes"]["sha256"] for file in files})
        line = f"{package['name']}=={package['version']}"
        lines.append(" \\\n    ".join([line, *(f"--hash=sha256:{digest}" for digest in hashes)]))
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    CUDA.write_text(requirements(tomllib.loads(Path(sys.argv[1]).read_text())))
