# SPDX-License-Identifier: Apache-2.0
"""How requests name points and layers: parsed and checked against what the model has."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm.config.capture import CaptureConfig
from vllm.config.steering import POINTS, SteeringConfig
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.plan import Site, TapShape
from vllm.v1.interventions.values import plain, plain_list

_INT = re.compile(r"-?\d{1,9}")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


def need_point(value: Any, path: str, shape: TapShape) -> str:
    """Return the point a user names; raise ValueError if no layer of the model has it."""
    value = plain(value)
    if not isinstance(value, str) or value not in POINTS:
        reject(path, f"unknown point {show(value)}; points are {', '.join(POINTS)}")
    if not any(value in points for points in shape.points.values()):
        has = sorted({p for points in shape.points.values() for p in points}, key=POINTS.index)
        reject(path, f"this model has no point {value!r}; it has {', '.join(has)}")
    return value


def need_layers(value: Any, point: str, path: str, shape: TapShape) -> list[int]:
    """The layers a user's key or entry names, each checked to have `point`.

    Args:
        value: an int, or its digits; negative counts from the end, -1 is the last layer that has
            taps. An inclusive range "4-11", "all" (the layers that have the point) or a list of
            these.

    Raises:
        ValueError: none of these, no layer, one named twice, out of range or without the point.
    """
    if (entries := plain_list(value)) is not None:
        # A mapping keeps the order. The first repeat ends it: a list of "all" may be any length.
        layers: dict[int, None] = {}
        for i, entry in enumerate(entries):
            for layer in _layers_of(entry, point, f"{path}[{i}]", shape):
                if layer in layers:
                    reject(path, f"names layer {layer} twice")
                layers[layer] = None
        if not layers:
            reject(path, "names no layer")
        return list(layers)
    return _layers_of(value, point, path, shape)


def need_sites(points: Any, layers: Any, path: str, shape: TapShape) -> list[Site]:
    """The sites of an entry with `point` and `layers`, in the order of the stream.

    Args:
        points: a point, a list of them, or "all": those that each of the layers has.
        layers: as of `need_layers`.
        path: of the entry.

    Raises:
        ValueError: as `need_point` and `need_layers`; or a point is there twice, or none.
    """
    if plain(points) == "all":
        anywhere = msgspec.structs.replace(shape, points=dict.fromkeys(shape.points, ("all",)))
        chosen = need_layers(layers, "all", f"{path}.layers", anywhere)
        sites = [(point, layer) for layer in chosen for point in shape.points[layer]]
    else:
        names = [need_point(each, f"{path}.point", shape) for each in _listed(points)]
        if not names or len(set(names)) < len(names):
            reject(f"{path}.point", "must name a point, each once")
        sites = [(p, n) for p in names for n in need_layers(layers, p, f"{path}.layers", shape)]
    return sorted(sites, key=site_order)


def _listed(value: Any) -> Sequence[Any]:
    listed = plain_list(value)
    return [value] if listed is None else listed


def need_steered_points(sites: Iterable[Site], path: str, config: SteeringConfig) -> None:
    """Raise ValueError if a site's point was left out of `steering_points`."""
    _need_points(sites, path, "steering_points", config.steering_points)


def need_captured_points(sites: Iterable[Site], path: str, config: CaptureConfig) -> None:
    """Raise ValueError if a site's point was left out of `capture_points`."""
    _need_points(sites, path, "capture_points", config.capture_points)


def _need_points(sites: Iterable[Site], path: str, option: str, points: Sequence[str]) -> None:
    for point, _ in sites:
        if point not in points:
            reject(f"{path}.{point}", f"the engine was started with {option}={list(points)}")


def _layers_of(value: Any, point: str, path: str, shape: TapShape) -> list[int]:
    """The layers of an int, digits, a range or "all"."""
    value = plain(value)
    if isinstance(value, str) and value == "all":
        return [layer for layer, points in sorted(shape.points.items()) if point in points]
    if isinstance(value, int) and not isinstance(value, bool):
        first = last = value
    elif isinstance(value, str) and _INT.fullmatch(value):
        first = last = int(value)
    elif isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        first, last = int(match[1]), int(match[2])
        if first > last:
            reject(path, f"the range {value!r} is empty")
    else:
        reject(
            path,
            f"{show(value)} is not a layer: use an int, a range like '4-11', 'all' or a list",
        )
    if -(count := max(shape.points) + 1) <= first < 0:
        first = last = first + count
    # The ends first: between them a client may put any number of layers.
    for layer in (first, last, *(range(first, last + 1) if last in shape.points else ())):
        if layer not in shape.points:
            reject(path, f"layer {show(layer)} is out of range, the model has {_has(shape)}")
    layers = list(range(first, last + 1))
    for layer in layers:
        if point not in shape.points[layer]:
            has = ", ".join(shape.points[layer])
            reject(path, f"layer {layer} has no point {point!r}; it has {has}")
    return layers


def _has(shape: TapShape) -> str:
    """The layers that have taps; not every decoder layer of every model has."""
    layers = sorted(shape.points)
    if layers == list(range(layers[-1] + 1)):
        return f"0-{layers[-1]}"
    return ", ".join(map(str, layers))


def site_order(site: Site) -> tuple[int, int]:
    """Sort key of sites: the order in which the stream passes them."""
    point, layer = site
    return layer, POINTS.index(point)
