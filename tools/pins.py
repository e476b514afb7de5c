# SPDX-License-Identifier: Apache-2.0
"""Reads upstream.toml: which wheel is pinned, for which target, under which version of ours."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_pilot import BuildError

__all__ = [
    "ROOT",
    "TARGETS",
    "BuildError",
    "Pin",
    "default_target",
    "load_pin",
    "other_pins",
    "read_toml",
]

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("cpu", "cuda")


@dataclass(frozen=True)
class Differs:
    """The part of upstream.toml about a version of upstream that is not the pinned one."""

    untested: str
    """Things that nobody ran on it, "" if all was; `vllm-pilot apply` says so."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Files of upstream with seams, by their paths in the pinned version."""
    ours: Mapping[str, str] = field(default_factory=dict)
    """Texts in our files that give way to others there. Each occurs once in all of them."""


@dataclass(frozen=True)
class Pin:
    """One pinned upstream wheel."""

    target: str
    project: str
    filename: str
    sha256: str
    torch: str
    drop: tuple[str, ...]
    upstream_version: str
    ours: str
    requires: tuple[str, ...]
    """The requirements beside upstream's dependencies."""
    entry_points: Mapping[str, Mapping[str, str]]
    differs: Differs | None = None
    """The differences of a version beside the pinned one; None for that one."""

    @property
    def version(self) -> str:
        """The version of the built distribution.

        Upstream takes the CPU platform only where it has `cpu` in it.
        """
        local = f"cpu.{self.ours}" if self.target == "cpu" else self.ours
        return f"{self.upstream_version}+{local}"

    @property
    def pilot_version(self) -> str:
        """The version of our files: of the wheel `vllm-pilot`, and the end of `version`."""
        return self.ours.removeprefix("pilot.")

    @property
    def suffix(self) -> str:
        """The end of the names of folders below build/: none for the pinned version."""
        return f"-{self.upstream_version}" if self.differs else ""

    @property
    def tag(self) -> str:
        """The compatibility tag, from the pinned file name: the CPU wheel's WHEEL file lies."""
        return "-".join(self.filename.removesuffix(".whl").split("-")[-3:])


def read_toml(root: Path = ROOT) -> dict[str, Any]:
    """Read upstream.toml; raises BuildError where it is missing or no TOML."""
    path = root / "upstream.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BuildError(
            f"{path} is missing; restore it with `git checkout upstream.toml`"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path} is not valid TOML ({error}); correct it") from None


def default_target() -> str:
    """Return VLLM_TARGET_DEVICE, else "cuda" where an NVIDIA driver is loaded, else "cpu"."""
    target = os.environ.get("VLLM_TARGET_DEVICE")
    if target is None:
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    if target not in TARGETS:
        raise BuildError(
            f"VLLM_TARGET_DEVICE={target!r} is not supported; use one of {', '.join(TARGETS)}"
        )
    return target


def load_pin(root: Path = ROOT, target: str | None = None) -> Pin:
    """Return the pin of `target`, by default the environment's; raises BuildError without one."""
    data = read_toml(root)
    target = target or default_target()
    try:
        wheel = data["wheel"][target]
        return Pin(
            target=target,
            project=wheel["project"],
            filename=wheel["filename"],
            sha256=wheel["sha256"],
            torch=wheel["torch"],
            drop=tuple(wheel["drop"]),
            upstream_version=data["version"],
            ours=data["ours"],
            requires=tuple(data["requires"]),
            entry_points=data.get("entry_points", {}),
        )
    except KeyError as error:
        raise BuildError(f"{root / 'upstream.toml'} has no {error} for {target}; add it") from None


def other_pins(root: Path = ROOT) -> list[Pin]:
    """Return the pins of the versions that are patched beside the pinned one, oldest first.

    They are of CUDA wheels. Raises BuildError where upstream.toml lacks something.
    """
    cuda, found = load_pin(root, "cuda"), read_toml(root).get("beside", {})
    try:
        return [
            replace(
                cuda,
                upstream_version=version,
                filename=one["filename"],
                sha256=one["sha256"],
                torch=one["torch"],
                differs=Differs(one["untested"], one["moved"], one["ours"]),
            )
            for version, one in found.items()
        ]
    except KeyError as error:
        raise BuildError(f"{root / 'upstream.toml'} has no {error} in `beside`; add it") from None
