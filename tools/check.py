# SPDX-License-Identifier: Apache-2.0
"""Keeps the fork small: what a seam may be, where files live, and that all else is upstream's."""

from __future__ import annotations

from pathlib import Path

from tools import areas, beside, native, wheels
from tools.assemble import edited, locked, overlay_files
from tools.export import changed
from tools.pins import ROOT, Pin, load_pin, other_pins
from vllm_pilot import state, udiff

MAX_HUNK = 6


def check_patch(patch: udiff.Patch) -> list[str]:
    """Return the faults of one patch, each with its remedy."""
    wrong = []
    for key in ("Concern", "Why", "Files"):
        if patch.fields.get(key, "").strip("( )") == "" or patch.fields[key].startswith("("):
            wrong.append(f"the header has no `{key}:`; write it")
    for diff in patch.diffs:
        if diff.path not in patch.files:
            wrong.append(f"it touches {diff.path}, which its `Files:` does not list; list it")
        for hunk in diff.hunks:
            where = f"{diff.path}:{hunk.start}:"
            if hunk.context:
                wrong.append(f"{where} context lines; write patches with `python -m tools export`")
            lines = sum(bool(line.strip()) for line in hunk.added)
            if lines > MAX_HUNK:
                wrong.append(
                    f"{where} {lines} lines, at most {MAX_HUNK}; move them to a module "
                    f"of vllm/ and call it"
                )
            if len(hunk.removed) > len(hunk.added):
                wrong.append(f"{where} lines are removed; a seam inserts, or changes a line")
            if hunk.removed and not patch.fields.get("Changes"):
                wrong.append(f"{where} a line changes; insert, or say why under `Changes:`")
    idle = set(patch.files) - {diff.path for diff in patch.diffs}
    wrong += [f"`Files:` lists {file}, which it does not touch; remove it" for file in sorted(idle)]
    return [f"{patch.path}: {message}" for message in wrong]


def check_tree(tree: Path, upstream: Path, root: Path) -> list[str]:
    """Files of build/tree that are neither upstream's bytes, nor patched, nor wired, nor ours."""
    edits = set(edited(tree))
    wrong = [
        f"{name} is edited in {tree} and not exported; run `python -m tools export`"
        for name in sorted(edits)
    ]
    record = wheels.record(upstream)
    ours = {*overlay_files(root), f"vllm/{native.LIBRARY}"}  # where `make native` was run
    seams = {
        diff.path: diff
        for patch in udiff.series(root / "patches" / "seams")
        for diff in patch.diffs
    }
    wired = changed(tree, "seams", "taps")
    remedy = "run `python -m tools assemble --discard-edits`"
    present = {
        str(path.relative_to(tree))
        for path in (tree / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wrong += [
        f"{name} is missing in {tree}; {remedy}" for name in sorted(set(record) - present - edits)
    ]
    wrong += [
        f"{name} in {tree} is neither upstream's nor ours; delete it, or move it to the repository"
        for name in sorted(present - set(record) - ours - edits)
    ]
    for name in sorted(present & set(record) - wired - edits):
        data = (tree / name).read_bytes()
        same = udiff.blob(data) == seams[name].after if name in seams else False
        if not same and (name in seams or state.digest(data) != record[name]):
            wrong.append(f"{name} in {tree} is not upstream's; {remedy}")
    return wrong


def check(root: Path = ROOT, pin: Pin | None = None) -> list[str]:
    """All that is wrong; empty when nothing is."""
    pin = pin or load_pin(root)
    wrong = [line for p in udiff.series(root / "patches" / "seams") for line in check_patch(p)]
    wrong += [
        f"{other.upstream_version} has {lines} lines for it alone, at most {beside.MAX_LINES}; "
        f"drop that version, or move the pinned one to it"
        for other in other_pins(root)
        if (lines := beside.difference(other, root)) > beside.MAX_LINES
    ]
    wrong += areas.misplaced(root) + areas.over_budget(root)
    if (root / "vllm" / "__init__.py").exists():
        wrong.append("vllm/__init__.py: it would hide the built package; delete it")
    build = root / "build"
    with locked(build):
        upstream = wheels.upstream_folder(pin, build)
    return wrong + check_tree(build / "tree", upstream, root)
