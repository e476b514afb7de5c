# SPDX-License-Identifier: Apache-2.0
"""The names of upstream that our files use, and that another version of it does not have.

Nothing is imported: what a module defines is read from its source. A module with `__getattr__`
(vllm/envs.py) counts as having every string that it mentions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("vllm", "tests", "benchmarks", "demo", "examples")
"""The folders of the repository whose files import upstream's."""


@dataclass(frozen=True)
class Gone:
    """One name that is no longer there."""

    where: str
    """Our file and line, `file:line`."""
    name: str
    """The module, or `module.name`."""
    now: tuple[str, ...]
    """The files of the tree that define the name, or are called as the module was."""


class Modules:
    """The modules of a tree, with ours among them.

    Args:
        roots: the folders that hold `vllm/`, upstream's first.
    """

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self._defined: dict[Path, set[str]] = {}

    def file(self, module: str) -> Path | None:
        """Return a module's file, or the folder of a package without one; None if it is gone."""
        found = None
        for root in self._roots:
            path = root / module.replace(".", "/")
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if file.is_file():
                    return file
            found = found or (path if path.is_dir() else None)
        return found

    def has(self, module: str, name: str) -> bool:
        """Tell whether `from module import name` works, or `import module` if there is no name."""
        if not name:
            return self.file(module) is not None
        return self.file(f"{module}.{name}") is not None or name in self.defined(module)

    def defined(self, module: str) -> set[str]:
        """Return the names that a module has."""
        file = self.file(module)
        if file is None or file.is_dir():
            return set()
        if file not in self._defined:
            self._defined[file] = set()  # modules may import each other's names
            tree = ast.parse(file.read_text())
            names = set(self._names(tree.body, module, file.name == "__init__.py"))
            if "__getattr__" in names:
                every = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
                names |= {value for value in every if isinstance(value, str)}
            self._defined[file] = names
        return self._defined[file]

    def _names(self, body: Iterable[ast.stmt], module: str, package: bool) -> Iterator[str]:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield node.name
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    parts = module.split(".")
                    up = parts[: len(parts) - node.level + package] if node.level else []
                    yield from self.defined(".".join([*up, *filter(None, [node.module])]))
                case ast.Import() | ast.ImportFrom():
                    yield from ((a.asname or a.name).split(".")[0] for a in node.names)
                case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                    inner = ("body", "orelse", "finalbody")
                    parts_of = [statement for f in inner for statement in getattr(node, f, [])]
                    parts_of += [s for h in getattr(node, "handlers", []) for s in h.body]
                    yield from self._names(parts_of, module, package)
                case _:
                    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                    yield from (n.id for n in stored if isinstance(n.ctx, ast.Store))

    @cached_property
    def _texts(self) -> dict[str, str]:
        root = self._roots[0]
        return {str(f.relative_to(root)): f.read_text() for f in sorted(root.rglob("vllm/**/*.py"))}

    def now(self, module: str, name: str) -> tuple[str, ...]:
        """Return where a name is defined that `module` lacks, or files named as the module is."""
        if not name:
            file = f"/{module.rpartition('.')[2]}.py"
            return tuple(path for path in self._texts if path.endswith(file))
        line = re.compile(rf"^(def|class) {name}\b|^{name}\b.*=", re.MULTILINE)
        return tuple(path for path, text in self._texts.items() if line.search(text))


def gone(root: Path, old: Path, new: Path) -> list[Gone]:
    """Find what our files under `root` use of the upstream tree `old`, and `new` lacks."""
    before, after = Modules(old, root), Modules(new, root)
    found: dict[Gone, None] = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            for line, module, name in sorted(set(_used(ast.parse(file.read_text()), before))):
                if not before.has(module, name) or after.has(module, name):
                    continue
                if before.file(whole := f"{module}.{name}") is not None:
                    module, name = whole, ""
                elif after.file(module) is None:
                    whole, name = module, ""
                where = f"{file.relative_to(root)}:{line}"
                found[Gone(where, whole.rstrip("."), after.now(module, name))] = None
    return list(found)


def _used(tree: ast.Module, modules: Modules) -> Iterator[tuple[int, str, str]]:
    """The line, module and name (or "") of each use of upstream."""
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield node.lineno, alias.name, ""
                    local |= {alias.asname: alias.name} if alias.asname else {}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            if node.level or node.module is None:
                continue
            for alias in node.names:
                yield node.lineno, node.module, alias.name
                if modules.file(whole := f"{node.module}.{alias.name}") is not None:
                    local[alias.asname or alias.name] = whole
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in local:
                yield node.lineno, local[name], attribute
