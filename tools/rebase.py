# SPDX-License-Identifier: Apache-2.0
"""Moves the seams to another upstream version by three-way merge, and reports how it went.

python -m tools rebase WHEEL     leaves build/rebase (a git repository: upstream, then the
                                 merged seams in the work tree) and prints the report
python -m tools rebase --finish  writes patches/seams from build/rebase, once no conflict is left
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools import udiff, wheels
from tools.assemble import codemod, commit, git, locked
from tools.export import unified
from tools.pins import ROOT, BuildError, Pin, load_pin

MARKER = b"<<<<<<< "


@dataclass(frozen=True)
class Merged:
    """One seam file in the new upstream. `state`: untouched, merged, conflict or missing."""

    path: str
    state: str
    hunks: int
    conflicts: int = 0

    def __str__(self) -> str:
        note = f", {self.conflicts} in conflict" if self.conflicts else ""
        return f"  {self.state:9}  {self.path} ({self.hunks} hunks{note})"


def merge(ours: bytes, base: bytes, theirs: bytes) -> tuple[bytes, int]:
    """Three-way merge by git; the merged bytes and the number of conflicts left in them."""
    with tempfile.TemporaryDirectory() as temporary:
        names = []
        for name, data in (("seams", ours), ("pinned", base), ("new", theirs)):
            (Path(temporary) / name).write_bytes(data)
            names.append(name)
        result = subprocess.run(
            ["git", "merge-file", "--stdout", "--diff3", *names],
            cwd=temporary,
            capture_output=True,
            check=False,
        )
    if result.returncode > 127:
        raise BuildError(f"git merge-file failed: {result.stderr.decode()}; is git installed?")
    return result.stdout, result.returncode


def merge_file(patch: udiff.Patch, diff: udiff.FileDiff, old: Path, tree: Path) -> Merged:
    """Merges one seam file into the new upstream's `tree`."""
    target, base = tree / diff.path, (old / diff.path).read_bytes()
    if not target.exists():
        return Merged(diff.path, "missing", len(diff.hunks))
    theirs = target.read_bytes()
    merged, conflicts = merge(udiff.apply(patch.path, diff, base), base, theirs)
    target.write_bytes(merged)
    state = "untouched" if theirs == base else "conflict" if conflicts else "merged"
    return Merged(diff.path, state, len(diff.hunks), conflicts)


def rebase(wheel: Path, root: Path = ROOT, pin: Pin | None = None) -> bool:
    """Tries `wheel`, leaves build/rebase and prints the report. True when nothing needs a hand."""
    if not wheel.exists():
        raise BuildError(f"{wheel} does not exist; get it with `pip download --no-deps`")
    pin = pin or load_pin(root)
    build = root / "build"
    tree = build / "rebase"
    with locked(build):
        old = wheels.upstream_folder(pin, build)
        shutil.rmtree(tree, ignore_errors=True)
        wheels.unpack(wheel, tree)
        commit(tree, "upstream")
        merged = [
            merge_file(patch, diff, old, tree)
            for patch in udiff.series(root / "patches" / "seams")
            for diff in patch.diffs
        ]
        outcomes = codemod(root).verify(tree)
    failing = [outcome for outcome in outcomes if outcome.error]
    by_hand = [file for file in merged if file.state in ("conflict", "missing")]
    print(f"seams: {len(merged)} files, {len(by_hand)} to do by hand")
    print("\n".join(map(str, merged)))
    print(f"taps: {len(outcomes)} classes, {len(failing)} failing")
    print("\n".join(f"  {outcome.error}" for outcome in failing))
    print(
        f"upstream.toml, [wheel.{pin.target}]:\n"
        f'  filename = "{wheel.name}"\n  sha256 = "{wheels.sha256(wheel)}"\n'
        f"Resolve what is to be done by hand in {tree} and patches/taps, then run\n"
        f"`python -m tools rebase --finish`, move the pins of both wheels, `make install test`.",
        file=sys.stderr,
    )
    return not by_hand and not failing


def finish(root: Path = ROOT) -> list[Path]:
    """Writes the patches from build/rebase; those that changed."""
    tree = root / "build" / "rebase"
    if not tree.exists():
        raise BuildError(f"{tree} is missing; run `python -m tools rebase WHEEL` first")
    written = []
    for patch in udiff.series(root / "patches" / "seams"):
        for file in patch.files:
            if not (tree / file).exists():
                raise BuildError(
                    f"{file} is not in the new upstream; move its seam to another file in {tree} "
                    f"and correct `Files:` in {patch.path}"
                )
            if MARKER in (tree / file).read_bytes():
                raise BuildError(f"{tree / file} still has conflict markers; resolve them")
        text = patch.header.rstrip("\n") + "\n\n" + unified(tree, patch.files)
        if text != patch.path.read_text():
            written.append((patch.path, text))
    unowned = set(git(tree, "diff", "--name-only", "upstream").split("\n")) - {""}
    unowned -= {f for p in udiff.series(root / "patches" / "seams") for f in p.files}
    if unowned:
        raise BuildError(f"no patch lists {min(unowned)}, edited in {tree}; add it to a `Files:`")
    for path, text in written:
        path.write_text(text)
    return [path for path, _ in written]
