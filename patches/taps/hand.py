# SPDX-License-Identifier: Apache-2.0
"""Classes wired by hand: the row says which line goes where, and which code was read.

The proof does not understand these (fused collectives, sums that a convolution ends). Instead the
row holds a digest of the whole class as it was when a person compared it with
docs/hook-contract.md: one changed token, and the class must be read again.
"""

import ast
import hashlib

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.errors import TapsError
from patches.taps.rows import Row
from patches.taps.shapes import body, code, fail
from patches.taps.source import Source


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """The row's lines at its anchors, each part of exactly one top-level statement."""
    edits, stmts = Edits(), body(forward)
    for where, anchor, line in row.lines:
        found = [s for s in stmts if anchor in code(s)]
        if len(found) != 1:
            raise fail(row, f"one top-level statement with `{anchor}`", f"{len(found)}")
        (edits.before if where == "before" else edits.after).append((found[0], line))
    return edits


def check_read(row: Row, upstream: Source) -> None:
    """TapsError unless the class is, comments and layout aside, the one that was read."""
    found = digest(upstream.cls(row.cls))
    if found != row.digest:
        raise TapsError(
            row.file,
            row.cls,
            f"the code that was read (digest {row.digest})",
            f"other code (digest {found})",
            "read the class, compare its lines in the table with docs/hook-contract.md, "
            "then write the new digest into its row",
        )


def digest(cls: ast.ClassDef) -> str:
    """Of a class of upstream, without the attribute and the calls that we insert."""
    return hashlib.sha256(ast.unparse(cls).encode()).hexdigest()[:16]
