# SPDX-License-Identifier: Apache-2.0
"""Places the taps where a callee adds up the stream and norms it: `n, s = callee(...)`.

s = self.taps.pre_attn(s)
n, s = self.sublayer(s)
n, s = self.taps.post_attn.renorm(n, s, self.sublayer.norm)   # norms again what it changed
...
s = self.taps.post_block(s)
return s
"""

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import Row
from patches.taps.shapes import assigned, body, code, fail, last_return


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """Return the edits for a normed class; raises TapsError where an anchor is missing."""
    edits, stmts = Edits(), body(forward)
    callee, norm = row.renorm
    found = []
    for stmt in stmts:
        pair = assigned(stmt)
        if pair and isinstance(pair[1], cst.Call) and code(pair[1].func) == f"self.{callee}":
            found.append((stmt, pair[0]))
    if len(found) != 1 or found[0][1].count(",") != 1:
        raise fail(row, f"one `n, s = self.{callee}(...)`", f"{[target for _, target in found]}")
    stmt, pair_ = found[0]
    edits.before.append((stmts[0], f"{row.stream} = self.taps.pre_attn({row.stream})"))
    edits.after.append((stmt, f"{pair_} = self.taps.post_attn.renorm({pair_}, self.{norm})"))
    last, ret = last_return(row, forward)
    if not isinstance(ret.value, cst.Name):
        raise fail(row, "`return <stream>`", code(ret))
    name = ret.value.value
    edits.before.append((last, f"{name} = self.taps.post_block({name})"))
    return edits
