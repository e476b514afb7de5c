# SPDX-License-Identifier: Apache-2.0
"""The record of what was applied to a folder of installed packages: FOLDER/.vllm-pilot.

    state.json     which files, by their hashes before and after, and in which phase the work is
    originals/     upstream's files
    new/           ours, until they are in their places
    lock

While `state.json` says `applying` or `removing`, the files may be a mix; the next change goes back
to upstream's before it does anything else.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_pilot import BuildError

STATE = ".vllm-pilot"
"""The folder beside `vllm/` that holds the record."""


class Phase(enum.StrEnum):
    """The state of the work: `applied` is the only one in which vLLM may run."""

    APPLYING = "applying"
    APPLIED = "applied"
    REMOVING = "removing"


class Found(enum.StrEnum):
    """A file as it is now, beside what the record says."""

    OURS = "ours"
    UPSTREAM = "upstream's again"
    MISSING = "missing"
    OTHER = "edited, or of another version"


@dataclass(frozen=True)
class Entry:
    """One file: the hashes of its contents, as RECORD writes them, and its `stat` once applied."""

    before: str | None
    """The hash of upstream's file, None where there was none."""
    after: str
    size: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True)
class State:
    """The record of one folder."""

    phase: Phase
    version: str
    """The version of our files."""
    distribution: str
    upstream: str
    """The version of `distribution` under our files."""
    files: Mapping[str, Entry]


def digest(data: bytes) -> str:
    """Hash a file's contents as a wheel's RECORD writes it."""
    hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={hashed}"


def read(site: Path) -> State | None:
    """Read the record of `site`, None where nothing was applied; BuildError where it is broken."""
    path = site / STATE / "state.json"
    try:
        data = json.loads(path.read_text())
        files = {name: Entry(**entry) for name, entry in data["files"].items()}
        return State(**{**data, "phase": Phase(data["phase"]), "files": files})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{path} is not a record of vllm-pilot ({error}); delete {path.parent} and reinstall "
            f"vLLM: pip install --force-reinstall --no-deps, with its version"
        ) from None


def write(site: Path, state: State) -> None:
    """Write the record of `site` in one piece, and to the disk."""
    path = site / STATE / "state.json"
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def look(path: Path, entry: Entry) -> Found:
    """Compare a file with its entry by contents."""
    try:
        found = digest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Found.MISSING
    if found == entry.after:
        return Found.OURS
    return Found.UPSTREAM if found == entry.before else Found.OTHER


def altered(site: Path, state: State) -> dict[str, Found]:
    """Return the files that are not as they were applied.

    A file is read only where its size or time differ: 400 files take some milliseconds.
    """
    wrong: dict[str, Found] = {}
    for name, entry in state.files.items():
        try:
            stat = (site / name).stat()
            same = (stat.st_size, stat.st_mtime_ns) == (entry.size, entry.mtime_ns)
        except OSError:
            same = False
        if not same and (found := look(site / name, entry)) is not Found.OURS:
            wrong[name] = found
    return wrong
