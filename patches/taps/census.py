# SPDX-License-Identifier: Apache-2.0
"""The census compares the table with the decoder-like classes of a tree.

    for finding in check(tree): ...      # empty when the two agree

A class counts when its name looks like a block (`NAMED`), or when a model builds its layers from
it (`make_layers(..., lambda prefix: Cls(...))`). A class that is new upstream must be wired or
declared in the table; until then it is refused at run time, and this says so at a rebase.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patches.taps.rows import FAMILIES, MODELS, WIRED, Idiom, Row
from patches.taps.source import Source, Tree, bases, method, resolve
from patches.taps.table import ROWS

NAMED = re.compile(r"(Layers?|Block)$|DecoderLayer|ParallelHybrid$")
"""The names that blocks have."""


@dataclass(frozen=True)
class Mismatch:
    """A class on which the table and the tree disagree."""

    key: str
    problem: str


def check(tree_root: Path, rows: Iterable[Row] = ROWS) -> list[Mismatch]:
    """Find classes that are not in the table, and rows without a class; none when all is well."""
    rows, tree = tuple(rows), Tree(tree_root)
    known = {row.key for row in rows}
    missing = [
        Mismatch(key, "in the tree, not in patches/taps/table*.py: wire it, or declare it there")
        for key in sorted(decoder_like(tree) - known)
    ]
    gone = [
        Mismatch(row.key, "in the table, not in the tree: remove or correct its row")
        for row in rows
        if not _exists(tree, row)
    ]
    return missing + gone


def decoder_like(tree: Tree) -> set[str]:
    """Return `file:Class` of every class that looks like a block, in both model trees."""
    found: set[str] = set()
    for folder in (MODELS, FAMILIES):
        for source in tree.modules(folder):
            names = re.findall(r"^class (\w+)", source.text, re.MULTILINE)
            found |= {f"{source.file}:{name}" for name in names if NAMED.search(name)}
            if "make_layers(" in source.text:
                found |= _built_by_make_layers(source)
    return found


def overridden(tree_root: Path, rows: Iterable[Row] = ROWS) -> list[str]:
    """List subclasses of wired classes that have a forward() of their own and are not wired.

    They inherit the attribute `taps` and must not be bound: the binder has to look at the class
    that defines forward() (see the package's docstring). Mostly draft models.
    """
    tree = Tree(tree_root)
    carry = WIRED | {Idiom.INHERITED}
    have = {_qualified(r.key) for r in rows if r.idiom in carry}
    short = {name.rpartition(".")[2] for name in have}
    found = []
    for folder in (MODELS, FAMILIES):
        for source in tree.modules(folder):
            if short.isdisjoint(re.findall(r"\w+", source.text)):
                continue  # names none of them, so there is nothing to parse
            for node in source.tree.body:
                if not isinstance(node, ast.ClassDef):
                    continue
                key = f"{source.file}:{node.name}"
                inherits = any(base in have for base in bases(source, node))
                if inherits and method(node, "forward") and _qualified(key) not in have:
                    found.append(key)
    return found


def _qualified(key: str) -> str:
    """Return the qualified name of `file:Class`."""
    file, _, cls = key.partition(":")
    return f"{file.removesuffix('.py').replace('/', '.')}.{cls}"


def _built_by_make_layers(source: Source) -> set[str]:
    """Find the classes that are called in the arguments of make_layers()."""
    found: set[str] = set()
    for call in ast.walk(source.tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "make_layers":
            continue
        for node in ast.walk(call):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            qualified = resolve(source, node.func.id)
            module, _, cls = qualified.rpartition(".")
            file = module.replace(".", "/") + ".py"
            if cls[:1].isupper() and source.home.has(file):
                found.add(f"{file}:{cls}")
    return found


def _exists(tree: Tree, row: Row) -> bool:
    return tree.has(row.file) and tree.read(row.file).defines(row.cls)
