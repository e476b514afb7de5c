# SPDX-License-Identifier: Apache-2.0
"""Makes the fork in place of an unpacked upstream wheel, offline: `assemble --into TREE`.

It is for a host without network or git (a GPU host) that has the clone: it needs the standard
library and libcst only, and does to TREE what `vllm-pilot apply` does, with the files of the clone
as they are. Run it again after any change. For a version beside the pinned one it needs
build/seams-VERSION.patch too, which `assemble --beside VERSION` makes elsewhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools import pilot_wheel, wheels
from tools.assemble import layers
from tools.pins import ROOT, TARGETS, BuildError, Pin, load_pin, other_pins
from vllm_pilot import change, installed, state


def pin_of(tree: Path, root: Path) -> Pin:
    """Return the pin of the wheel that was unpacked in `tree`; BuildError where it is none."""
    if not (tree / "vllm").is_dir():
        raise BuildError(f"{tree} has no vllm/; unpack the pinned wheel there first")
    pins = [*(load_pin(root, target) for target in TARGETS), *other_pins(root)]
    known = {(pin.project, pin.upstream_version): pin for pin in pins}
    found = installed.find(known, tree)
    return known[found.name, found.public]


def stage_upstream(tree: Path, stage: Path, record: dict[str, str]) -> None:
    """Copy upstream's Python files, as they were before any earlier run, verified by RECORD."""
    for name, digest in record.items():
        data = change.upstream_bytes(tree, name) if name.endswith(".py") else None
        if data is None:  # A GPU bundle may leave out packages that nobody imports there.
            continue
        if state.digest(data) != digest:
            raise BuildError(f"{tree / name} is not upstream's; unpack the pinned wheel anew")
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_bytes(data)


def assemble_into(tree: Path, root: Path = ROOT) -> list[str]:
    """Make `tree` the fork, and return the paths written or removed.

    Raises:
        BuildError: the tree is not of a pinned wheel, or was changed by others; nothing was changed
            then.
    """
    pin = pin_of(tree, root)
    record = wheels.record(tree)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        stage_upstream(tree, stage, record)
        layers(stage, root, pin, lambda layer: None)
        # As pip would: the entry points, and the version of our files.
        pilot_wheel.write_dist_info(stage, pin, root)
        files: dict[str, tuple[str | None, bytes]] = {}
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            name, data = str(path.relative_to(stage)), path.read_bytes()
            if state.digest(data) != record.get(name):
                files[name] = (record.get(name), data)
    return change.apply(
        tree, change.Wanted(pin.pilot_version, pin.project, pin.upstream_version, files)
    )
