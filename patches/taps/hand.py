# SPDX-License-Identifier: Apache-2.0
"""Places the taps of classes wired by hand: the row says which line goes where in which code.

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
    """Return the edits that put the row's lines at its anchors.

    Raises:
        TapsError: an anchor is not part of exactly one top-level statement.
    """
    edits, stmts = Edits(), body(forward)
    for where, anchor, line in row.lines:
        found = [s for s in stmts if anchor in code(s)]
        if len(found) != 1:
            raise fail(row, f"one top-level statement with `{anchor}`", f"{len(found)}")
        (edits.before if where == "before" else edits.after).append((found[0], line))
    return edits


def check_read(row: Row, upstream: Source) -> None:
    """Check that the class is, comments and layout aside, the one that was read.

    Raises:
        TapsError: its digest is another than the row's.
    """
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
    """Return the digest of a class of upstream, which must not be wired yet: 16 hex digits."""
    return hashlib.sha256(ast.unparse(cls).encode()).hexdigest()[:16]
