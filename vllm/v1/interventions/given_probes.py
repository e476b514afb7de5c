# SPDX-License-Identifier: Apache-2.0
"""Probes of several layers as rules name them: a `ServedProbe`, its fields, or its file.

{"name": "lies", "probe": {"sites": [["post_block", 12], ["post_block", 16]],
                           "weight": [units * sites, hidden], "bias": [units]}}
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import plain
from vllm.v1.probes.files import made_probe
from vllm.v1.probes.heads import MAX_OUTPUTS, MAX_UNITS
from vllm.v1.probes.pools import AnyPool
from vllm.v1.probes.probe import ServedProbe, Site

MAX_SITES = 64
"""The most layers that a probe reads."""

_NEEDED = ("sites", "weight", "bias")
_ALLOWED = ("activation", "output_weight", "output_bias", "pool", "threshold", "about")


def read_probe(given: Given, shape: TapShape) -> ServedProbe:
    """Return a probe that a rule has, by itself or by its fields, which are those of a file.

    Args:
        given: a `ServedProbe`, or a mapping. There `weight` is [units, sites, hidden], or
            [units * sites, hidden] with a unit's rows next to each other.

    Raises:
        ValueError: a field is missing, unknown, of a wrong shape or not finite; the model has no
            such point or layer; the message has the path.
    """
    probe = given.value
    if not isinstance(probe, ServedProbe):
        probe = _of_fields(given.fields(needed=_NEEDED, allowed=_ALLOWED), shape)
    if probe.hidden_size != shape.hidden_size:
        reject(
            f"{given.path}.weight",
            f"is for rows of {probe.hidden_size}, the model's have {shape.hidden_size}",
        )
    if len(probe.weight) > (most := shape.row_bytes // 4):
        reject(
            f"{given.path}.weight",
            f"has {len(probe.weight)} units; products with a row may take no more bytes than the "
            f"row, which are {most} units",
        )
    if len(probe.sites) > MAX_SITES:
        reject(
            f"{given.path}.sites", f"names {len(probe.sites)}, a probe reads at most {MAX_SITES}"
        )
    for i, (point, layer) in enumerate(probe.sites):
        at = f"{given.path}.sites[{i}]"
        Given(layer, f"{at}[1]").layers(Given(point, f"{at}[0]").point(shape), shape)
    return probe


def _of_fields(given: Given, shape: TapShape) -> ServedProbe:
    hidden = shape.hidden_size
    sites = [
        _site(one)
        for one in given["sites"].entries(
            f"must be a list of 1-{MAX_SITES} pairs of point and layer, got {{given}}", 1, MAX_SITES
        )
    ]
    weight = given["weight"]
    if not isinstance(weight.value, list | tuple):
        weight = Given(weight.floats().reshape(-1, weight.value.shape[-1]), weight.path)
    most = MAX_UNITS * len(sites)
    rows = [*_rows(weight, most, hidden)]
    if len(rows) % len(sites):
        weight.refuse(f"has {len(rows)} rows, which are not as many for each of {len(sites)} sites")
    more: dict[str, Any] = {}
    if "activation" in given:
        more["activation"] = given["activation"].text("must be a string, got {given}")
    units = len(rows) // len(sites)
    bias = given["bias"].vector(units)
    if "output_weight" in given:
        more["output_weight"] = np.stack([*_rows(given["output_weight"], MAX_OUTPUTS, units)])
    if "output_bias" in given:
        last = given["output_bias"].value
        more["output_bias"] = given["output_bias"].vector(
            len(last)
            if isinstance(last, list | tuple) and len(last) <= MAX_OUTPUTS
            else len(more.get("output_weight", [0]))
        )
    if "threshold" in given:
        more["threshold"] = given["threshold"].number()
    if "pool" in given:
        more["pool"] = _pool(given["pool"])
    try:
        stacked = np.stack(rows).reshape(units, len(sites), hidden)
        return made_probe(sites, stacked, bias, **more)
    except ValueError as error:
        given.refuse(f"is no probe: {error}")


def _rows(given: Given, most: int, width: int) -> Sequence[np.ndarray]:
    """Rows of a matrix, float64 [width] each; counted before they are read."""
    value = given.value
    count = len(value) if isinstance(value, list | tuple) else given.array().shape[0]
    if not 1 <= count <= most:
        given.refuse(f"has {count} rows, the most are {most}")
    return [Given(value[i], f"{given.path}[{i}]").vector(width) for i in range(count)]


def _site(given: Given) -> Site:
    point, layer = given.entries("must be a pair of point and layer, got {given}", 2, 2)
    return point.text("must be a point, got {given}"), layer.int(
        0, message="must be a layer, got {given}"
    )


def _pool(given: Given) -> AnyPool:
    fields = given.fields(allowed=("kind", "a", "window")).value
    try:
        made: AnyPool = msgspec.convert({k: plain(v) for k, v in fields.items()}, AnyPool)
    except msgspec.ValidationError as error:
        given.refuse(f"is no pool: {error}")
    return made
