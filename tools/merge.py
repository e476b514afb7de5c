# SPDX-License-Identifier: Apache-2.0
"""Carries the hunks of one seam file to another version of that file, by git's three-way merge.

Each hunk is one line of a merge that occurs nowhere else, so that git says where it goes. It is
placed without a hand only where that says one thing:

* `untouched`: the lines around it are as they were;
* `merged`: some of them changed, or upstream inserted lines at the same place that have nothing to
  do with ours; shown in the report;
* `by hand`: the lines beside it, or those it replaces, changed; the blocks, conditions or calls
  that it stands in are others; or what upstream inserted at its place may belong before or after
  it. The file then has conflict markers there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

from tools.pins import BuildError
from vllm_pilot.udiff import Hunk

AROUND = 3
"""Lines before and after a hunk that count as its surroundings, as in a usual patch."""

SEAMS, PINNED, MIDDLE, NEW = "<<<<<<< seams", "||||||| pinned", "=======", ">>>>>>> new"

WIDE = 40
"""Git's markers while merging: no line of Python has one by chance."""


@dataclass(frozen=True)
class Carried:
    """Outcome of carrying one hunk into the new upstream's file."""

    state: str
    """untouched, merged or by hand."""
    line: int
    """Line of the pinned file at which the hunk begins, 1-based."""
    scope: str
    """The function or class it stands in, in the pinned file."""
    note: str = ""
    """Reason why the hunk is not untouched; "" if it is."""
    shown: str = ""
    """Its place in the new file, or by hand in the pinned one; our lines begin with `+`."""
    placed: Hunk | None = None
    """The hunk as it applies to the new file alone, None by hand."""


@dataclass
class _Place:
    """Place of one hunk in a file: `lines` replace the lines [low, high) of the file."""

    hunk: Hunk
    low: int
    high: int
    lines: list[str]
    """Its own; or the conflict it is in, none where the hunk before it has that."""
    state: str = "untouched"
    note: str = ""


def carry(base: str, theirs: str, hunks: list[Hunk]) -> tuple[str, list[Carried]]:
    """The new file with the hunks in it, and what became of each, in their order.

    Args:
        base: the pinned file, for which the hunks were made.
        theirs: the file in the new upstream.
    """
    old, new = base.split("\n"), theirs.split("\n")
    made = [_Place(hunk, *_span(hunk), hunk.added) for hunk in hunks]
    placed = list(_places(_merge(old, new, made), hunks))
    pinned, was_at = _with_hunks(old, made)
    merged, starts = _with_hunks(new, [one for one in placed if one.state != "by hand"])
    is_at, carried = iter(starts), []
    for one, origin, at in zip(placed, made, was_at, strict=True):
        hunk, was = one.hunk, _scope(pinned, at, one.hunk)
        shown = _show(pinned, at, hunk)
        if one.state != "by hand":
            to = next(is_at)
            now = _scope(merged, to, hunk)
            if one.state == "untouched" and _around(old, origin) != _around(new, one):
                one.state, one.note = "merged", "upstream changed lines close to it"
            if now != was:
                one.state, one.note = "by hand", f"it stood in `{was}`, and would in `{now}`"
                one.lines = _conflict(hunk.added, hunk.removed, hunk.removed)
            elif _last_field(pinned, was, hunk) and not _last_field(merged, now, hunk):
                why = one.note or "nothing close to it changed"
                one.state, one.note = "merged", f"{why}; it was its class's last field"
            if one.state != "by hand":
                shown = _show(merged, to, hunk) if one.state == "merged" else ""
        start = one.low + bool(hunk.removed)
        there = None if one.state == "by hand" else replace(hunk, start=start)
        carried.append(Carried(one.state, hunk.start, _named(was), one.note, shown, there))
    return "\n".join(_with_hunks(new, placed)[0]), carried


def _span(hunk: Hunk) -> tuple[int, int]:
    first = hunk.start - 1 if hunk.removed else hunk.start
    return first, first + len(hunk.removed)


def _around(lines: list[str], one: _Place) -> tuple[list[str], list[str]]:
    return lines[max(0, one.low - AROUND) : one.low], lines[one.high : one.high + AROUND]


def _with_hunks(lines: list[str], placed: list[_Place]) -> tuple[list[str], list[int]]:
    """The lines with all hunks in them, and where each hunk begins."""
    result: list[str] = []
    starts, done = [], 0
    for one in placed:
        result += lines[done : one.low]
        starts.append(len(result))
        result += one.lines
        done = one.high
    return result + lines[done:], starts


def _token(number: int) -> str:
    """The line that stands for a hunk while git merges."""
    return f"\x1a hunk {number}"


def _merge(old: list[str], new: list[str], made: list[_Place]) -> list[str]:
    """Git's merge of `new` into `old` with a token in place of each hunk."""
    tokens = [replace(one, lines=[_token(number)]) for number, one in enumerate(made)]
    sides = {"ours": _with_hunks(old, tokens)[0], "old": old, "new": new}
    command = ["git", "merge-file", "-p", "-q", "--diff3", f"--marker-size={WIDE}", *sides]
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in sides.items():
            Path(folder, name).write_text("\n".join(lines))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in range(128):  # up to there it counts conflicts
        raise BuildError(f"git merge-file failed: {done.stderr}; is git installed?")
    return done.stdout.split("\n")


def _conflict(ours: list[str], pinned: list[str], theirs: list[str]) -> list[str]:
    return [SEAMS, *ours, PINNED, *pinned, MIDDLE, *theirs, NEW]


def _places(merged: list[str], hunks: list[Hunk]) -> Iterator[_Place]:
    """Yield the place of each hunk, found by its token in git's merge, in the merge's order.

    Git calls two insertions at one place a conflict; insertions that do not affect each other
    are none.
    """
    known = {_token(number): hunk for number, hunk in enumerate(hunks)}
    ends = (f"{'|' * WIDE} old", "=" * WIDE, f"{'>' * WIDE} new")
    at, rest = 0, iter(merged)
    for line in rest:
        if line in known:
            low, at = at, at + len(known[line].removed)
            yield _Place(known[line], low, at, known[line].added)
        elif line != f"{'<' * WIDE} ours":
            at += 1
        else:
            ours, pinned, theirs = (list(takewhile(end.__ne__, rest)) for end in ends)
            low, at = at, at + len(theirs)
            spelled = (known[line].added if line in known else [line] for line in ours)
            lines = _conflict([*chain.from_iterable(spelled)], pinned, theirs)
            for number, line in enumerate(ours):
                if (hunk := known.get(line)) is None:
                    continue
                if pinned:
                    note = _touched(hunk, ours[:number], ours[number + 1 :])
                elif why := _related(hunk.added, theirs):
                    note = f"upstream inserted lines here, {why}"
                else:
                    note = f"upstream inserted {len(theirs)} lines here, unrelated to ours"
                    yield _Place(hunk, low, low, hunk.added, "merged", note)
                    break
                yield _Place(hunk, low, at, lines, "by hand", note)
                lines, low = [], at


def _touched(hunk: Hunk, ahead: list[str], behind: list[str]) -> str:
    """Return why git did not place a hunk, given the lines around it in git's conflict."""
    if hunk.removed:
        return "upstream changed the lines that it replaces, or one beside them"
    sides = [name for name, lines in (("before", ahead), ("after", behind)) if lines]
    return f"upstream changed the line {' and '.join(sides)} it"


_LEAVES = re.compile(r"\s*(return|raise|break|continue)\b")
_ENDS = re.compile(r"\s*(elif|else|except|finally)\b")


def _related(ours: list[str], theirs: list[str]) -> str:
    """Return why the order of two insertions at one place may matter; "" if it does not."""
    if not any(_code(line) for line in theirs):
        return ""
    if any(map(_LEAVES.match, ours)):
        return "and ours leave the block"
    if any(map(_LEAVES.match, theirs)):
        return "which leave the block"
    if any(map(_ENDS.match, theirs)) or _indent(theirs) > _indent(ours):
        return "in another block"
    shared = (_written(ours) & _names(theirs)) | (_written(theirs) & _names(ours))
    return f"which share {', '.join(sorted(shared))} with ours" if shared else ""


def _code(line: str) -> str:
    return line.partition("#")[0].strip()


def _indent(lines: list[str]) -> int:
    """Indent of the first line with code: less indented lines can only come after it."""
    return next(len(line) - len(line.lstrip()) for line in lines if _code(line))


def _names(lines: list[str]) -> set[str]:
    """Names read or written, with one attribute: `self.cache`, `plan`."""
    code = "\n".join(map(_code, lines))
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)?", code)) - _WORDS


_WORDS = {"if", "for", "in", "is", "not", "None", "and", "or", "self", "True", "False", "import"}


_WRITES = re.compile(r"([A-Za-z_]\w*(?:\.\w+)?)(?:\s*(?::[^=]*)?[-+|*/]?=(?!=)|(?:\.\w+)*\(|\s*:)")
_BINDS = re.compile(r"\bfor (.+?) in\b|\bas (\w+)|(\w+) :=")


def _written(lines: list[str]) -> set[str]:
    """Names assigned to, and objects whose methods are called as statements."""
    found: set[str] = set()
    for line in map(_code, lines):
        if match := _WRITES.match(line):
            found.add(match[1])
        for match in _BINDS.finditer(line):
            found |= set(re.findall(r"\w+", "".join(group or "" for group in match.groups())))
    return found - _WORDS


def _scope(text: list[str], start: int, hunk: Hunk) -> str:
    """The blocks, with their conditions, and the calls that the hunk's lines stand in."""
    try:
        module = ast.parse("\n".join(text))
    except SyntaxError:
        return "text that does not parse"
    own = [i for i, line in enumerate(hunk.added) if line.strip()]
    first = start + own[0] + 1
    last = start + own[-1] + 1
    return " > ".join(_chain(module, first, last))


def _chain(node: ast.AST, first: int, last: int) -> list[str]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            start, end = _lines(child)
            if start < first and last <= end:
                return _header(node, field) + _chain(child, first, last)
            if start <= first and last <= end and (start, end) != (first, last):
                return _header(node, field) + _chain(child, first, last)
    return _header(node, "")


def _lines(node: ast.AST) -> tuple[int, int]:
    decorators = getattr(node, "decorator_list", [])
    if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.keyword):
        return min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or node.lineno
    inner = [_lines(child) for child in ast.iter_child_nodes(node)]
    return min((i[0] for i in inner), default=0), max((i[1] for i in inner), default=-1)


def _header(node: ast.AST, field: str) -> list[str]:
    match node:
        case ast.ClassDef():
            return [f"class {node.name}"]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [f"def {node.name}"]
        case ast.If() | ast.While():
            word = "else of " if field == "orelse" else ""
            return [f"{word}{type(node).__name__.lower()} {ast.unparse(node.test)}"]
        case ast.For() | ast.AsyncFor():
            return [f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"]
        case ast.With() | ast.AsyncWith():
            return ["with " + ", ".join(ast.unparse(item.context_expr) for item in node.items)]
        case ast.Try():
            return [f"try {field}"] if field else []
        case ast.ExceptHandler():
            return [f"except {ast.unparse(node.type) if node.type else ''}"]
        case ast.Call():
            return [f"call {ast.unparse(node.func)}"]
        case ast.ImportFrom():
            return [f"from {'.' * node.level}{node.module or ''} import"]
    return []


def _named(scope: str) -> str:
    """Only the classes and functions of a scope."""
    parts = [p.split(" ", 1)[1] for p in scope.split(" > ") if p.startswith(("class ", "def "))]
    return ".".join(parts) or "the module"


def _last_field(text: list[str], scope: str, hunk: Hunk) -> bool:
    """Tell whether the hunk's last line is the last field of the class it stands in.

    In a class that travels as an array, the order of the fields is the format.
    """
    *_, inner = scope.split(" > ")
    last = next(line for line in reversed(hunk.added) if line.strip())
    if not inner.startswith("class ") or last not in text:
        return False
    for node in ast.walk(ast.parse("\n".join(text))):
        if isinstance(node, ast.ClassDef) and node.name == inner.removeprefix("class "):
            fields = [n.lineno for n in node.body if isinstance(n, ast.AnnAssign)]
            return bool(fields) and text[fields[-1] - 1] == last
    return False


def _show(text: list[str], start: int, hunk: Hunk) -> str:
    ours = [*(f"-{line}" for line in hunk.removed), *(f"+{line}" for line in hunk.added)]
    ahead = text[:start][-AROUND - 1 :]
    behind = text[start + len(hunk.added) :][: AROUND + 1]
    return "\n".join([*(f" {line}" for line in ahead), *ours, *(f" {line}" for line in behind)])
