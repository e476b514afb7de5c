# SPDX-License-Identifier: Apache-2.0
"""Makes what a release publishes: `make release`."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from tools import pilot_wheel
from tools.pins import BuildError, Pin


def release(target: Path, pin: Pin, root: Path) -> list[Path]:
    """Write the small wheel, `SHA256SUMS` and `CHANGES.md` into the folder `target`.

    The changes are the subjects of the commits since the last tag, or of all where there is none.

    Returns:
        The three files.

    Raises:
        BuildError: files are not committed, or the tag of this version is on another commit.
    """
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise BuildError(f"commit these first, a release is of a commit:\n{changed}")
    name = f"v{pin.pilot_version}"
    tagged, head = _git(root, "tag", "--points-at", "HEAD").split(), _git(root, "rev-parse", "HEAD")
    if name not in tagged and _git(root, "tag", "--list", name):
        raise BuildError(f"the tag {name} is on another commit: raise `ours` in upstream.toml")
    wheel = pilot_wheel.build(target, pin, root)
    sums, changes = target / "SHA256SUMS", target / "CHANGES.md"
    sums.write_text(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n")
    before = [tag for tag in _git(root, "tag", "--merged", "HEAD", "--sort=-creatordate").split()
              if tag not in tagged]  # fmt: skip
    since = [f"{before[0]}..HEAD"] if before else []
    subjects = _git(root, "log", "--format=* %s", *since)
    title = f"# vLLM Pilot {pin.pilot_version}, for vLLM {pin.upstream_version}"
    source = f"Commit {head}, changes since {before[0] if before else 'the beginning'}."
    changes.write_text(f"{title}\n\n{source}\n\n{subjects}\n")
    return [wheel, sums, changes]


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=True)
    return done.stdout.strip()
