# SPDX-License-Identifier: Apache-2.0
"""Reads payload.zip, which the wheel carries: what our files are, without those of upstream.

    manifest.json     the versions, and each file's hashes before and after
    upstream.patch    the lines that change in upstream's files: the seams, and the proved taps
    added/vllm/...    our own files
    demo/...          the program of `vllm-pilot demo`

The lines in the patch were made by the codemod in `patches/taps` on the pinned wheel, so that an
installation needs neither it, nor its parser, nor git.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_pilot import BuildError, udiff
from vllm_pilot.change import Wanted, upstream_bytes
from vllm_pilot.installed import Installed
from vllm_pilot.state import digest

PAYLOAD = Path(__file__).with_name("payload.zip")


@dataclass(frozen=True)
class Manifest:
    """The versions and hashes in a payload."""

    version: str
    """The version of our files."""
    upstream: str
    """The version of vLLM that they are for."""
    distributions: tuple[str, ...]
    """The names under which that version is installed."""
    changed: Mapping[str, tuple[str, str]]
    """Hashes of upstream's files before and after."""
    added: Mapping[str, str]
    """Hashes of our own files."""


def read_manifest() -> Manifest:
    """Read the manifest; raises BuildError where the wheel was built without a payload."""
    if not PAYLOAD.exists():
        raise BuildError(f"{PAYLOAD} is missing; install the wheel that `make pilot-wheel` builds")
    with zipfile.ZipFile(PAYLOAD) as archive:
        data = json.loads(archive.read("manifest.json"))
    return Manifest(
        data["version"],
        data["upstream"],
        tuple(data["distributions"]),
        {name: (before, after) for name, (before, after) in data["changed"].items()},
        data["added"],
    )


def wanted(installed: Installed) -> Wanted:
    """Make the files to have of the payload and of upstream's files, as they were before ours.

    Raises:
        BuildError: a file of upstream's is not that of the pinned wheel, or the payload is damaged.
    """
    manifest = read_manifest()
    files: dict[str, tuple[str | None, bytes]] = {}
    with zipfile.ZipFile(PAYLOAD) as archive, tempfile.TemporaryDirectory() as folder:
        patch = udiff.parse(Path(archive.extract("upstream.patch", folder)))
        for diff in patch.diffs:
            before, after = manifest.changed[diff.path]
            old = upstream_bytes(installed.site, diff.path)
            if old is None or digest(old) != before:
                raise BuildError(
                    f"{diff.path} in {installed.site} is not that of {installed.name} "
                    f"{manifest.upstream}; reinstall it: pip install --force-reinstall --no-deps "
                    f"{installed.name}=={manifest.upstream}; nothing was changed"
                )
            files[diff.path] = (before, checked(diff.path, udiff.apply(PAYLOAD, diff, old), after))
        for name, after in manifest.added.items():
            files[name] = (None, checked(name, archive.read(f"added/{name}"), after))
    return Wanted(manifest.version, installed.name, manifest.upstream, files)


def checked(name: str, data: bytes, expected: str) -> bytes:
    """Return `data`; raises BuildError where it is not what the manifest says."""
    if digest(data) != expected:
        raise BuildError(f"{name} in {PAYLOAD} is damaged; reinstall vllm-pilot")
    return data


def extract_demo(folder: Path) -> None:
    """Write the demo's program to `folder`/demo."""
    with zipfile.ZipFile(PAYLOAD) as archive:
        for name in archive.namelist():
            if name.startswith("demo/"):
                archive.extract(name, folder)
