# SPDX-License-Identifier: Apache-2.0
"""Checks classes that inherit a wired forward(): they need no edit, if they inherit as declared."""

from collections.abc import Iterable

from patches.taps.errors import REMEDY_SHAPE, TapsError
from patches.taps.norms import two_argument_norms
from patches.taps.rows import WIRED, Idiom, Row
from patches.taps.source import Source, bases, method


def check_inherited(row: Row, source: Source, rows: Iterable[Row]) -> None:
    """Check that the class has no forward() of its own and one base, the wired parent.

    The subclass may build other norms in its own `__init__`, so those are checked here as well.

    Raises:
        TapsError: it has a forward() or another base, its parent is not wired, or a norm is not
            known to add.
    """
    cls = source.cls(row.cls)
    found = bases(source, cls)
    parent_file, _, parent_cls = row.parent.partition(":")
    wanted = f"{parent_file.removesuffix('.py').replace('/', '.')}.{parent_cls}"
    if found != [wanted] or method(cls, "forward") is not None:
        raise TapsError(
            row.file,
            row.cls,
            f"only base {wanted} and no forward() of its own",
            f"bases {found}, forward(): {method(cls, 'forward') is not None}",
            REMEDY_SHAPE,
        )
    parent = next((r for r in rows if r.key == row.parent), None)
    if parent is None or parent.idiom not in WIRED | {Idiom.INHERITED}:
        raise TapsError(
            row.file, row.cls, f"{row.parent} wired", "it is not in the table", REMEDY_SHAPE
        )
    as_child = Row(row.file, row.cls, parent.idiom, norms=parent.norms, norm_call=parent.norm_call)
    two_argument_norms(as_child, source)
