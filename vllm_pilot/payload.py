# SPDX-License-Identifier: Apache-2.0
"""Reads payload.zip, which the wheel carries: what our files are, without those of upstream.

    manifest.json     the versions, and each file's hashes before and after
    VERSION.patch     the lines that change in that vLLM's files: the seams, and the proved taps
    added/vllm/...    our own files
    VERSION/vllm/...  those of them that are others for that version
    demo/...          the program of `vllm-pilot demo`

The lines in a patch were made by the codemod in `patches/taps` on that version's wheel, so that an
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
class Upstream:
    """A version of vLLM in a payload."""

    distributions: tuple[str, ...]
    """The names under which that version is installed."""
    untested: str
    """Things that nobody ran on it, "" if all was."""
    changed: Mapping[str, tuple[str, str]]
    """Hashes of upstream's files before and after."""
    added: Mapping[str, str]
    """Hashes of our own files."""


@dataclass(frozen=True)
class Manifest:
    """The versions and hashes in a payload."""

    version: str
    """The version of our files."""
    upstreams: Mapping[str, Upstream]
    """The versions of vLLM that they are for."""

    @property
    def known(self) -> tuple[tuple[str, str], ...]:
        """The names and versions of what may be patched."""
        return tuple(
            (name, version) for version, one in self.upstreams.items() for name in one.distributions
        )


def read_manifest() -> Manifest:
    """Read the manifest; raises BuildError where the wheel was built without a payload."""
    if not PAYLOAD.exists():
        raise BuildError(f"{PAYLOAD} is missing; install the wheel that `make pilot-wheel` builds")
    with zipfile.ZipFile(PAYLOAD) as archive:
        data = json.loads(archive.read("manifest.json"))
    return Manifest(
        data["version"],
        {
            version: Upstream(
                tuple(one["distributions"]),
                one["untested"],
                {name: (before, after) for name, (before, after) in one["changed"].items()},
                one["added"],
            )
            for version, one in data["upstreams"].items()
        },
    )


def wanted(installed: Installed) -> Wanted:
    """Make the files to have of the payload and of upstream's files, as they were before ours.

    Raises:
        BuildError: a file of upstream's is not that of the pinned wheel, or the payload is damaged.
    """
    manifest, version = read_manifest(), installed.public
    upstream = manifest.upstreams[version]
    files: dict[str, tuple[str | None, bytes]] = {}
    with zipfile.ZipFile(PAYLOAD) as archive, tempfile.TemporaryDirectory() as folder:
        patch = udiff.parse(Path(archive.extract(f"{version}.patch", folder)))
        for diff in patch.diffs:
            before, after = upstream.changed[diff.path]
            old = upstream_bytes(installed.site, diff.path)
            if old is None or digest(old) != before:
                raise BuildError(
                    f"{diff.path} in {installed.site} is not that of {installed.name} {version}; "
                    f"reinstall it: pip install --force-reinstall --no-deps "
                    f"{installed.name}=={version}; nothing was changed"
                )
            files[diff.path] = (before, checked(diff.path, udiff.apply(PAYLOAD, diff, old), after))
        others = {name for name in archive.namelist() if name.startswith(f"{version}/")}
        for name, after in upstream.added.items():
            own = f"{version}/{name}"
            data = archive.read(own if own in others else f"added/{name}")
            files[name] = (None, checked(name, data, after))
    return Wanted(manifest.version, installed.name, version, files)


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
