# SPDX-License-Identifier: Apache-2.0
"""Carries the hunks of one seam file to another version of that file, each on its own.

A hunk is anchored by its neighbours, or by the lines that it replaces, through upstream's own diff
of the two versions. It is placed without a hand only where that says one thing:

* `untouched`: the lines around it are as they were;
* `merged`: some of them changed, or upstream inserted lines at the same place that have nothing to
  do with ours; shown in the report;
* `by hand`: its anchors are gone, the lines it replaces changed, the blocks, conditions or calls
  that it stands in are others, or what upstream inserted at its place may belong before or after
  it. The file then has conflict markers there.
"""

from __future__ import annotations

import ast
import bisect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools.pins import BuildError
from tools.udiff import HUNK, Hunk

AROUND = 3
"""Lines before and after a hunk that count as its surroundings, as in a usual patch."""

DIFF = ("--unified=0", "--diff-algorithm=histogram", "--no-color", "--no-ext-diff", "--no-textconv")

MARKERS = "<<<<<<< seams", "||||||| pinned", "=======", ">>>>>>> new"
SEAMS, PINNED, MIDDLE, NEW = MARKERS


@dataclass(frozen=True)
class Carried:
    """What became of one hunk."""

    state: str
    """untouched, merged or by hand."""
    line: int
    """Of the pinned file, 1-based."""
    scope: str
    """The function or class it stands in, in the pinned file."""
    note: str = ""
    """Why it is not untouched."""
    shown: str = ""
    """Its place in the new file, for review; the lines of ours begin with `+`."""


class Alignment:
    """Which line of one text is which of another, by git's diff of them. Indices from 0."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        self.size = len(old), len(new)
        self._changes = _changes(old, new)
        self._starts = [change[0] for change in self._changes]

    def of(self, line: int) -> int | None:
        """The new index of an old line; None where upstream changed or removed it.

        The ends of the text, -1 and its length, are lines too.
        """
        if line == self.size[0]:
            return self.size[1]
        at = bisect.bisect_right(self._starts, line) - 1
        shift = 0
        if at >= 0:
            start, end, _, new_end = self._changes[at]
            if start <= line < end:
                return None
            shift = new_end - end
        return line + shift


def _changes(old: list[str], new: list[str]) -> list[tuple[int, int, int, int]]:
    """old[a:b] became new[c:d]; (a, b, c, d), sorted."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("old", old), ("new", new)):
            Path(folder, name).write_text("\n".join(lines))
        result = subprocess.run(
            ["git", "diff", "--no-index", *DIFF, "old", "new"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode not in (0, 1):
        raise BuildError(f"git diff failed: {result.stderr}; is git installed?")
    found = []
    for match in filter(None, map(HUNK.match, result.stdout.split("\n"))):
        a, m, c, n = (1 if text is None else int(text) for text in match.groups())
        start, new_start = a - (m > 0), c - (n > 0)
        found.append((start, start + m, new_start, new_start + n))
    return found


@dataclass
class _Placed:
    hunk: Hunk
    low: int
    """The hunk replaces the new file's lines [low, high)."""
    high: int
    state: str
    note: str = ""

    @property
    def lines(self) -> list[str]:
        return self.hunk.added


def carry(base: str, theirs: str, hunks: list[Hunk]) -> tuple[str, list[Carried]]:
    """The new file with the hunks in it, and what became of each, in their order.

    Args:
        base: the pinned file, for which the hunks were made.
        theirs: the file in the new upstream.
    """
    old, new = base.split("\n"), theirs.split("\n")
    alignment = Alignment(old, new)
    placed = [_place(hunk, old, new, alignment) for hunk in hunks]
    _refuse_overlaps(placed)
    pinned, _ = _assemble(old, [_Placed(h, *_span(h), "") for h in hunks])
    merged, starts = _assemble(new, placed)
    where = zip(hunks, _starts(hunks), strict=True)
    before = [_scope(pinned, start, hunk) for hunk, start in where]
    after = [_scope(merged, start, p.hunk) for p, start in zip(placed, starts, strict=True)]
    for one, was, now in zip(placed, before, after, strict=True):
        if one.state == "by hand":
            continue
        if was != now:
            one.state, one.note = "by hand", f"it stood in `{was}`, and would in `{now}`"
        elif _last_field(pinned, was, one.hunk) and not _last_field(merged, now, one.hunk):
            one.state = "merged"
            one.note = f"{one.note or 'nothing close to it changed'}; it was its class's last field"
    text, starts = _assemble(new, placed)
    shown = [
        "" if p.state == "untouched" else _show(text, start, p)
        for p, start in zip(placed, starts, strict=True)
    ]
    return "\n".join(text), [
        Carried(p.state, p.hunk.start, _named(was), p.note, view)
        for p, was, view in zip(placed, before, shown, strict=True)
    ]


def _span(hunk: Hunk) -> tuple[int, int]:
    first = hunk.start - 1 if hunk.removed else hunk.start
    return first, first + len(hunk.removed)


def _starts(hunks: list[Hunk]) -> list[int]:
    """Index of each hunk's first line in the pinned file with all of them."""
    return [hunk.new_start - (1 if hunk.added else 0) for hunk in hunks]


def _place(hunk: Hunk, old: list[str], new: list[str], alignment: Alignment) -> _Placed:
    first, last = _span(hunk)
    before, after = alignment.of(first - 1), alignment.of(last)
    if hunk.removed:
        at = [alignment.of(line) for line in range(first, last)]
        if None in at or at != list(range(at[0] or 0, (at[0] or 0) + len(at))):
            return _by_hand(hunk, before, after, "upstream changed the lines that it replaces")
        low, high = (at[0] or 0), (at[-1] or 0) + 1
    elif before is None and after is None:
        return _by_hand(hunk, _mapped(alignment, first - 1), None, "both its neighbours changed")
    elif before is None or after is None:
        which = "before" if before is None else "after"
        return _by_hand(hunk, before, after, f"upstream changed the line {which} it")
    else:
        low = high = before + 1
        inserted = new[low:after]
        if inserted and (why := _related(hunk.added, inserted)):
            return _by_hand(hunk, before, after, f"upstream inserted lines here, {why}")
        if inserted:
            note = f"upstream inserted {len(inserted)} lines at the same place, unrelated to ours"
            return _Placed(hunk, low, high, "merged", note)
    around = [*range(first - AROUND, first), *range(last, last + AROUND)]
    around = [line for line in around if -1 <= line <= len(old)]
    want = [low - (first - line) if line < first else high + (line - last) for line in around]
    if [alignment.of(line) for line in around] == want:
        return _Placed(hunk, low, high, "untouched")
    return _Placed(hunk, low, high, "merged", "upstream changed lines close to it")


def _by_hand(hunk: Hunk, before: int | None, after: int | None, note: str) -> _Placed:
    at = after if after is not None else (before if before is not None else -1) + 1
    return _Placed(hunk, at, at, "by hand", note)


def _mapped(alignment: Alignment, line: int) -> int:
    """The new index of the last line up to `line` that is still there."""
    while (found := alignment.of(line)) is None:
        line -= 1
    return found


def _refuse_overlaps(placed: list[_Placed]) -> None:
    for one, other in pairwise(placed):
        if other.low < one.high or (other.low == one.low and other.state != "by hand"):
            other.state, other.note = "by hand", "it would land in the hunk before it"
            other.low = other.high = max(other.low, one.high)


_LEAVES = re.compile(r"\s*(return|raise|break|continue)\b")
_ENDS = re.compile(r"\s*(elif|else|except|finally)\b")


def _related(ours: list[str], theirs: list[str]) -> str:
    """Why the order of two insertions at one place may matter; empty when it does not."""
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
    """Of the first line with code: lines less indented than ours can only come after them."""
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


def _assemble(lines: list[str], placed: list[_Placed]) -> tuple[list[str], list[int]]:
    """The lines with all hunks in them, and where each hunk begins."""
    result: list[str] = []
    starts, done = [], 0
    for one in placed:
        result += lines[done : one.low]
        starts.append(len(result))
        if one.state == "by hand":
            result += [SEAMS, *one.lines, PINNED, *one.hunk.removed, MIDDLE, NEW]
        else:
            result += one.lines
        done = max(done, one.high)
    return result + lines[done:], starts


def _scope(text: list[str], start: int, hunk: Hunk) -> str:
    """The blocks, with their conditions, and the calls that the hunk's lines stand in."""
    start -= sum(line in MARKERS for line in text[:start])
    try:
        module = _parse(text)
    except SyntaxError:
        return "text that does not parse"
    own = [i for i, line in enumerate(hunk.added) if line.strip()]
    first = start + own[0] + 1
    last = start + own[-1] + 1
    return " > ".join(_chain(module, first, last))


def _parse(text: list[str]) -> ast.Module:
    return ast.parse("\n".join(line for line in text if line not in MARKERS))


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
    """Whether the hunk's last line is the last field of the class it stands in.

    In a class that travels as an array, the order of the fields is the format.
    """
    *_, inner = scope.split(" > ")
    last = next(line for line in reversed(hunk.added) if line.strip())
    text = [line for line in text if line not in MARKERS]
    if not inner.startswith("class ") or last not in text:
        return False
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == inner.removeprefix("class "):
            fields = [n.lineno for n in node.body if isinstance(n, ast.AnnAssign)]
            return bool(fields) and text[fields[-1] - 1] == last
    return False


def _show(text: list[str], start: int, placed: _Placed) -> str:
    lines = placed.lines
    size = len(lines) + (4 + len(placed.hunk.removed) if placed.state == "by hand" else 0)
    ahead, behind = text[:start][-AROUND - 1 :], text[start + size :][: AROUND + 1]
    ours = [*(f"-{line}" for line in placed.hunk.removed), *(f"+{line}" for line in lines)]
    return "\n".join([*(f" {line}" for line in ahead), *ours, *(f" {line}" for line in behind)])
