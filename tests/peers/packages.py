# SPDX-License-Identifier: Apache-2.0
"""Other tools as they were published, in folders of their own: nothing of them is in `.venv`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests import ROOT

INSTALL = ("install", "--only-binary", ":all:", "--no-compile", "--target")
DOWNLOAD = ("download", "--no-binary", ":all:", "--dest")


def folder_of(name: str) -> Path:
    """The folder with what `requirements/{name}.txt` pins; skips where it cannot be had."""
    return _or_skip(name, INSTALL)


def source_of(name: str) -> Path:
    """The folder with the sources of what `requirements/{name}.txt` pins, each in a folder of its
    own; skips where they cannot be had."""
    return _or_skip(name, DOWNLOAD)


def _or_skip(name: str, action: tuple[str, ...]) -> Path:
    try:
        return fetched(name, action)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def fetched(name: str, action: tuple[str, ...] = INSTALL) -> Path:
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
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
    command = [sys.executable, "-m", "pip", *action, str(unfinished), "-q"]
    done = subprocess.run(
        [*command, "--no-deps", "--ignore-requires-python", "-r", str(pins)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(unfinished)
        said = (done.stderr.splitlines() or ["?"])[-1]
        raise FileNotFoundError(f"{pins.name} cannot be had: {said}")
    for packed in unfinished.glob("*.tar.gz"):
        with tarfile.open(packed) as archive:
            archive.extractall(unfinished, filter="data")
    unfinished.rename(folder)
    return folder
