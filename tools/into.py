# SPDX-License-Identifier: Apache-2.0
"""Makes the fork in place of an unpacked upstream wheel, offline: `assemble --into TREE`.

It is for a host without network or git (a GPU host): it needs the standard library and libcst
only, and copies our files. Run it again after any change: TREE/.vllm-pilot keeps upstream's
originals, and each run starts from them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tools import wheels
from tools.assemble import layers
from tools.backend import write_dist_info
from tools.pins import ROOT, TARGETS, BuildError, Pin, load_pin

STATE = ".vllm-pilot"


def upstream_info(tree: Path) -> Path:
    """Return upstream's dist-info; the first run moves it to TREE/.vllm-pilot."""
    state = tree / STATE
    if not list(state.glob("*.dist-info")):
        if not (tree / "vllm").is_dir():
            raise BuildError(f"{tree} has no vllm/; unpack the pinned wheel there first")
        info = wheels.dist_info(tree)
        state.mkdir(exist_ok=True)
        info.rename(state / info.name)
    return wheels.dist_info(state)


def pin_of(info: Path, root: Path) -> Pin:
    """Return the pin of the wheel that `info` comes from."""
    pins = [load_pin(root, target) for target in TARGETS]
    for pin in pins:
        if info.name == "-".join(pin.filename.split("-")[:2]) + ".dist-info":
            return pin
    raise BuildError(
        f"{info.name} is not of a wheel in upstream.toml; unpack one of: "
        + ", ".join(pin.filename for pin in pins)
    )


def stage_upstream(tree: Path, stage: Path, record: dict[str, str]) -> None:
    """Copy upstream's Python files, as they were before any earlier run, verified by RECORD."""
    originals = tree / STATE / "originals"
    for name, digest in record.items():
        source = originals / name if (originals / name).exists() else tree / name
        # A GPU bundle may leave out packages that nobody imports there.
        if not name.endswith(".py") or not source.exists():
            continue
        data = source.read_bytes()
        if wheels.record_hash(data) != digest:
            raise BuildError(f"{source} is not upstream's; unpack the pinned wheel anew")
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_bytes(data)


def assemble_into(tree: Path, root: Path = ROOT) -> list[str]:
    """Make `tree` the fork, and return the paths written or removed.

    Nothing is written before all fits.

    Raises:
        BuildError: the tree is not of a pinned wheel, or was changed by others.
    """
    info = upstream_info(tree)
    pin = pin_of(info, root)
    record = wheels.record(tree / STATE)
    added = tree / STATE / "added"
    for leftover in tree.glob(f"{STATE}-*"):
        shutil.rmtree(leftover)
    stage = Path(tempfile.mkdtemp(prefix=f"{STATE}-", dir=tree))
    try:
        stage_upstream(tree, stage, record)
        layers(stage, root, lambda layer: None)
        staged = {str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file()}
        before = set(added.read_text().split("\n")) - {""} if added.exists() else set()
        changed = sorted(name for name in staged if differ(stage / name, tree / name))
        ours = staged - set(record)
        # What is needed to undo comes first, so that a run that is cut short can be repeated.
        added.write_text("\n".join(sorted(before | ours)))
        for name in changed:
            original = tree / STATE / "originals" / name
            if name in record and not original.exists():
                original.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, original.with_suffix(".partial"))
                original.with_suffix(".partial").rename(original)
        for name in changed:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).replace(tree / name)
        for name in before - ours:
            (tree / name).unlink(missing_ok=True)
        for old in tree.glob("vllm-*.dist-info"):
            shutil.rmtree(old)
        write_dist_info(info, stage, pin).rename(tree / f"vllm-{pin.version}.dist-info")
        added.write_text("\n".join(sorted(ours)))
    finally:
        shutil.rmtree(stage)
    return changed + sorted(before - ours)


def differ(new: Path, old: Path) -> bool:
    """Tell whether two files differ; they do if `old` is not there."""
    return not old.exists() or new.read_bytes() != old.read_bytes()
