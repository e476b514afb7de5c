# SPDX-License-Identifier: Apache-2.0
"""Wires the taps into an upstream tree: all classes of the table, or nothing.

changed = wire(tree)      # edits tree/vllm/... in place; rows(VERSION) of one beside the pinned
outcomes = verify(tree)   # one per row, nothing written; for `tools rebase`
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from patches.taps import edit, fused, hand, lanes, mlp_in, normed, unfused
from patches.taps.errors import REMEDY_SHAPE, TapsError
from patches.taps.inherited import check_inherited
from patches.taps.proof import prove
from patches.taps.reduced import check_reduced
from patches.taps.rows import DEFERRED, SUMMED, WIRED, Idiom, Row
from patches.taps.source import Source, Tree
from patches.taps.table import ROWS, rows

__all__ = ["Outcome", "TapsError", "rows", "verify", "wire", "wire_class"]

LOCATE = (
    dict.fromkeys(DEFERRED, fused.locate)
    | dict.fromkeys(SUMMED, unfused.locate)
    | {Idiom.PAIRED: fused.locate_paired, Idiom.NORMED: normed.locate, Idiom.HAND: hand.locate}
    | {Idiom.LANES: lanes.locate}
)
"""The functions that place an idiom's taps. A refused class has none, only the reason."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one row: `error` is None where the class fits its idiom."""

    row: Row
    error: TapsError | None

    @property
    def ok(self) -> bool:
        """True if the class fits its idiom."""
        return self.error is None


def wire(tree_root: Path, table: Iterable[Row] = ROWS) -> list[Path]:
    """Wire every row into the tree and return the changed files, sorted.

    All new sources are computed and proved before the first is written.

    Raises:
        TapsError: a row does not fit; the tree is then untouched.
    """
    table, tree = tuple(table), Tree(tree_root)
    sources = _wired_sources(tree, table)
    for row in table:
        _check(tree, row, sources, table)
    changed = []
    for file, source in sorted(sources.items()):
        path = tree_root / file
        path.write_text(source.text, encoding="utf-8")
        changed.append(path)
    return changed


def verify(tree_root: Path, table: Iterable[Row] = ROWS) -> list[Outcome]:
    """Try every row on its own against an unwired tree, and write nothing; one outcome per row."""
    table, tree, outcomes = tuple(table), Tree(tree_root), []
    for row in table:
        try:
            edited = row.idiom in WIRED or row.idiom is Idiom.REFUSED
            sources = {row.file: wire_class(tree.read(row.file), row)} if edited else {}
            _check(tree, row, sources, table)
            outcomes.append(Outcome(row, None))
        except TapsError as error:
            outcomes.append(Outcome(row, error))
    return outcomes


def wire_class(source: Source, row: Row) -> Source:
    """Return the module with one class wired, which is not proved yet."""
    locate = _locate if row.idiom in LOCATE else None
    return Source(source.home, source.file, edit.apply(source, row, locate))


def _locate(row: Row, forward: cst.FunctionDef) -> edit.Edits:
    """Place the taps of a row, those of its idiom and what it has beside."""
    edits = LOCATE[row.idiom](row, forward)
    if row.mlp_in:
        mlp_in.locate(row, forward, edits)
    return edits


def _wired_sources(tree: Tree, table: tuple[Row, ...]) -> dict[str, Source]:
    """Return the modules with all their rows wired, by file."""
    sources: dict[str, Source] = {}
    for row in table:
        if row.idiom in WIRED or row.idiom is Idiom.REFUSED:
            source = sources.get(row.file) or tree.read(row.file)
            sources[row.file] = wire_class(source, row)
    return sources


def _check(tree: Tree, row: Row, sources: dict[str, Source], table: tuple[Row, ...]) -> None:
    """Check all that must hold of a row once its file is wired."""
    source = sources.get(row.file) or tree.read(row.file)
    if row.idiom in WIRED:
        _compiles(source, row)
        if row.idiom is Idiom.HAND:
            hand.check_read(row, tree.read(row.file))
        else:
            prove(row, source)
            check_reduced(row, source)
    elif row.idiom is Idiom.INHERITED:
        check_inherited(row, source, table)
    elif not source.defines(row.cls):
        raise TapsError(row.file, row.cls, "this class", "it is gone", "remove its row")


def _compiles(source: Source, row: Row) -> None:
    try:
        _ = source.tree
    except SyntaxError as error:
        raise TapsError(
            row.file, row.cls, "valid Python after the edit", str(error), REMEDY_SHAPE
        ) from error
