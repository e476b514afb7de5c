# SPDX-License-Identifier: Apache-2.0
"""Reads the upstream tree: modules, classes, and where a norm's class comes from."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from patches.taps.errors import REMEDY_SHAPE, TapsError


class Tree:
    """An upstream tree; each module is read and parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sources: dict[str, Source] = {}

    def has(self, file: str) -> bool:
        """Tell whether the tree has this file."""
        return (self.root / file).is_file()

    def read(self, file: str) -> "Source":
        """Return the module at `file`; raises TapsError where it is missing."""
        if not self.has(file):
            raise TapsError(
                file,
                "",
                "this file in the upstream tree",
                "no such file",
                "it moved or went away: correct or remove its rows in patches/taps/table.py",
            )
        if file not in self._sources:
            text = (self.root / file).read_text(encoding="utf-8")
            self._sources[file] = Source(self, file, text)
        return self._sources[file]

    def modules(self, folder: str) -> "Iterator[Source]":
        """Iterate over all modules under a folder, sorted."""
        for path in sorted((self.root / folder).rglob("*.py")):
            yield self.read(str(path.relative_to(self.root)))


@dataclass(frozen=True)
class Source:
    """One module: `file` is relative to the tree's root, `text` its content (edited or not)."""

    home: Tree
    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The module, parsed."""
        return ast.parse(self.text, filename=self.file)

    def defines(self, name: str) -> bool:
        """Tell whether there is a top-level class of that name, without parsing the module."""
        return re.search(rf"^class {re.escape(name)}\b", self.text, re.MULTILINE) is not None

    def cls(self, name: str) -> ast.ClassDef:
        """Return the only top-level class of that name; raises TapsError for none, or several."""
        found = [n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        if len(found) != 1:
            raise TapsError(
                self.file,
                name,
                "one top-level class of this name",
                f"{len(found)} of them",
                REMEDY_SHAPE,
            )
        return found[0]

    def module_name(self) -> str:
        """Return the dotted name, such as `vllm.model_executor.models.llama`."""
        return self.file.removesuffix(".py").replace("/", ".")

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """The names of the top-level `from` imports: name -> (absolute module, original name)."""
        package = self.module_name().split(".")
        found = {}
        for node in self.tree.body:
            if not isinstance(node, ast.ImportFrom):
                continue
            base = package[: len(package) - node.level] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                found[alias.asname or alias.name] = (module, alias.name)
        return found


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return the function `name` in the body of `cls` itself, or None."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def resolve(source: Source, name: str) -> str:
    """Return the qualified name of the class or function `name` of a module, through re-imports."""
    imported = source.imports.get(name)
    if imported is None:
        return f"{source.module_name()}.{name}"
    module, original = imported
    file = module.replace(".", "/") + ".py"
    if not module.startswith("vllm.") or not source.home.has(file):
        return f"{module}.{original}"
    return resolve(source.home.read(file), original)


def find_class(source: Source, qualified: str) -> tuple[Source, ast.ClassDef]:
    """Return the module and the class behind a qualified name of the tree."""
    module, _, name = qualified.rpartition(".")
    file = module.replace(".", "/") + ".py"
    home = source if file == source.file else source.home.read(file)
    return home, home.cls(name)


def bases(source: Source, cls: ast.ClassDef) -> list[str]:
    """Return the bases of `cls`: plain names qualified, others, such as nn.Module, as written."""
    return [resolve(source, b.id) if isinstance(b, ast.Name) else ast.unparse(b) for b in cls.bases]


def attribute_classes(source: Source, cls: ast.ClassDef, attr: str) -> set[str]:
    """Return the classes of what `__init__`, own or inherited, assigns to `self.<attr>`, qualified.

    It understands `self.a = C(...)`, `nn.ModuleList([C(...) for ...])` (for `a[0]`, as for `a`),
    `... if c else None`, a class chosen by a conditional, and one returned by a function of the
    module (alone or as the first of a tuple). Anything else is returned as its source text, which
    then matches no known class.
    """
    init = method(cls, "__init__")
    attr = attr.partition("[")[0]
    found: set[str] = set()
    if init is not None:
        for node in ast.walk(init):
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets, value = [node.target], node.value
            else:
                continue
            for target in targets:
                if ast.unparse(target) == f"self.{attr}":
                    found |= _constructed(source, init, value)
    if found:
        return found
    for base in bases(source, cls):
        if base.startswith("vllm."):
            home, parent = find_class(source, base)
            found |= attribute_classes(home, parent, attr)
    return found


def _constructed(source: Source, scope: ast.FunctionDef, value: ast.expr) -> set[str]:
    """Return the classes that an assigned value may be of."""
    if isinstance(value, ast.IfExp):
        return _constructed(source, scope, value.body) | _constructed(source, scope, value.orelse)
    if isinstance(value, ast.Constant) and value.value is None:
        return set()
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return _classes_named(source, scope, value.func.id)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "nn.ModuleList":
        parts = [a.elt for a in value.args if isinstance(a, ast.ListComp)]
        return set().union(*(_constructed(source, scope, part) for part in parts))
    if isinstance(value, ast.Call):
        return {ast.unparse(value.func)}
    return {ast.unparse(value)}


def _classes_named(source: Source, scope: ast.FunctionDef, name: str) -> set[str]:
    """Return the classes that a local or module-level name may stand for."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        if not (isinstance(first, ast.Name) and first.id == name):
            continue
        if isinstance(node.value, ast.IfExp):
            choices = (node.value.body, node.value.orelse)
            return {resolve(source, c.id) for c in choices if isinstance(c, ast.Name)}
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            return _classes_returned(source, node.value.func.id)
        return {ast.unparse(node.value)}
    return {resolve(source, name)}


def _classes_returned(source: Source, function: str) -> set[str]:
    """Return the classes that a function of the module returns."""
    found: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for ret in ast.walk(node):
                if isinstance(ret, ast.Return) and ret.value is not None:
                    value = ret.value
                    first = value.elts[0] if isinstance(value, ast.Tuple) else value
                    if isinstance(first, ast.Name):
                        found.add(resolve(source, first.id))
                    else:
                        found.add(ast.unparse(first))
    return found
