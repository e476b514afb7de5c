# SPDX-License-Identifier: Apache-2.0
"""Finds what documents and drawings name: files, symbols in them, and headings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import vllm
from tests import ROOT

TREE = Path(vllm.__file__).parents[1]
"""The assembled fork: upstream's files and ours."""

_NAME = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|patch|toml|txt))`")
_FOLDER = re.compile(r"`((?:\.?[\w-]+/)*[\w-]+/[\w-]+)/?`")
_LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def find(path: str) -> Path | None:
    """A file of this repository or of the assembled fork."""
    return next((base / path for base in (ROOT, TREE) if (base / path).is_file()), None)


def defined_names(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """What a module's or a class's body defines: name and, for a class, its own body."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, []
            # Attributes that a constructor sets belong to the class.
            if node.name == "__init__":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        yield inner.attr, []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, []
        elif isinstance(node, ast.Assign):
            yield from ((t.id, []) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.If):
            yield from defined_names([*node.body, *node.orelse])


@cache
def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


def defines(file: Path, dotted: str) -> bool:
    """Whether `file` defines `dotted`, "function" or "Class.member"."""
    body = _body(file)
    for part in dotted.split("."):
        found = [inner for name, inner in defined_names(body) if name == part]
        if not found:
            return False
        body = found[0]
    return True


def resolves(path: str, symbol: str = "") -> bool:
    """Whether there is such a file, with such a symbol in it if one is given."""
    file = find(path)
    return file is not None and (not symbol or defines(file, symbol))


def named(text: str) -> Iterator[tuple[str, str]]:
    """(path, symbol) of every name of the form `path:symbol`, then (path, "") of every file."""
    yield from _NAME.findall(text)
    yield from ((path, "") for path in _FILE.findall(text))


def anchors(text: str) -> set[str]:
    """What GitHub makes of each heading of a document."""
    headings = _HEADING.findall(text)
    return {re.sub(r"[^\w -]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    """Names, files, folders of ours and links of a document in `folder` that lead nowhere."""
    broken = [
        f"{path}:{symbol}".rstrip(":") for path, symbol in named(text) if not resolves(path, symbol)
    ]
    broken += [
        path
        for path in _FOLDER.findall(text)
        if path.startswith(("vllm/", "tests/", "patches/")) and not (ROOT / path).is_dir()
    ]
    for path, anchor in _LINK.findall(text):
        target = folder / path
        if not target.exists():
            broken.append(path)
        elif anchor and anchor not in anchors(target.read_text() if path else text):
            broken.append(f"{path}#{anchor}")
    return broken
