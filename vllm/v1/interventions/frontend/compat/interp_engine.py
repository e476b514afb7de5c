# SPDX-License-Identifier: Apache-2.0
"""The steering specifications of interp-engine, with `--compat interp-engine`
(docs/coming-from.md#interp-engine).

A specification has operations by layer, at one point. Each is made operations of ours exactly, or
refused. They come as its server takes them, or as its dataclasses and what `asdict` makes of them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import copysign
from typing import Any, NamedTuple

import numpy as np

from vllm.v1.interventions.errors import show
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.values import is_array, plain_list
from vllm.v1.interventions.vectors import need_unit

MAX_SPECS = 32
"""Most specifications of a request."""

ReadArray = Callable[[Any, str], Any]
"""Reads an array that may be packed, given with its path; other values stay as they are."""


def as_it_is(value: Any, path: str) -> Any:
    """Return a value: nothing is packed."""
    return value


class _Values(NamedTuple):
    """Reads the vectors of which more is needed than an operation of ours reads."""

    read: ReadArray
    work: Work

    def vector(self, given: Given) -> np.ndarray:
        """Return a vector, float64 [width]."""
        value = self.read(given.value, given.path)
        width = value.shape[0] if is_array(value) and value.ndim else 0
        width = len(value) if isinstance(value, list | tuple) else width
        self.work.charge(8 * width >> 10, Unit.KILOBYTE, given.path)
        return Given(value, given.path).vector(width)

    def unit(self, given: Given) -> np.ndarray:
        """Return a direction, float64 [width] of length 1."""
        return need_unit(self.vector(given), given.path)


Ops = list[dict[str, Any]]
Make = Callable[[Given, _Values], Ops]
"""Makes operations of ours, without their place, of one of interp-engine's."""


def _additive(given: Given, values: _Values) -> Ops:
    vector = given["vector"]
    added = values.unit(vector) if given.get("normalize", False).flag() else vector.value
    return [{"op": "add", "vector": added, "scale": given["scale"].number()}]


def _norm_scaled(given: Given, values: _Values) -> Ops:
    """`h + s |h| v`, no longer than `max_fraction` of `|h|`: `|v|` is known."""
    most = given.get("max_fraction", 1.0).number()
    if most < 0:
        given["max_fraction"].refuse("must be at least 0, got {given}")
    vector, strength = values.vector(given["vector"]), given["strength"].number()
    length = 1.0 if given.get("normalize", False).flag() else float(np.linalg.norm(vector))
    scale = copysign(min(abs(strength) * length, most), strength)
    return [{"op": "norm_match", "direction": vector, "scale": scale}]


def _ablate(given: Given, values: _Values) -> Ops:
    return [{"op": "ablate", "direction": given["vector"].value}]


def _orthogonal(given: Given, values: _Values) -> Ops:
    kept = given.get("coeff", 1.0).number()
    return [{"op": "ablate", "direction": given["vector"].value, "strength": 1 - kept}]


def _cap(given: Given, values: _Values) -> Ops:
    ends = {"lo": given["min"].value, "hi": given["max"].value}
    ends = {key: value for key, value in ends.items() if value is not None}
    if not ends:
        given.refuse("needs 'min' or 'max': without them it changes nothing")
    return [{"op": "clamp", "direction": given["vector"].value, **ends}]


def _swap(given: Given, values: _Values) -> Ops:
    """`h + (h.v)(t - v)`, of directions of length 1: features that act at once, for the component
    is the activation of `v` less that of `-v`."""
    read, target = values.unit(given["vector"]), values.unit(given["target"])
    more = {"op": "feature", "value": 0.0, "strength": -1.0}
    return [
        {**more, "encoder": sign * read, "decoder": sign * (target - read)} for sign in (1.0, -1.0)
    ]


class _Method(NamedTuple):
    """An operation, as interp-engine's server calls it."""

    name: str
    make: Make
    needed: tuple[str, ...] = ()
    """Keys that must be given, beside `vector`."""
    optional: tuple[str, ...] = ()

    @property
    def own(self) -> set[str]:
        """Keys of it, and not of every operation."""
        return {*self.needed, *self.optional} - {"normalize"}


_METHODS = (
    _Method("additive", _additive, ("scale",), ("normalize",)),
    _Method("orthogonal", _orthogonal, (), ("coeff",)),
    _Method("projection_cap", _cap, (), ("min", "max")),
    _Method("norm_scaled_add", _norm_scaled, ("strength",), ("max_fraction", "normalize")),
    _Method("swap", _swap, ("target",)),
    _Method("ablate", _ablate),  # has no key of its own, so it is the last
)
_NAMES = {method.name: method for method in _METHODS}


class _Write(NamedTuple):
    """A point at which it writes."""

    point: str
    """Ours."""
    methods: frozenset[str] = frozenset(_NAMES)
    """Operations that are the same at ours."""


_ADDED = frozenset({"additive"})
_WRITES = {
    "resid_pre": _Write("pre_attn"),
    "attn_out_post": _Write("post_attn", _ADDED),
    "mlp_in": _Write("mlp_in"),
    "mlp_out_post": _Write("post_block", _ADDED),
    "z": _Write("z", _ADDED),
    "resid_post": _Write("post_block"),
}
"""Its points, in the order of the stream -> ours."""
_INSTEAD = {
    "attn_out": " (use attn_out_post, what attention adds to the stream)",
    "mlp_out": " (use mlp_out_post, what the MLP adds to the stream)",
    "resid_mid": " (there the MLP alone reads what is changed; use attn_out_post)",
}
_ORDER = [*_WRITES]

_SPEC, _OP = ("point", "stream", "layers"), ("vector", "method")
_KEYS = sorted({*_OP, *(key for method in _METHODS for key in (*method.needed, *method.optional))})
READS = (
    *(f"steering[].{key}" for key in _SPEC),
    *(f"steering[].layers.0[].{key}" for key in _KEYS),
    "steering.layers.0.operations[].vector",
    "capture.inline.hooks[]",
)
"""The paths of all fields of a body that are read here, and in `addresses.py`; `[]` is each entry
of a list, and layer 0 is any."""


def fields_of(
    specs: Any, path: str = "steering", work: Work | None = None, read: ReadArray = as_it_is
) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that mean specifications: `steering`.

    Args:
        specs: a mapping or dataclass with `layers`, `point` and `stream`, or a list of these.
        path: where they stand, for errors.
        work: counts what is made of them, before it is made; None for as much as it takes.
        read: reads arrays where they may be packed.

    Raises:
        ValueError: a value is wrong, or cannot be honoured exactly; the message has its path.
    """
    values = _Values(read, Work(sys.maxsize) if work is None else work)
    listed = [Given(specs, path)]
    if plain_list(specs) is not None:
        message = f"must be 1-{MAX_SPECS} specifications, got {{given}}"
        listed = [*Given(specs, path).entries(message, 1, MAX_SPECS)]
    read_specs = [_Spec.read(entry) for entry in listed]
    # At one point of ours act several of its: what the MLP adds, and then the stream.
    read_specs.sort(key=lambda spec: _ORDER.index(spec.point))
    ops: Ops = []
    last: dict[tuple[str, int], str] = {}
    for spec in read_specs:
        for layer, given in spec.operations(values.work):
            method = _method(given)
            site = _WRITES[spec.point].point, layer
            if method.name not in _WRITES[spec.point].methods:
                given.refuse(f"{method.name} is not exact at {spec.point}; at resid_post it is")
            if method.name == "swap" == last.get(site):
                given.refuse(
                    "is a second swap in a row, which would act at once; put it at another layer"
                )
            last[site] = method.name
            given = given.fields(("vector", *method.needed), ("method", *method.optional))
            place = {"point": site[0], "layers": [layer]}
            ops += [{**place, **op} for op in method.make(given, values)]
    return {"steering": ops}


class _Spec(NamedTuple):
    """A specification of which the operations are still to be read."""

    point: str
    """One of `_WRITES`."""
    layers: Given

    @classmethod
    def read(cls, given: Given) -> "_Spec":
        """Read the point."""
        given = _opened(given).fields(("layers",), ("point", "stream"))
        name = given.get("point", "resid_post")
        said = name.plain()
        if not isinstance(said, str) or said not in _WRITES:
            instead = _INSTEAD.get(said, "") if isinstance(said, str) else ""
            points = ", ".join(_WRITES)
            name.refuse(
                f"interp-engine's {{given}} is not steered here; points are {points}",
                f"{show(said)}{instead}",
            )
        if given["stream"].value is not None:
            given["stream"].refuse("this model's stream has one lane; leave it out")
        return cls(said, given["layers"])

    def operations(self, work: Work) -> Iterator[tuple[int, Given]]:
        """Return the operations, each with its layer, in their order."""
        for key, entry in self.layers.items():
            layer = key.plain()
            is_number = isinstance(layer, str) and layer.isdecimal() and len(layer) < 10
            layer = int(layer) if is_number else layer
            number = Given(layer, entry.path).int(0, message="must be by layers, got {given}")
            if is_dataclass(entry.value) or isinstance(entry.value, Mapping):
                entry = _opened(entry).fields(("operations",))["operations"]
            for given in entry.entries("must be a list of operations, got {given}"):
                work.charge(1, Unit.ENTRY, given.path)
                yield number, _opened(given)


def _opened(given: Given) -> Given:
    """Return a mapping as it is, and a dataclass as one."""
    value = given.value
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: vars(value)[field.name] for field in fields(value)}
    return Given(Given(value, given.path).mapping(), given.path)


def _method(given: Given) -> _Method:
    """Tell which operation it is: by its name, or by the keys that no other has."""
    if "method" in given:
        message = f"unknown method {{given}}; methods are {', '.join(_NAMES)}"
        return _NAMES[given["method"].choice(_NAMES, message)]
    keys = given.mapping().keys()
    return next((method for method in _METHODS if method.own & keys), _METHODS[-1])
