# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/ with CMake against the torch of this Python, and leaves the library in a directory.

python -m tools.native DIRECTORY       (the vllm package: taps use it from there)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

from tools.pins import ROOT, Pin

LIBRARY = "_pilot.so"


class NativeBuildError(Exception):
    """The build cannot start or failed; the text has the compiler's own words."""


def missing() -> str:
    """Return the first tool that a build needs and this machine lacks, empty if it has all."""
    if shutil.which("cmake") is None:
        return "cmake"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return "a C++ compiler"
    return ""


def own_torch() -> Path:
    """The torch package of this Python."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise NativeBuildError("torch is not installed for this Python")
    return Path(torch.origin).parent


def pinned_torch(pin: Pin, root: Path = ROOT) -> Path:
    """The torch package of the wheel's pinned version, where pip's build isolation hides it.

    It is not downloaded for this: that would be hundreds of megabytes for ops that are optional.
    """
    own = importlib.util.find_spec("torch")
    found = [Path(own.origin).parent] if own and own.origin else []
    found.append(Path(sysconfig.get_path("platlib"), "torch"))
    for torch in (*found, *root.glob(".venv/lib/python3*/site-packages/torch")):
        version = torch / "version.py"
        text = version.read_text() if version.exists() else ""
        if re.search(rf"^__version__ = '{re.escape(pin.torch)}[+']", text, re.MULTILINE):
            return torch
    raise NativeBuildError(f"torch {pin.torch} not found; install it for this Python, build again")


def build(into: Path, torch: Path | None = None, *, cuda: bool = True) -> Path:
    """The library, built in a temporary directory and then moved to `into` in one piece.

    Args:
        into: the directory, made where it is missing.
        torch: the package to build against, by default this Python's.
        cuda: whether CUDA kernels may be in it, where nvcc and torch have what they need.
    """
    if lacking := missing():
        raise NativeBuildError(f"{lacking} not found")
    settings = [f"-DTORCH={torch or own_torch()}", *([] if cuda else ["-DNVCC=OFF"])]
    if shutil.which("ninja"):
        settings += ["-G", "Ninja"]
    # The build isolation of pip, which hides torch, would hide a cmake's Python package, too.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or torch is None}
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as work:
        commands: list[list[str | Path]] = [
            ["cmake", "-S", ROOT, "-B", work, *settings],
            ["cmake", "--build", work, "--parallel"],
        ]
        for command in commands:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise NativeBuildError(f"{done.stdout}\n{done.stderr}")
        return (Path(work) / LIBRARY).replace(into / LIBRARY)


def build_for_wheel(pin: Pin, package: Path) -> str:
    """Builds the library into the vllm package of a wheel; says which ops the wheel then has."""
    try:
        library = build(package, pinned_torch(pin), cuda=pin.target == "cuda").read_bytes()
    except NativeBuildError as error:
        return f"native ops: none: {error}"
    kinds = "CPU and CUDA" if b".nv_fatbin" in library else "CPU"
    glibc = max(map(int, re.findall(rb"\0GLIBC_2\.(\d+)\b", library)))
    return f"native ops: {kinds}, from glibc 2.{glibc} on (elsewhere taps use torch and Triton)"


def main() -> None:
    """Build the ops into the tree that the command line names, and say which there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    started = time.monotonic()
    print(build(parser.parse_args().directory), f"{time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
