# SPDX-License-Identifier: Apache-2.0
"""Places the taps where sums are written out and one tensor carries the complete stream.

h = self.taps.pre_attn(h)        # first statement: norm, branch and skip read the steered value
...
h = skip + branch
h = self.taps.post_attn(h)       # not in a parallel block, which has one sum only
...
h = skip + branch
h = self.taps.post_block(h)      # before the return
return h

In a layer that runs several times a token, `taps = self.taps.at(n)` comes first, and these are of
`taps`.
"""

import ast
import copy

import libcst as cst

from patches.taps.edit import Edits
from patches.taps.rows import Idiom, Row, Second
from patches.taps.shapes import assigned, blocks, body, code, fail, last_return, only, summands


def locate(row: Row, forward: cst.FunctionDef) -> Edits:
    """Return the edits for an unfused or parallel class; raises TapsError without the anchors."""
    edits = Edits()
    stmts = body(forward)
    wanted = 1 if row.idiom is Idiom.PARALLEL else 2
    sums = [[(s, t) for s in block if (t := _sum_target(row, s))] for block in blocks(stmts)]
    sums = [found for found in sums if found]
    # The sum of a block that a sublayer finishes is in the sublayer, where the proof sees it.
    if not row.inline and (not sums or any(len(found) != wanted for found in sums)):
        raise fail(
            row,
            f"{wanted} sums with `{row.skip}`, all in one block of statements",
            f"{[[code(s) for s, _ in found] for found in sums]}",
        )
    first, taps = _first(stmts), "self.taps"
    if row.loops[0]:
        edits.before.append((first, _times(row)))
        taps = "taps"
    edits.before.append((first, f"{row.stream} = {taps}.pre_attn({row.stream})"))
    if row.idiom is not Idiom.PARALLEL:
        for found in sums:
            stmt, name = found[0]
            edits.after.append((stmt, f"{name} = {taps}.post_attn({name})"))
    last, ret = last_return(row, forward)
    name = _returned(row, ret)
    edits.before.append((last, f"{name} = {taps}.post_block({name})"))
    return edits


def _times(row: Row) -> str:
    """Return the line that picks the taps of one execution of the layer."""
    return f"taps = self.taps.at({row.loops[0]})"


def one_time(row: Row, forward: ast.FunctionDef) -> ast.FunctionDef:
    """Return forward() as one execution of the layer runs it: with `self.taps` in place of `taps`.

    Raises:
        TapsError: the taps are not picked once, first, by the number that forward() was given.
    """
    if not row.loops[0]:
        return forward
    forward = copy.deepcopy(forward)
    stored = [n.id for n in ast.walk(forward) if isinstance(n, ast.Name) and _is_stored(n)]
    given = [arg.arg for arg in forward.args.args]
    first = next(s for s in forward.body if not isinstance(s, ast.Expr))
    once = stored.count("taps") == 1 and row.loops[0] in given and row.loops[0] not in stored
    if ast.unparse(first) != _times(row) or not once:
        wanted = f"`{_times(row)}` first, of a parameter, and neither assigned again"
        raise fail(row, wanted, ast.unparse(first))
    forward.body.remove(first)
    return _OwnTaps().visit(forward)


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


class _OwnTaps(ast.NodeTransformer):
    """Writes `self.taps` for `taps`."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        new = ast.parse("self.taps", mode="eval").body if node.id == "taps" else node
        return ast.copy_location(new, node)


def _first(stmts: list[cst.BaseStatement]) -> cst.BaseStatement:
    """Return the first statement that is not the docstring."""
    small = only(stmts[0])
    is_text = isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
    return stmts[1] if is_text else stmts[0]


def _sum_target(row: Row, stmt: cst.BaseStatement) -> str | None:
    """Return the name that a sum with the skip connection is assigned to, if `stmt` is one."""
    pair = assigned(stmt)
    if pair is not None:
        operands = summands(pair[1])
        return pair[0] if len(operands) > 1 and row.skip in operands else None
    small = only(stmt)
    if isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.AddAssign):
        target = code(small.target)
        return target if row.skip in (target, code(small.value)) else None
    return None


def _returned(row: Row, ret: cst.Return) -> str:
    """Return the name of the stream in the `return`, which must have the row's second value."""
    value = ret.value
    second = ""
    if isinstance(value, cst.Tuple) and len(value.elements) == 2:
        second = code(value.elements[1].value)
        value = value.elements[0].value
    wanted = {Second.ABSENT: "", Second.NONE: "None", Second.STALE: row.residual}[row.second]
    if not isinstance(value, cst.Name) or second != wanted:
        raise fail(row, f"`{row.second.value}`", code(ret))
    return value.value
