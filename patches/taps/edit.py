# SPDX-License-Identifier: Apache-2.0
"""Inserts whole lines into one class, and checks that nothing else changed."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from patches.taps.errors import REMEDY_SHAPE, TapsError
from patches.taps.rows import Idiom, Row
from patches.taps.source import Source

TAPS_MODULE = "vllm.model_executor.layers.residual_taps"
IMPORT_LINE = f"from {TAPS_MODULE} import UnboundTaps"
"""The line that each wired module imports the taps with."""


@dataclass
class Edits:
    """Lines to put before and after statements of forward(), and hoisted returns.

    `before`/`after`: (anchor statement, source line); anchors are compared by identity.
    `hoisted`: a return statement and the name its first element is assigned to before it.
    `above`: lines before that assignment.
    """

    before: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    after: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    hoisted: list[tuple[cst.CSTNode, str]] = field(default_factory=list)
    above: list[tuple[cst.CSTNode, str]] = field(default_factory=list)


def statement(line: str) -> cst.SimpleStatementLine:
    """Parse one source line as a statement."""
    node = cst.parse_statement(line)
    assert isinstance(node, cst.SimpleStatementLine)
    return node


def row_class(module: cst.Module, row: Row) -> cst.ClassDef:
    """Return the top-level class of the row; raises TapsError if there is none."""
    for node in module.body:
        if isinstance(node, cst.ClassDef) and node.name.value == row.cls:
            return node
    raise TapsError(row.file, row.cls, "a top-level class", "none", REMEDY_SHAPE)


def find_forward(cls: cst.ClassDef, row: Row) -> cst.FunctionDef:
    """Return the plain, undecorated forward() in the class body, or the method of the row that has
    the block's code; raises TapsError without one."""
    found = [
        n for n in cls.body.body if isinstance(n, cst.FunctionDef) and n.name.value == row.method
    ]
    if len(found) != 1 or found[0].decorators or found[0].asynchronous:
        raise TapsError(
            row.file,
            row.cls,
            f"one undecorated {row.method}() in the class body",
            f"{len(found)} (or a decorated one)",
            REMEDY_SHAPE,
        )
    return found[0]


class _Insert(cst.CSTTransformer):
    """Puts the lines of `edits` and the class attribute into the row's class."""

    def __init__(self, cls: cst.ClassDef, edits: Edits, row: Row) -> None:
        super().__init__()
        self._cls = cls
        self._edits = edits
        self._row = row

    def _around(
        self, original: cst.CSTNode, updated: cst.BaseStatement
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        before = [statement(s) for n, s in self._edits.before if n is original]
        after = [statement(s) for n, s in self._edits.after if n is original]
        if not before and not after:
            return updated
        return cst.FlattenSentinel([*before, updated, *after])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        for node, name in self._edits.hoisted:
            if node is original_node:
                return self._hoist(original_node, updated_node, name)
        return self._around(original_node, updated_node)

    def _hoist(
        self,
        original: cst.SimpleStatementLine,
        updated: cst.SimpleStatementLine,
        name: str,
    ) -> cst.FlattenSentinel[cst.BaseStatement]:
        """Make of `return f(x), r` the lines above, `name = f(x)`, the inserted lines, `return
        name, r`."""
        ret = updated.body[0]
        assert isinstance(ret, cst.Return) and isinstance(ret.value, cst.Tuple)
        first, *rest = ret.value.elements
        lift = statement(f"{name} = {cst.Module([]).code_for_node(first.value)}")
        lift = lift.with_changes(leading_lines=updated.leading_lines)
        value = ret.value.with_changes(elements=[first.with_changes(value=cst.Name(name)), *rest])
        above = [statement(s) for n, s in self._edits.above if n is original]
        lines = [statement(s) for n, s in self._edits.before if n is original]
        last = updated.with_changes(body=[ret.with_changes(value=value)], leading_lines=[])
        return cst.FlattenSentinel([*above, lift, *lines, last])

    def leave_If(
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        return self._around(original_node, updated_node)

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        if original_node is not self._cls:
            return updated_node
        line = statement(f"taps = UnboundTaps({_arguments(self._row)})")
        body = list(updated_node.body.body)
        at = 1 if _is_docstring(body[0]) else 0
        following = body[at]
        if isinstance(following, cst.FunctionDef) and not (
            following.leading_lines and following.leading_lines[0].comment is None
        ):
            blank = cst.EmptyLine(indent=False)
            body[at] = following.with_changes(leading_lines=[blank, *following.leading_lines])
        if at == 1:
            line = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        block = updated_node.body.with_changes(body=[*body[:at], line, *body[at:]])
        return updated_node.with_changes(body=block)


def _arguments(row: Row) -> str:
    """Return the arguments of the class attribute `UnboundTaps(...)`."""
    names = [f'"{p}"' for p in row.taps]
    if row.idiom is Idiom.REFUSED:
        names.append(f"refused={row.reason!r}")
    if row.loops[1]:
        names.append(f'loops="{row.loops[1]}"')
    if row.lanes:
        names.append(f'lanes="{row.lanes}"')
    if row.unless:
        names.append(f"unless={row.unless!r}")
    if row.replaced:
        names.append(f"replaced={row.replaced!r}")
    return ", ".join(names)


def _is_docstring(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def apply(source: Source, row: Row, locate: Callable[[Row, cst.FunctionDef], Edits] | None) -> str:
    """Return the module's text with the row's edits, class attribute and import.

    Only the class itself goes through libcst.

    Args:
        locate: the idiom's function that places the taps; None for a refused class.

    Raises:
        TapsError: the class is not as its row says, or uses the name `taps` already.
    """
    node = source.cls(row.cls)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = source.text.splitlines(keepends=True)
    segment = "".join(lines[first - 1 : node.end_lineno])
    if re.search(r"\btaps\b", segment):
        raise TapsError(
            row.file,
            row.cls,
            "a class that does not use the name `taps`",
            "it does",
            "wire a clean upstream tree; if upstream itself uses the name, ours must change",
        )
    module = cst.parse_module(segment)
    cls = row_class(module, row)
    if not isinstance(cls.body, cst.IndentedBlock):
        raise TapsError(row.file, row.cls, "an indented class body", "one line", REMEDY_SHAPE)
    edits = locate(row, find_forward(cls, row)) if locate else Edits()
    wired = cls.visit(_Insert(cls, edits, row))
    body = [wired if part is cls else part for part in module.body]
    lines[first - 1 : node.end_lineno] = [module.with_changes(body=body).code]
    if "UnboundTaps" not in source.imports:
        lines.insert(_import_line(source, row), IMPORT_LINE + "\n")
    new = "".join(lines)
    _only_inserts(source.text, new, row, len(edits.hoisted))
    return new


def _import_line(source: Source, row: Row) -> int:
    """Return the index of our import, where isort would put it among the `from vllm...` ones."""
    found = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None
    ]
    found = [node for node in found if (node.module or "").startswith("vllm.")]
    if not found:
        raise TapsError(
            row.file, row.cls, "a top-level `from vllm...` import", "none", REMEDY_SHAPE
        )
    for node in found:
        if (node.module or "") > TAPS_MODULE:
            return node.lineno - 1
    return found[-1].end_lineno or found[-1].lineno


def _only_inserts(old: str, new: str, row: Row, hoisted: int) -> None:
    """Check that every old line is still there, in order, and the others are of taps or blank.

    A hoisted return replaces one line by two (`x = ...`, `return x, r`); nothing else may differ.
    """
    kept, replaced, own = 0, 0, 0
    lines = old.splitlines()
    for line in new.splitlines():
        if kept < len(lines) and line == lines[kept]:
            kept += 1
        elif "taps" in line or not line.strip():
            continue
        elif replaced < hoisted and lines[kept].lstrip().startswith("return "):
            own += 1
            if line.lstrip().startswith("return "):
                kept += 1
                replaced += 1
        else:
            break
    if kept != len(lines) or replaced != hoisted or own != 2 * hoisted:
        found = lines[kept] if kept < len(lines) else "lines that are not ours at the end"
        raise TapsError(
            row.file,
            row.cls,
            "an edit that only inserts lines",
            f"a change near {found.strip()!r}",
            "this is a fault of patches/taps/edit.py: correct it there",
        )
