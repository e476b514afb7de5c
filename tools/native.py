# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/ with CMake against the torch of this Python, and leaves the library in a directory.

python -m tools.native DIRECTORY       (the vllm package: taps use it from there)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY = "_pilot.so"


class NativeBuildError(Exception):
    """The build cannot start or failed; the text has the compiler's own words."""


def missing() -> str:
    """What a build needs and this machine does not have, empty if nothing."""
    if shutil.which("cmake") is None:
        return "cmake"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return "a C++ compiler"
    return ""


def build(into: Path) -> Path:
    """The library, built in a temporary directory and then moved to `into` in one piece."""
    if lacking := missing():
        raise NativeBuildError(f"{lacking} not found")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise NativeBuildError("torch is not installed for this Python")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as work:
        commands: list[list[str | Path]] = [
            ["cmake", "-S", SOURCE, "-B", work, *generator, f"-DTORCH={Path(torch.origin).parent}"],
            ["cmake", "--build", work, "--parallel"],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NativeBuildError(f"{done.stdout}\n{done.stderr}")
        return (Path(work) / LIBRARY).replace(into / LIBRARY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    started = time.monotonic()
    print(build(parser.parse_args().directory), f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
