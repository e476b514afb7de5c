# SPDX-License-Identifier: Apache-2.0
"""Makes one function for the proof of a forward() that calls code of its own block.

`x = self._helper(a)` and `x = self.sublayer(a)` become the statements of the helper, or of the
sublayer's forward(), with their own names for locals. Only the proof sees the result; the wired
file keeps the calls.
"""

import ast
import copy

from patches.taps.errors import REMEDY_PROOF, TapsError
from patches.taps.rows import Row
from patches.taps.source import Source, attribute_classes, find_class, method


def expand(row: Row, source: Source, forward: ast.FunctionDef) -> ast.FunctionDef:
    """Return forward() with every call that the row names in `inline` replaced by what it does.

    Raises:
        TapsError: such a call is missing, or is not understood.
    """
    if not row.inline:
        return forward
    expander = _Expander(row, source)
    forward = copy.deepcopy(forward)
    forward.body = expander.block(forward.body)
    missing = sorted({*row.inline} - expander.seen)
    if missing:
        raise expander.wrong(f"`x = self.<name>(...)` for each of {list(row.inline)}", f"{missing}")
    return ast.fix_missing_locations(forward)


class _Expander:
    """Replaces the calls of one row; `seen` are the names of those it found."""

    def __init__(self, row: Row, source: Source) -> None:
        self.row = row
        self.source = source
        self.seen: set[str] = set()

    def wrong(self, expected: str, found: str) -> TapsError:
        """Make the error of a call that is not understood."""
        return TapsError(self.row.file, self.row.cls, expected, found, REMEDY_PROOF)

    def block(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        """Return statements with the calls in them replaced."""
        out: list[ast.stmt] = []
        for stmt in stmts:
            if isinstance(stmt, ast.If):
                stmt.body, stmt.orelse = self.block(stmt.body), self.block(stmt.orelse)
            match stmt:
                case ast.Assign(targets=[target], value=ast.Call(func=func) as call):
                    name = ast.unparse(func).removeprefix("self.")
                    if name in self.row.inline:
                        self.seen.add(name)
                        out += self.called(name, call, target)
                        continue
            out.append(stmt)
        return out

    def called(self, name: str, call: ast.Call, target: ast.expr) -> list[ast.stmt]:
        """Return the statements that do what `target = self.<name>(...)` does."""
        body, holder = self.callee(name)
        names = [a.arg for a in [*body.args.args[1:], *body.args.kwonlyargs]]
        given: dict[str, ast.expr] = dict(zip(names, call.args, strict=False))
        given |= {k.arg: k.value for k in call.keywords if k.arg}
        defaults = dict(
            zip(
                reversed([a.arg for a in body.args.args]),
                reversed(body.args.defaults),
                strict=False,
            )
        )
        stored = {n.id for n in ast.walk(body) if isinstance(n, ast.Name) and _is_store(n)}
        rename = _Rename({*names, *stored}, name.replace(".", "_"), holder)
        bound: list[ast.stmt] = []
        for param in names:
            value = given.get(param, defaults.get(param))
            if value is None:
                raise self.wrong(f"an argument {param} of self.{name}", ast.unparse(call))
            bound.append(ast.Assign([ast.Name(rename.local(param), ast.Store())], value))
        # Taps of a sublayer stay unbound: the binder gives taps to the outer layer alone.
        inside = [s for s in body.body if holder == "self" or not _is_tap(s)]
        rest = [rename.visit(copy.deepcopy(s)) for s in inside]
        stmts = [*bound, *self.assigned(rest, target)]
        for stmt in stmts:
            ast.copy_location(stmt, call)
        return stmts

    def callee(self, name: str) -> tuple[ast.FunctionDef, str]:
        """Find the function that is called, and what its `self` is in forward()."""
        cls = self.source.cls(self.row.cls)
        own = method(cls, name)
        if own is not None:
            return own, "self"
        classes = attribute_classes(self.source, cls, name)
        if len(classes) != 1:
            raise self.wrong(f"self.{name} to be of one class", f"{sorted(classes)}")
        _, sub = find_class(self.source, classes.pop())
        forward = method(sub, "forward")
        if forward is None:
            raise self.wrong(f"{sub.name} to have its own forward()", "none")
        return forward, f"self.{name}"

    def assigned(self, stmts: list[ast.stmt], target: ast.expr) -> list[ast.stmt]:
        """Return statements in which every `return value` has become `target = value`."""
        out: list[ast.stmt] = []
        for i, stmt in enumerate(stmts):
            if isinstance(stmt, ast.Return):
                value = stmt.value or ast.Constant(None)
                return [*out, ast.Assign([copy.deepcopy(target)], value)]
            if any(isinstance(n, ast.Return) for n in ast.walk(stmt)):
                if not isinstance(stmt, ast.If):
                    raise self.wrong("returns at the end or in an `if`", ast.unparse(stmt))
                rest = stmts[i + 1 :]
                taken = self.assigned([*stmt.body, *copy.deepcopy(rest)], target)
                other = self.assigned([*stmt.orelse, *copy.deepcopy(rest)], target)
                return [*out, ast.If(stmt.test, taken, other)]
            out.append(stmt)
        raise self.wrong("a return at the end", "none")


class _Rename(ast.NodeTransformer):
    """Puts the callee's name before its locals, and makes `self` what it is in forward()."""

    def __init__(self, names: set[str], prefix: str, holder: str) -> None:
        self.names, self.prefix = names, prefix
        self.holder = ast.parse(holder, mode="eval").body

    def local(self, name: str) -> str:
        """Return the new name of a local."""
        return f"{self.prefix}__{name}"

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Rename a local, or `self`."""
        if node.id == "self":
            return copy.deepcopy(self.holder)
        return ast.Name(self.local(node.id), node.ctx) if node.id in self.names else node


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_tap(stmt: ast.stmt) -> bool:
    value = getattr(stmt, "value", None)
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith("self.taps.")
