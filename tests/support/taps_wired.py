# SPDX-License-Identifier: Apache-2.0
"""The wired classes of the pinned tree, before and after."""

from __future__ import annotations

from pathlib import Path

from patches.taps.codemod import wire_class
from patches.taps.rows import WIRED, Row
from patches.taps.source import Source, Tree
from patches.taps.table import ROWS

WIRED_ROWS = [row for row in ROWS if row.idiom in WIRED]
BY_CLASS = {row.cls: row for row in WIRED_ROWS}


class Wired:
    """Each class of the pinned tree before and after wiring, made once."""

    def __init__(self, root: Path) -> None:
        self._tree = Tree(root)
        self._done: dict[str, Source] = {}

    def before(self, row: Row) -> Source:
        return self._tree.read(row.file)

    def after(self, row: Row) -> Source:
        if row.key not in self._done:
            self._done[row.key] = wire_class(self.before(row), row)
        return self._done[row.key]
