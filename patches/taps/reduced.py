# SPDX-License-Identifier: Apache-2.0
"""Checks that branches are whole on every rank, and do not leave their all-reduce to others.

The proof of forward() cannot see that: a partial sum looks like any tensor. So the constructors of
the row's mixers and MLPs are read for `reduce_results`, vLLM's word for it.
"""

import ast

from patches.taps.errors import REMEDY_PROOF, TapsError
from patches.taps.rows import Row
from patches.taps.source import Source, bases, find_class, method, resolve

REDUCE = "tensor_model_parallel_all_reduce"


def check_reduced(row: Row, source: Source) -> None:
    """Check that no mixer or MLP hands on a tensor-parallel partial sum.

    A row that declares the all-reduce among its `functions` reduces in forward() itself.

    Raises:
        TapsError: one may do so.
    """
    if REDUCE in row.functions:
        return
    for name in (*row.mixers, *row.mlps):
        for call, home in _constructions(source, source.cls(row.cls), name.partition(".")[0]):
            value = _reduce_results(call, home)
            if not _true(value, row):
                raise TapsError(
                    row.file,
                    row.cls,
                    f"self.{name} to reduce its output over tensor-parallel ranks",
                    f"{ast.unparse(call.func)}(reduce_results={value and ast.unparse(value)})",
                    REMEDY_PROOF,
                )


def _constructions(source: Source, cls: ast.ClassDef, attr: str) -> list[tuple[ast.Call, Source]]:
    """Find the calls whose result `__init__`, own or inherited, assigns to `self.<attr>`."""
    init = method(cls, "__init__")
    found = [
        (node.value, source)
        for node in ast.walk(init or ast.Pass())
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == f"self.{attr}"
        and isinstance(node.value, ast.Call)
    ]
    if found:
        return found
    for base in bases(source, cls):
        if base.startswith("vllm."):
            home, parent = find_class(source, base)
            found += _constructions(home, parent, attr)
    return found


def _reduce_results(call: ast.Call, source: Source) -> ast.expr | None:
    """Find the value of `reduce_results` in a call, or the class's default; None if it has none."""
    for keyword in call.keywords:
        if keyword.arg == "reduce_results":
            return keyword.value
    if not isinstance(call.func, ast.Name):
        return None
    qualified = resolve(source, call.func.id)
    module, _, name = qualified.rpartition(".")
    file = module.replace(".", "/") + ".py"
    if not source.home.has(file):
        return None
    home = source if file == source.file else source.home.read(file)
    init = next(
        (
            method(node, "__init__")
            for node in home.tree.body
            if isinstance(node, ast.ClassDef) and node.name == name
        ),
        None,
    )
    if init is None:
        return None
    args = [*init.args.args, *init.args.kwonlyargs]
    defaults = [*init.args.defaults, *init.args.kw_defaults]
    for arg, default in zip(reversed(args), reversed(defaults), strict=False):
        if arg.arg == "reduce_results":
            return default
    return None


def _true(value: ast.expr | None, row: Row) -> bool:
    """Tell whether a value is true, given what the row assumes; None, where nothing is said, is."""
    if value is None or (isinstance(value, ast.Constant) and value.value is True):
        return True
    return (
        isinstance(value, ast.UnaryOp)
        and isinstance(value.op, ast.Not)
        and ast.unparse(value.operand) in row.assume
    )
