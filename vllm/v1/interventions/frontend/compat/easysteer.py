# SPDX-License-Identifier: Apache-2.0
"""The steering specifications of EasySteer, with `--compat easysteer`
(docs/coming-from.md#easysteer).

A specification is made operations of ours exactly, or refused. Its arrays stay as they are: who
reads operations reads them.
"""

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from vllm.v1.interventions.errors import refuse_unknown_keys, reject, show
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.values import plain, plain_list

MAX_VECTORS = 32
"""Most vectors of a specification."""

_SPEC_KEYS = {"vectors", "conflict", "debug"}
_VECTOR_KEYS = {
    "source", "data", "algorithm", "scale", "layers", "normalize", "apply", "params", "name",
}  # fmt: skip
_OPS = {
    "direct": ("add", "vector"),
    "erase": ("ablate", "direction"),
    "replace": ("replace", "values"),
}
"""Algorithm -> our operation, and what it calls the vector."""
_PHASES = {"prompt": "all_prompt", "generation": "all_generated"}
_WHERE = ("tokens", "positions", "window")
_APPLY_KEYS = {*_PHASES} | {
    f"{exclude}{phase}_{what}"
    for exclude in ("", "exclude_")
    for phase in _PHASES
    for what in _WHERE
}

READS = (
    *(f"steering.{key}" for key in sorted(_SPEC_KEYS)),
    *(f"steering.vectors[].{key}" for key in sorted(_VECTOR_KEYS)),
    *(f"steering.vectors[].apply.{key}" for key in sorted(_APPLY_KEYS)),
)
"""The paths of all fields of a body that are read here; `[]` is each entry of a list."""


def fields_of(spec: Any, path: str = "steering", work: Work | None = None) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that mean a specification.

    Args:
        spec: a mapping, or a dataclass, with `vectors` and `conflict`.
        path: where it stands, for errors.
        work: counts what is made of it, before it is made; None for as much as it takes.

    Raises:
        ValueError: a value is wrong, or cannot be honoured exactly; the message has its path.
    """
    work = Work(sys.maxsize) if work is None else work
    given = _mapping(spec, path, _SPEC_KEYS)
    listed = plain_list(given.get("vectors"))
    if not listed or len(listed) > MAX_VECTORS:
        reject(f"{path}.vectors", f"must be a list of 1-{MAX_VECTORS} vectors")
    at = [f"{path}.vectors[{i}]" for i in range(len(listed))]
    vectors = [_mapping(v, p, _VECTOR_KEYS) for v, p in zip(listed, at, strict=True)]
    _need_one_kind(vectors, path)
    chosen = [
        _positions(v.get("apply"), f"{p}.apply", work) for v, p in zip(vectors, at, strict=True)
    ]
    excluded = _excluded(given, vectors, chosen, path, work)
    ops: list[dict[str, Any]] = []
    modules: list[tuple[str, Any]] = []
    for vector, where, positions, taken in zip(vectors, at, chosen, excluded, strict=True):
        if taken:
            positions = [*(positions or ["all"]), {"except": taken}]
        if vector.get("source") is not None:
            if any(op["op"] != "add" for op in ops) or positions is not None:
                reject(
                    f"{where}.source",
                    "is a module here, which acts at all positions and before operations; give "
                    "'data'",
                )
            modules.append(_module(vector, where))
        else:
            ops += _op(vector, where, positions, work)
    return {k: v for k, v in (("steering", ops), ("steering_modules", modules)) if v}


def _mapping(value: Any, path: str, known: set[str]) -> dict[str, Any]:
    """Return the fields that are given: those that are None say nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: vars(value)[field.name] for field in fields(value)}
    if not isinstance(value, Mapping):
        reject(path, f"must be an object, got {show(value)}")
    refuse_unknown_keys(value, sorted(known), path)
    return {key: entry for key, entry in value.items() if entry is not None}


def _need_one_kind(vectors: list[dict[str, Any]], path: str) -> None:
    kinds = {bool(plain(vector.get("normalize", False))) for vector in vectors}
    if len(kinds) > 1:
        reject(
            f"{path}.vectors",
            "mix vectors with 'normalize' and without: which norm is kept differs; ask for all or "
            "none of them",
        )


def _excluded(
    spec: Mapping[str, Any],
    vectors: list[dict[str, Any]],
    chosen: list[list[Any] | None],
    path: str,
    work: Work,
) -> list[list[Any]]:
    """The positions that earlier vectors take from each, by `conflict`; `chosen` are those of each
    vector."""
    if len(vectors) == 1:
        return [[]]
    conflict = plain(spec.get("conflict"))
    if conflict == "sequential":
        return [[] for _ in vectors]
    if conflict not in ("priority", "error"):
        reject(f"{path}.conflict", f"must be sequential, priority or error, got {show(conflict)}")
    layers = vectors[0].get("layers")
    if any(vector.get("layers") != layers for vector in vectors):
        reject(f"{path}.conflict", f"{conflict}: needs vectors of the same 'layers'")
    if conflict == "priority":
        if any(_has_except(positions) for positions in chosen[:-1]):
            reject(f"{path}.conflict", "priority: cannot be combined with exclude_ fields")
        taken: list[list[Any]] = [[]]
        for positions in chosen[:-1]:
            one = positions or ["all"]
            work.charge(len(taken[-1]) + len(one), Unit.ENTRY, f"{path}.conflict")
            taken.append([*taken[-1], *one])
        return taken
    phases = [_phases(vector.get("apply")) for vector in vectors]
    if len(vectors) > 2 or phases[0] & phases[1]:
        reject(
            f"{path}.conflict",
            "error: positions are known only with the prompt, so it takes one vector for the "
            "prompt and one for the generation; say sequential",
        )
    return [[] for _ in vectors]


def _has_except(positions: list[Any] | None) -> bool:
    return any(isinstance(one, Mapping) and "except" in one for one in positions or ())


def _phases(apply: Any) -> set[str]:
    """The phases in which a vector acts at all."""
    given = _mapping({} if apply is None else apply, "apply", _APPLY_KEYS)
    return {phase for phase in _PHASES if _acts(given, phase)}


def _acts(given: Mapping[str, Any], phase: str) -> bool:
    includes = any(f"{phase}_{what}" in given for what in _WHERE)
    return includes or given.get(phase, "all") == "all"


def _positions(apply: Any, path: str, work: Work) -> list[Any] | None:
    """The selectors of `apply`; None for all positions."""
    given = _mapping({} if apply is None else apply, path, _APPLY_KEYS)
    included: list[Any] = []
    for phase, whole in _PHASES.items():
        said = plain(given.get(phase))
        narrowed = _selectors(given, phase, "", path, work)
        if narrowed and said not in (None, False):
            reject(f"{path}.{phase}", f"{show(said)} beside {phase}_ fields: leave one of them out")
        if said not in (None, False, "all", "none"):
            reject(f"{path}.{phase}", f"must be 'all' or 'none', got {show(said)}")
        if narrowed:
            included += narrowed
        elif said in (None, "all"):
            included.append(whole)
    excluded = [
        one for phase in _PHASES for one in _selectors(given, phase, "exclude_", path, work)
    ]
    if not included:
        reject(path, "selects nothing: it takes neither the prompt nor the generation")
    if included == [*_PHASES.values()]:
        included = ["all"]
    if included == ["all"] and not excluded:
        return None
    return [*included, *({"except": one} for one in excluded)]


def _selectors(
    given: Mapping[str, Any], phase: str, exclude: str, path: str, work: Work
) -> list[Any]:
    """Our selectors of the fields of a phase that include, or those that exclude."""
    made: list[Any] = []
    of = {"of": "prompt" if phase == "prompt" else "generated"}
    for what in _WHERE:
        key = f"{exclude}{phase}_{what}"
        if key not in given:
            continue
        listed = plain_list(given[key])
        if not listed:
            reject(f"{path}.{key}", f"must be a list of numbers, got {show(given[key])}")
        # Each token becomes a selector.
        unit = Unit.SEGMENT if what == "tokens" else Unit.ENTRY
        work.charge(len(listed), unit, f"{path}.{key}")
        if what == "window":
            if len(listed) != 2:
                reject(f"{path}.{key}", f"must be [start, stop], got {show(given[key])}")
            made.append({"start": listed[0], "stop": listed[1], **of})
        elif what == "positions":
            made.append({"at": list(listed), **of})
        elif phase == "generation":
            reject(f"{path}.{key}", "what is generated is not known before; give positions")
        else:
            made += [{"token_ids": [one]} for one in listed]
    return made


def _module(vector: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """A vector that the server has, by the name it was registered under."""
    name = plain(vector["source"])
    if not isinstance(name, str) or "/" in name:
        reject(f"{path}.source", f"{show(name)}: must be the name of a registered module, no path")
    extra = sorted({"data", "layers", "params"} & vector.keys())
    if extra or vector.get("algorithm", "direct") != "direct" or vector.get("normalize"):
        reject(f"{path}.source", f"takes algorithm direct and a scale alone, got {extra}")
    return name, vector.get("scale", 1.0)


def _op(
    vector: Mapping[str, Any], path: str, positions: list[Any] | None, work: Work
) -> list[dict[str, Any]]:
    """The operations of a vector that is given inline, one for each layer with its own."""
    algorithm = plain(vector.get("algorithm", "direct"))
    if not isinstance(algorithm, str) or algorithm not in _OPS:
        reject(f"{path}.algorithm", f"{show(algorithm)}: there are {', '.join(_OPS)} here")
    if "params" in vector:
        reject(f"{path}.params", f"nothing reads them of {algorithm}; masks are not there")
    if algorithm != "direct" and plain(vector.get("scale", 1.0)) != 1:
        reject(f"{path}.scale", f"{algorithm} has none")
    if "data" not in vector:
        reject(f"{path}.data", "is missing: a vector, or {layer: vector}")
    data = vector["data"]
    by_layer = isinstance(data, Mapping) and not {"data", "dtype"} & data.keys()
    layers = plain_list(vector["layers"]) if "layers" in vector else None
    if not by_layer and not layers:
        reject(f"{path}.layers", "is missing: one vector says nothing of layers")
    work.charge(len(layers or ()), Unit.ENTRY, f"{path}.layers")
    numbers = None if layers is None else [_layer(n, path) for n in layers]
    if by_layer:
        work.charge(len(data), Unit.ENTRY, f"{path}.data")
        wanted = None if numbers is None else {*numbers}
        found = [([_layer(n, path)], values) for n, values in data.items()]
        found = [(at, v) for at, v in found if wanted is None or at[0] in wanted]
    else:
        found = [(numbers or [], data)]
    name, field = _OPS[algorithm]
    ops: list[dict[str, Any]] = []
    for at, values in found:
        place: dict[str, Any] = {"point": "post_block", "layers": at}
        if positions is not None:
            place["positions"] = positions
        elif name == "replace":
            place["positions"] = "all"
        change = {"op": name, field: values}
        if name == "add":
            change["scale"] = vector.get("scale", 1.0)
        ops.append({**place, **change})
        if plain(vector.get("normalize", False)):
            ops.append({**place, "op": "normalize"})
    if not ops:
        reject(f"{path}.layers", "none of them is in data")
    return ops


def _layer(value: Any, path: str) -> int:
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 10
    number = int(value) if is_number else value
    return Given(number, f"{path}.layers").int(message="must be numbers, got {given}")
