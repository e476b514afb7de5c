# SPDX-License-Identifier: Apache-2.0
"""Moves the seams to another upstream version, hunk by hunk, and reports how it went.

python -m tools rebase VERSION   leaves build/rebase (a git repository: upstream, then the
                                 merged seams in the work tree), build/rebase-classes.diff (what
                                 changed in wired classes) and docs/rebase-VERSION.md
python -m tools rebase --finish  writes patches/seams from build/rebase, once no conflict is left
"""

from __future__ import annotations

import ast
import difflib
import importlib
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tools import merge, wheels
from tools.assemble import codemod, commit, git, locked
from tools.export import unified
from tools.pins import ROOT, BuildError, Pin, load_pin
from tools.rebase_report import Class, File, Report
from tools.upstream_names import gone
from vllm_pilot import udiff


@dataclass(frozen=True)
class Wheel:
    """The new upstream's wheel. Only its Python files are used, and nothing is run."""

    path: Path

    @property
    def version(self) -> str:
        """The version in the wheel's name."""
        return self.path.name.split("-")[1]


def find_wheel(name: str, root: Path = ROOT) -> Wheel:
    """Return the wheel of a path or a version.

    Of a version it is upstream's CUDA wheel, downloaded where it is not cached.
    """
    if name.endswith(".whl"):
        if not Path(name).exists():
            raise BuildError(f"{name} does not exist; give a version to download it")
        return Wheel(Path(name))
    pin = replace(load_pin(root, "cuda"), upstream_version=name)
    pattern = f"{pin.project}-{name}-*.whl"
    folder = wheels.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob(pattern)):
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            wheels.download(pin, Path(partial))
            for file in Path(partial).glob(pattern):
                file.replace(folder / file.name)
    found = sorted(folder.glob(pattern))
    if not found:
        raise BuildError(f"pip found no {pattern}; give the path of a wheel")
    return Wheel(found[-1])


def merge_file(diff: udiff.FileDiff, old: Path, tree: Path) -> File:
    """Merge the seams of one file into the new upstream's `tree`."""
    name = diff.path if (tree / diff.path).exists() else moved(diff.path, old, tree)
    if name is None:
        ours = ["\n".join(f"+{line}" for line in hunk.added) for hunk in diff.hunks]
        lost = [
            merge.Carried("by hand", hunk.start, "it", "the file is gone", shown)
            for hunk, shown in zip(diff.hunks, ours, strict=True)
        ]
        return File(diff.path, tuple(lost))
    base, theirs = (old / diff.path).read_text(), (tree / name).read_text()
    text, carried = merge.carry(base, theirs, diff.hunks)
    (tree / name).write_text(text)
    return File(diff.path, tuple(carried), "" if name == diff.path else name)


def moved(name: str, old: Path, tree: Path) -> str | None:
    """Return the file that one which is gone has become, None if there is none.

    It is new, has the same name, and most of its lines.
    """
    lines = (old / name).read_text().splitlines()
    for file in sorted(tree.rglob(Path(name).name)):
        found = str(file.relative_to(tree))
        match = difflib.SequenceMatcher(None, lines, file.read_text().splitlines(), False)
        if not (old / found).exists() and match.ratio() > 0.5:
            return found
    return None


def class_text(tree: Path, file: str, name: str) -> str:
    """Return the source of a top-level class, "" where there is none."""
    path = tree / file
    text = path.read_text() if path.exists() else ""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    return ""


def new_classes(root: Path, tree: Path) -> list[str]:
    """Return the decoder-like classes of the new tree that no row of the table knows."""
    codemod(root)  # puts root on the path
    known = importlib.import_module("patches.taps.census").check(tree)
    return [finding.key for finding in known if class_text(tree, *finding.key.split(":"))]


def classes(root: Path, old: Path, tree: Path) -> list[Class]:
    """Try every row of the table on the new tree."""
    found = []
    for outcome in codemod(root).verify(tree):
        row = outcome.row
        same = class_text(old, row.file, row.cls) == class_text(tree, row.file, row.cls)
        state = "by hand" if outcome.error else "untouched" if same else "merged"
        wired = bool(row.points or row.parent)
        found.append(Class(row.key, wired, state, str(outcome.error or "")))
    return found


def class_diffs(rows: list[Class], old: Path, tree: Path) -> str:
    """Return what upstream changed in wired classes, as one diff."""
    text = ""
    for row in rows:
        if row.wired and row.state != "untouched":
            file, name = row.key.split(":")
            was, now = (class_text(root, file, name).splitlines() for root in (old, tree))
            lines = difflib.unified_diff(was, now, row.key, row.key, lineterm="", n=5)
            text += "".join(f"{line}\n" for line in lines)
    return text


def rebase(wheel: Wheel, root: Path = ROOT, pin: Pin | None = None) -> Report:
    """Try `wheel`, leave build/rebase, write the report to docs/ and return it."""
    pin = pin or load_pin(root)
    build = root / "build"
    tree = build / "rebase"
    with locked(build):
        old = wheels.upstream_folder(pin, build)
        shutil.rmtree(tree, ignore_errors=True)
        wheels.unpack(wheel.path, tree, only=".py")
        commit(tree, "upstream")
        names = gone(root, old, tree)
        files = [
            merge_file(diff, old, tree)
            for patch in udiff.series(root / "patches" / "seams")
            for diff in patch.diffs
        ]
        rows = classes(root, old, tree)
        new = new_classes(root, tree)
        (build / "rebase-classes.diff").write_text(class_diffs(rows, old, tree))
    report = Report(
        pin.upstream_version, wheel.version, tuple(files), tuple(rows), tuple(new), tuple(names)
    )
    path = root / "docs" / f"rebase-{wheel.version}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.markdown())
    print(
        f"upstream.toml, the wheel of {wheel.version}:\n"
        f'  filename = "{wheel.path.name}"\n  sha256 = "{wheels.sha256(wheel.path)}"\n'
        f"Resolve what is to be done by hand in {tree} and patches/taps, then run\n"
        f"`python -m tools rebase --finish`, move the pins of both wheels, `make install test`.",
        file=sys.stderr,
    )
    return report


def finish(root: Path = ROOT) -> list[Path]:
    """Write the patches from build/rebase, and return those that changed.

    Raises:
        BuildError: something is still to be resolved by hand.
    """
    tree = root / "build" / "rebase"
    if not tree.exists():
        raise BuildError(f"{tree} is missing; run `python -m tools rebase VERSION` first")
    written = []
    for patch in udiff.series(root / "patches" / "seams"):
        for file in patch.files:
            if not (tree / file).exists():
                raise BuildError(
                    f"{file} is not in the new upstream; move its seam to another file in {tree} "
                    f"and correct `Files:` in {patch.path}"
                )
            if merge.SEAMS in (tree / file).read_text():
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
