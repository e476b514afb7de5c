# SPDX-License-Identifier: Apache-2.0
"""Places the tap of what the MLP reads, in classes of any idiom that have the point.

h = self.taps.mlp_in(h)          # before each statement that calls the MLP
h = self.mlp(h)

The tap is of the variable that the MLP gets. Where two MLPs read it one after the other, it is
before the first of them.
"""

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import MLP_IN, Row
from patches.taps.shapes import assigned, blocks, body, code, fail, only


def locate(row: Row, forward: cst.FunctionDef, edits: Edits) -> None:
    """Add the tap to the edits of the idiom; raises TapsError where no statement calls the MLP."""
    taps = "taps" if row.loops[0] else "self.taps"
    hoisted = [node for node, _ in edits.hoisted]
    found = 0
    for block in blocks(body(forward)):
        calls = [(stmt, name) for stmt in block if (name := _read_by_mlp(row, stmt))]
        if calls:
            stmt, name = calls[0]
            lines = edits.above if stmt in hoisted else edits.before
            lines.append((stmt, f"{name} = {taps}.{MLP_IN}({name})"))
            found += 1
    if not found:
        raise fail(row, f"a statement that calls one of {list(row.mlps)}", "none")


def _read_by_mlp(row: Row, stmt: cst.BaseStatement) -> str | None:
    """Return the name of the variable that the MLP gets in a statement, if it calls one: `x =
    self.mlp(h)` or `return self.mlp(h), r`."""
    pair, small = assigned(stmt), only(stmt)
    call = pair[1] if pair else None
    if isinstance(small, cst.Return) and isinstance(small.value, cst.Tuple):
        call = small.value.elements[0].value
    if not isinstance(call, cst.Call) or not call.args:
        return None
    if code(call.func).removeprefix("self.") not in row.mlps:
        return None
    given = call.args[0].value
    if not isinstance(given, cst.Name):
        raise fail(row, "an MLP that gets a variable", code(stmt))
    return given.value
