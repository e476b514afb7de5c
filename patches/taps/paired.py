# SPDX-License-Identifier: Apache-2.0
"""Where the taps go when the pair's norms are out of reach, or some layers lack one.

h, r = self.taps.pre_attn.steer_and_capture_pair(h, r)
...
h, r = self.taps.post_attn.steer_and_capture_pair(h, r)     # before the row's `anchor`
...
h, r = self.taps.post_block.steer_and_capture_pair(h, r)
return h, r

Each tap adds the halves up itself to read them, one sum more than the other deferred idioms.
"""

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import Row
from patches.taps.shapes import body, code, fail, last_return


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """The edits for a class of the paired idiom; TapsError when an anchor is missing."""
    pair = f"{row.stream}, {row.residual}"
    edits, stmts = Edits(), body(forward)
    found = [s for s in stmts if code(s.with_changes(leading_lines=[])).startswith(row.anchor)]
    if len(found) != 1:
        raise fail(row, f"one top-level `{row.anchor}`", f"{len(found)}")
    last, ret = last_return(row, forward)
    parts = ret.value.elements if isinstance(ret.value, cst.Tuple) else ()
    if not {row.stream, row.residual} <= {code(p.value) for p in parts}:
        raise fail(row, f"`return` of {pair}", code(ret))
    for stmt, point in ((stmts[0], "pre_attn"), (found[0], "post_attn"), (last, "post_block")):
        edits.before.append((stmt, f"{pair} = self.taps.{point}.steer_and_capture_pair({pair})"))
    return edits
