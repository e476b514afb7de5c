# SPDX-License-Identifier: Apache-2.0
"""Modules of vectors that no model is at hand for, to be saved."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config.operations import OPERATIONS
from vllm.config.points import INPUT_POINTS, STREAM_POINTS
from vllm.config.steering import FAMILIES, SteeringConfig
from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.low_rank import num_rows
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.values import is_array, plain, plain_list
from vllm.v1.steering.modules import FIELDS, Module, parse_module

ANY_FAMILY = SteeringConfig(
    enable_steering=True, steering_families=list(FAMILIES), max_steering_ops=64
)
"""The options of an engine that takes every module."""

_MOST_LAYERS = 1000


def module_without_model(source: Mapping[str, Any], path: str) -> Module:
    """Make a module of `{point: {layer: vector}}`, or of the fields of a module.

    Its width is that of the first vector. Whether a model has its layers and points is seen where
    it is loaded.

    Args:
        path: what errors call it.

    Raises:
        ValueError: as for a module that is registered; or layers or points that only a model can
            tell ("all", negative ones).
    """
    given = Given(source, path).mapping()
    if not given.keys() & {*FIELDS, "ops"}:
        given = {FIELDS[0]: given}
    widths = [len(vector) for vector in _vectors(given, path) if _is_vector(vector)]
    layers = dict.fromkeys(range(_MOST_LAYERS), LayerShape(STREAM_POINTS, inputs=INPUT_POINTS))
    return parse_module(given, path, TapShape((widths or [1])[0], "float32", layers), ANY_FAMILY)


def _vectors(given: Mapping[str, Any], path: str) -> Iterator[Any]:
    """All that stands where a vector belongs; what is no mapping or list is refused later."""
    for field in FIELDS:
        for point, entries in _items(given.get(field)):
            for layers, entry in _items(entries):
                _need_numbers(layers, f"{path}.{field}.{show_key(point)}.{show_key(layers)}")
                yield entry.get("vector") if isinstance(entry, Mapping) else entry
    ops = given.get("ops")
    for i, op in enumerate(ops if isinstance(ops, list | tuple) else ()):
        if isinstance(op, Mapping):
            _need_numbers(op.get("layers"), f"{path}.ops[{i}].layers")
            _need_numbers(op.get("point"), f"{path}.ops[{i}].point")
            operation = OPERATIONS.get(str(plain(op.get("op"))))
            if operation is not None and operation.ranked:
                rows: Any = op.get(operation.reads)
                yield rows[0] if num_rows(Given(rows, path)) else None
            elif operation is not None:
                yield op.get(operation.vector)


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, Mapping) else ()


def _is_vector(value: Any) -> bool:
    if is_array(value):
        return value.ndim == 1
    return isinstance(value, list | tuple)


def _need_numbers(value: Any, path: str) -> None:
    """Raise ValueError for layers or points that only a model can tell."""
    listed = plain_list(value)
    for entry in [value] if listed is None else listed:
        said = plain(entry)
        if isinstance(said, int | str) and str(said).startswith(("all", "-")):
            reject(path, f"only a model can tell what {show(said)} is; name each by itself")
