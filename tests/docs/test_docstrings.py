# SPDX-License-Identifier: Apache-2.0
"""Every module, class and public function of ours says what it is, beginning with a sentence.

Files are read as text, nothing of them is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests import ROOT

pytestmark = pytest.mark.quick

FOLDERS = ("vllm", "vllm_pilot", "tools", "patches")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

_RIDDLE = re.compile(
    r"(Of|For|The same|See|How|Whether|What|Where|Those|Which|Who|Whose|So many|As|When|That|Why)\b"
    r"|(Args|Raises|Returns):|\("
)
"""How no docstring begins: one that does cannot be understood by itself."""
_SENTENCE = re.compile(r'[A-Z0-9`]|"\w')

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | Function]:
    """Classes and functions of a module or class: conditional ones too, nested ones not."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If):
            yield from definitions([*node.body, *node.orelse])


def last_name(node: ast.expr) -> str:
    """The last name of an expression: "override" of `typing.override`, "Base" of `Base[int]`."""
    if isinstance(node, ast.Subscript | ast.Call):
        return last_name(node.value if isinstance(node, ast.Subscript) else node.func)
    return ast.unparse(node).rpartition(".")[2]


def documented_methods(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Class of ours -> its methods that have a docstring, inherited ones included."""
    classes = {c.name: c for t in trees for c in definitions(t.body) if isinstance(c, ast.ClassDef)}

    def methods(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if name not in classes or name in seen:
            return set()
        own = {m.name for m in definitions(classes[name].body) if ast.get_docstring(m)}
        bases = (methods(last_name(base), seen | {name}) for base in classes[name].bases)
        return own.union(*bases)

    return {name: methods(name) for name in classes}


def is_overload(node: Function) -> bool:
    """Whether a function is a signature, or overrides what is documented elsewhere."""
    return bool({"overload", "override", "setter"} & {last_name(d) for d in node.decorator_list})


def required(
    body: list[ast.stmt], inherited: dict[str, set[str]], path: str = ""
) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Everything below a module that needs a docstring, with its dotted name."""
    for node in definitions(body):
        if node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield path + node.name, node
            documented = set().union(*(inherited.get(last_name(b), set()) for b in node.bases))
            for name, inner in required(node.body, inherited, f"{path}{node.name}."):
                if inner.name not in documented:
                    yield name, inner
        elif not is_overload(node):
            yield path + node.name, node


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, private ones and those of attributes included."""
    for node in ast.walk(tree):
        before: ast.stmt | None = None
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            is_text = (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            )
            if is_text and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield statement.lineno, statement.value.value.strip()
            before = statement


def complaints(sources: dict[str, str]) -> list[str]:
    """What is wrong with the docstrings of some files.

    Args:
        sources: file name -> text.
    """
    trees = {file: ast.parse(text) for file, text in sources.items()}
    inherited = documented_methods(list(trees.values()))
    wrong = []
    for file, tree in trees.items():
        named: list[tuple[str, Documented]] = [("the module", tree)]
        named += required(tree.body, inherited)
        for name, node in named:
            text = (ast.get_docstring(node) or "").strip()
            if not text:
                wrong.append(f"{file}: {name} has no docstring")
            elif not _SENTENCE.match(text):
                wrong.append(f"{file}: {name} does not begin with a sentence: {text[:40]!r}")
        for line, text in docstrings(tree):
            if _RIDDLE.match(text):
                wrong.append(f"{file}:{line}: begins with a riddle: {text[:40]!r}")
    return wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_sentence(folder: str) -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    assert len(sources) > 100
    assert [wrong for wrong in complaints(sources) if wrong.startswith(f"{folder}/")] == []


GOOD = '''"""A module."""

class Base:
    """`x` and more."""

    x: int
    """int64 [n]."""

    def act(self) -> None:
        """Do it."""

    def __init__(self) -> None: ...

    def _hidden(self) -> None: ...


class Child(Base):
    """"add" and the like."""

    def act(self) -> None:
        def nested() -> None: ...


if True:
    async def run() -> None:
        """3 steps."""
'''


def test_good_source_has_no_complaints() -> None:
    assert complaints({"good.py": GOOD}) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"""A module."""', "", "the module has no docstring"),
        ('"""Do it."""', '"""  """', "Base.act has no docstring"),
        ("(Base)", "", "Child.act has no docstring"),
        ('"""3 steps."""', '"""three steps."""', "run does not begin with a sentence"),
        ('"""A module."""', '"""Of a module."""', ":1: begins with a riddle: 'Of a module.'"),
        ('"""Do it."""', '"""\n        Args:\n        """', ":10: begins with a riddle: 'Args:'"),
        ('"""int64 [n]."""', '"""(a, b)."""', ":7: begins with a riddle: '(a, b).'"),
        ('"""Do it."""', '"""How many."""', ":10: begins with a riddle: 'How many.'"),
        ('"""Do it."""', '"""What it does."""', ":10: begins with a riddle: 'What it does.'"),
        ('"""Do it."""', '"""Where it is."""', ":10: begins with a riddle: 'Where it is.'"),
        ('"""Do it."""', '"""The same, later."""', ":10: begins with a riddle: 'The same, later.'"),
    ],
)
def test_bad_docstrings_are_found(old: str, new: str, complaint: str) -> None:
    """The twin: one mistake of each kind."""
    assert GOOD.count(old) == 1
    found = complaints({"bad.py": GOOD.replace(old, new)})
    assert any(complaint in wrong for wrong in found), found
