# SPDX-License-Identifier: Apache-2.0
"""Finds out which norm an attribute holds: the fused idioms need that `norm(h, r)` adds."""

import ast

from patches.taps.errors import REMEDY_PROOF, TapsError
from patches.taps.rows import DEFERRED, NormCall, Row
from patches.taps.source import Source, attribute_classes, find_class, method

_LAYERS = "vllm.model_executor.layers.layernorm."
ADDING = frozenset(
    {
        _LAYERS + "RMSNorm",
        _LAYERS + "GemmaRMSNorm",
        "vllm.model_executor.models.k2_horizon.K2HorizonRMSNorm",
        "vllm.model_executor.models.nemotron.NemotronLayerNorm1P",
    }
)
"""The classes that return (N(h + r), h + r) when called with two arguments: a person read them."""


def two_argument_norms(row: Row, source: Source) -> frozenset[str]:
    """Return the row's norms that may be called as norm(h, r), once their classes are checked.

    The class is the one that `__init__` assigns.

    Raises:
        TapsError: a norm is of a class that is not known to do what the row says.
    """
    if row.idiom not in DEFERRED and row.norm_call is NormCall.ADDS:
        return frozenset()  # norms take one argument there; the proof refuses two
    cls = source.cls(row.cls)
    for norm in row.norms:
        found = attribute_classes(source, cls, norm)
        if row.norm_call is NormCall.ADDS:
            good = bool(found) and found <= ADDING
        else:
            good = bool(found) and all(_passes(source, name) for name in found)
        if not good:
            raise TapsError(
                row.file,
                row.cls,
                f"self.{norm} to be a norm with {row.norm_call.value}",
                f"{sorted(found) or 'no assignment in __init__'}",
                REMEDY_PROOF + "; a new norm class goes into patches/taps/norms.py once read",
            )
    return frozenset(row.norms) if row.norm_call is NormCall.ADDS else frozenset()


def _passes(source: Source, qualified: str) -> bool:
    """Tell whether forward(h, r) of a class hands r back untouched: r occurs in the return only."""
    if not qualified.startswith("vllm."):
        return False
    _, cls = find_class(source, qualified)
    forward = method(cls, "forward")
    if forward is None or len(forward.args.args) != 3:
        return False
    second = forward.args.args[2].arg
    uses = [n for n in ast.walk(forward) if isinstance(n, ast.Name) and n.id == second]
    last = forward.body[-1]
    return (
        len(uses) == 1
        and isinstance(last, ast.Return)
        and isinstance(last.value, ast.Tuple)
        and len(last.value.elts) == 2
        and last.value.elts[1] is uses[0]
    )
