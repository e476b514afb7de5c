# SPDX-License-Identifier: Apache-2.0
"""Reads libcst statements, for all idioms."""

from collections.abc import Iterator

import libcst as cst

from patches.taps.errors import REMEDY_SHAPE, TapsError
from patches.taps.rows import Row

_EMPTY = cst.Module([])


def code(node: cst.CSTNode) -> str:
    """Return the source text of a node, without surrounding whitespace."""
    return _EMPTY.code_for_node(node).strip()


def fail(row: Row, expected: str, found: str) -> TapsError:
    """Make the error of an idiom whose anchor is missing."""
    return TapsError(row.file, row.cls, f"{row.idiom.value} idiom: {expected}", found, REMEDY_SHAPE)


def body(forward: cst.FunctionDef) -> list[cst.BaseStatement]:
    """Return the top-level statements of a function."""
    assert isinstance(forward.body, cst.IndentedBlock)
    return list(forward.body.body)


def blocks(nodes: list[cst.BaseStatement]) -> Iterator[list[cst.BaseStatement]]:
    """Iterate over a block of statements and those of the `if` statements in it, outer first."""
    yield nodes
    for node in nodes:
        suite: cst.If | cst.Else | None = node if isinstance(node, cst.If) else None
        while suite is not None:
            yield from blocks(_block(suite.body))
            suite = suite.orelse if isinstance(suite, cst.If) else None


def statements(nodes: list[cst.BaseStatement]) -> Iterator[cst.BaseStatement]:
    """Iterate over all statements, those inside `if` blocks too."""
    for block in blocks(nodes):
        yield from block


def _block(suite: cst.BaseSuite) -> list[cst.BaseStatement]:
    return list(suite.body) if isinstance(suite, cst.IndentedBlock) else []


def only(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """Return the small statement of a line that holds exactly one, else None."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        return node.body[0]
    return None


def last_return(row: Row, forward: cst.FunctionDef) -> tuple[cst.BaseStatement, cst.Return]:
    """Return the only `return` of forward(), which must be its last statement.

    Branches that the row assumes away do not count.

    Raises:
        TapsError: there is another, or none at the end.
    """
    stmts = body(forward)
    live = [s for s in stmts if not (isinstance(s, cst.If) and code(s.test) in row.assume)]
    returns = [s for s in statements(live) if isinstance(only(s), cst.Return)]
    if len(returns) != 1 or returns[0] is not stmts[-1]:
        raise fail(row, "one return, at the end of forward()", f"{len(returns)} returns")
    ret = only(returns[0])
    assert isinstance(ret, cst.Return)
    return returns[0], ret


def assigned(node: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    """Return the target's text and the value of `target = value`, else None."""
    small = only(node)
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        return code(small.targets[0].target), small.value
    return None


def summands(value: cst.BaseExpression) -> list[str]:
    """Return the texts of the operands of `a + b + c`; one text where it is not a sum."""
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
        return summands(value.left) + summands(value.right)
    return [code(value)]
