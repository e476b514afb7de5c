# SPDX-License-Identifier: Apache-2.0
"""Places the taps where a (hidden, residual) pair carries the stream.

Where norms do the adds (`locate`):

h, r = self.taps.pre_attn.steer_pair(h, r)
if r is None: ... else: h, r = self.norm1(h, r)
self.taps.pre_attn.read(r)
...
h, r = self.taps.post_attn.steer_pair(h, r)
h, r = self.norm2(h, r)
self.taps.post_attn.read(r)
...
h, r = self.taps.post_block.steer_and_capture_pair(h, r)
return h, r

Where the norms are out of reach, or some layers lack one (`locate_paired`):

h, r = self.taps.pre_attn.steer_and_capture_pair(h, r)
...
h, r = self.taps.post_attn.steer_and_capture_pair(h, r)     # before the row's `anchor`
...
h, r = self.taps.post_block.steer_and_capture_pair(h, r)
return h, r

There each tap adds the halves up itself to read them, one sum more than above. Every tap that
writes gets and returns both halves: an operation that needs the whole stream s hands on
(zeros, f(s)).
"""

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import Row
from patches.taps.shapes import assigned, body, code, fail, last_return, statements


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """Return the edits for a fused class; raises TapsError where an anchor is missing."""
    h, r = row.stream, row.residual
    edits = Edits()
    stmts = body(forward)
    entries = [
        s for s in statements(stmts) if isinstance(s, cst.If) and f"{r} is None" in code(s.test)
    ]
    if len(entries) != 1 or entries[0] not in stmts or code(entries[0].test) != f"{r} is None":
        raise fail(row, f"one top-level `if {r} is None:`", f"{len(entries)}")
    entry = entries[0]
    edits.before.append((entry, f"{h}, {r} = self.taps.pre_attn.steer_pair({h}, {r})"))
    edits.after.append((entry, f"self.taps.pre_attn.read({r})"))

    if "post_attn" in row.points:
        _second_norms(row, [s for s in stmts if s is not entry], edits)

    last, ret = last_return(row, forward)
    if (
        not isinstance(ret.value, cst.Tuple)
        or len(ret.value.elements) != 2
        or code(ret.value.elements[1].value) != r
    ):
        raise fail(row, f"`return <hidden>, {r}`", code(ret))
    first = ret.value.elements[0].value
    name = first.value if isinstance(first, cst.Name) else h
    if not isinstance(first, cst.Name):
        edits.hoisted.append((last, name))
    edits.before.append(
        (last, f"{name}, {r} = self.taps.post_block.steer_and_capture_pair({name}, {r})")
    )
    return edits


def _second_norms(row: Row, stmts: list[cst.BaseStatement], edits: Edits) -> None:
    """Add taps around every `h, r = self.<norm>(h, r)` after the entry, in whichever branch."""
    r = row.residual
    found: list[str] = []
    for stmt in statements(stmts):
        pair = assigned(stmt)
        if pair is None or not isinstance(pair[1], cst.Call):
            continue
        call = pair[1]
        norm = code(call.func).removeprefix("self.")
        if norm not in row.norms or len(call.args) != 2:
            continue
        h = call.args[0].value
        if not isinstance(h, cst.Name) or not pair[0].endswith(f", {r}") or code(call.args[1]) != r:
            raise fail(row, f"`h, {r} = self.{norm}(h, {r})`", code(stmt))
        found.append(norm)
        edits.before.append(
            (stmt, f"{h.value}, {r} = self.taps.post_attn.steer_pair({h.value}, {r})")
        )
        edits.after.append((stmt, f"self.taps.post_attn.read({r})"))
    if sorted(found) != sorted(row.norms[1:]):
        raise fail(
            row,
            f"each of {list(row.norms[1:])} called once on the pair after the entry",
            f"{found}",
        )


def locate_paired(row: Row, forward: cst.FunctionDef) -> Edits:
    """Return the edits for a paired class; raises TapsError where an anchor is missing."""
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
