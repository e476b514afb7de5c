# SPDX-License-Identifier: Apache-2.0
"""The build backend that pyproject.toml names: `pip wheel .`, `pip install .`, `pip install -e .`.

The wheel is upstream's own, layered. setuptools would unpack it, guess which of 2000 files are
package data and pack them again under rules of its own; here every file is accounted for.
"""

from __future__ import annotations

import configparser
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools import assemble, native, wheels
from tools.pins import ROOT, BuildError, Pin, load_pin
from vllm_pilot import state

Settings = Mapping[str, Any] | None


def rewrite_metadata(text: str, pin: Pin) -> str:
    """Upstream's METADATA as that of distribution `vllm`, our version, our dependencies."""
    head, _, body = text.partition("\n\n")
    lines = []
    for line in re.sub(r"\n[ \t]+", " ", head).split("\n"):
        key, _, value = line.partition(": ")
        if key == "Name":
            value = "vllm"
        elif key == "Version":
            value = pin.version
        elif key == "Requires-Dist":
            name = re.split(r"[^A-Za-z0-9._-]", value, maxsplit=1)[0].lower()
            if name in pin.drop:
                continue
            # An index cannot hold the local version +cpu; without it either build satisfies this.
            value = value.replace(f"torch=={pin.torch}+cpu", f"torch=={pin.torch}")
        lines.append(f"{key}: {value}")
    lines += [f"Requires-Dist: {requirement}" for requirement in pin.requires]
    extras = re.findall(r'extra == "([^"]+)"', "\n".join(pin.requires))
    lines += [f"Provides-Extra: {extra}" for extra in dict.fromkeys(extras)]
    return "\n".join(lines) + "\n\n" + body


def rewrite_entry_points(text: str, pin: Pin) -> str:
    """Upstream's entry_points.txt with our entry points added."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    for group, entries in pin.entry_points.items():
        if not parser.has_section(group):
            parser.add_section(group)
        for name, target in entries.items():
            parser.set(group, name, target)
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def write_dist_info(upstream: Path, folder: Path, pin: Pin) -> Path:
    """Our dist-info, made from upstream's, without RECORD. Returns its folder."""
    info = folder / f"vllm-{pin.version}.dist-info"
    shutil.copytree(upstream, info, ignore=shutil.ignore_patterns("RECORD"))
    for name, rewrite in (
        ("METADATA", rewrite_metadata),
        ("entry_points.txt", rewrite_entry_points),
    ):
        path = info / name
        if not path.exists():
            raise BuildError(f"{upstream / name} is missing; unpack the pinned wheel anew")
        path.write_text(rewrite(path.read_text(), pin))
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: vllm-pilot\nRoot-Is-Purelib: false\nTag: {pin.tag}\n"
    )
    return info


def pack(folder: Path, info: Path, target: Path) -> None:
    """Writes `folder` (with its dist-info `info`) as the wheel `target`, RECORD last."""
    rows = []

    def add(name: str, data: bytes, mode: int) -> None:
        entry = zipfile.ZipInfo(name, date_time=(2000, 1, 1, 0, 0, 0))
        entry.external_attr = (stat.S_IFREG | mode) << 16
        archive.writestr(entry, data, zipfile.ZIP_DEFLATED, compresslevel=3)

    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and ".git" not in path.relative_to(folder).parts:
                data, name = path.read_bytes(), str(path.relative_to(folder))
                add(name, data, 0o755 if os.access(path, os.X_OK) else 0o644)
                rows.append(f"{quoted(name)},{state.digest(data)},{len(data)}\n")
        name = str((info / "RECORD").relative_to(folder))
        add(name, ("".join(rows) + f"{name},,\n").encode(), 0o644)


def quoted(name: str) -> str:
    """A file name as a csv cell."""
    return f'"{name}"' if "," in name or '"' in name else name


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """PEP 517: what the wheel depends on, without building it."""
    pin = load_pin()
    with assemble.locked(ROOT / "build"):
        upstream = wheels.upstream_folder(pin, ROOT / "build")
    return write_dist_info(wheels.dist_info(upstream), Path(metadata_directory), pin).name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 517: the distributable wheel, made in a temporary tree, with native ops where they can be
    built."""
    pin = load_pin()
    name = f"vllm-{pin.version}-{pin.tag}.whl"
    build = ROOT / "build"
    with (
        assemble.locked(build),
        tempfile.TemporaryDirectory(dir=build, prefix="wheel-") as temporary,
    ):
        folder = Path(temporary)
        upstream = wheels.upstream_folder(pin, build)
        shutil.copytree(upstream / "vllm", folder / "vllm", copy_function=assemble.copy_or_link)
        assemble.layers(folder, ROOT, pin, lambda layer: None, build / "wired")
        print(native.build_for_wheel(pin, folder / "vllm"), file=sys.stderr)
        info = write_dist_info(wheels.dist_info(upstream), folder, pin)
        partial = folder.with_suffix(".whl")
        pack(folder, info, partial)
        shutil.move(partial, Path(wheel_directory) / name)
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """PEP 660: the development install, a wheel that only points to build/tree."""
    pin = load_pin()
    tree = assemble.assemble(pin)
    name = f"vllm-{pin.version}-{pin.tag}.whl"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "vllm-pilot.pth").write_text(f"{tree}\n")
        upstream = wheels.upstream_folder(pin, ROOT / "build")
        info = write_dist_info(wheels.dist_info(upstream), folder, pin)
        pack(folder, info, Path(wheel_directory) / name)
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """PEP 517 wants this hook; it always raises BuildError."""
    raise BuildError("there is no source distribution; build from a clone of the repository")
