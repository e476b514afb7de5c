# SPDX-License-Identifier: Apache-2.0
"""Other tools as they were published, in folders of their own: nothing of them is in `.venv`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import ROOT

FLAGS = ("--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "--no-compile")


def folder_of(name: str) -> Path:
    """The folder with what `requirements/{name}.txt` pins; skips where it cannot be had."""
    try:
        return fetched(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def fetched(name: str) -> Path:
    """The folder with what `requirements/{name}.txt` pins.

    Raises:
        FileNotFoundError: no package registry gives it.
    """
    pins = ROOT / "requirements" / f"{name}.txt"
    key = hashlib.sha256(pins.read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / "peers" / f"{name}-{key}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-")
    command = [sys.executable, "-m", "pip", "install", "-q", *FLAGS]
    done = subprocess.run(
        [*command, "--target", unfinished, "-r", str(pins)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(unfinished)
        said = (done.stderr.splitlines() or ["?"])[-1]
        raise FileNotFoundError(f"{pins.name} cannot be had: {said}")
    Path(unfinished).rename(folder)
    return folder
