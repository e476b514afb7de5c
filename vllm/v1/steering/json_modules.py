# SPDX-License-Identifier: Apache-2.0
"""Modules as JSON, as RhizoNymph/vllm has them (docs/coming-from.md#rhizonymphvllm).

`{"vectors", "prefill_vectors", "decode_vectors"}`, each `{point: {layer: vector}}` with lists of
numbers or `{"vector", "scale"}`, or at a point all layers packed: `{"dtype", "shape": [layers,
hidden], "layer_indices", "data", "scales"}`, `data` being base64 of little-endian values.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm.v1.interventions.errors import show, show_key
from vllm.v1.interventions.plan import dtype_of
from vllm.v1.steering.modules import FIELDS

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_KEYS = ("dtype", "shape", "layer_indices", "data", "scales")


def read_json_module(data: bytes) -> dict[str, Any]:
    """Return the fields of a module, still to be parsed: of what was packed, vectors by layer.

    Raises:
        ValueError: the data are no JSON of an object, or what is packed is not what it says.
    """
    given = json.loads(data, object_pairs_hook=without_repeats)
    if not isinstance(given, dict):
        raise ValueError("it is no object")
    fields = {key: value for key, value in given.items() if value is not None}
    if not fields.keys() & {*FIELDS, "ops"}:
        return _read_tier(fields)
    return {key: _read_tier(value) if key in FIELDS else value for key, value in fields.items()}


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; the library takes the last of several members of one name, without a word."""
    members = dict(pairs)
    if len(members) < len(pairs):
        repeated = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"it has {show_key(repeated)} twice")
    return members


def _read_tier(tier: Any) -> Any:
    if not isinstance(tier, dict):
        return tier
    return {
        point: _by_layer(entries, point)
        if isinstance(entries, dict) and {"data", "dtype"} <= entries.keys()
        else entries
        for point, entries in tier.items()
    }


def _by_layer(packed: Mapping[str, Any], point: str) -> dict[int, Any]:
    where = f"what is packed at {show_key(point)}"
    if not {*_KEYS[:4]} <= packed.keys() <= {*_KEYS}:
        given = sorted(map(show_key, packed))[:8]
        raise ValueError(f"{where} has the keys {given}, it needs {', '.join(_KEYS[:4])}")
    if packed["dtype"] not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"{where} is of dtype {show(packed['dtype'])}; {known} are read")
    dtype, layers = dtype_of(packed["dtype"]), packed["layer_indices"]
    scales = packed.get("scales")
    scales = [1.0] * len(layers) if scales is None else scales
    # numpy, which knows byte orders, has no bfloat16.
    words = np.frombuffer(
        base64.b64decode(packed["data"], validate=True), f"<i{dtype.itemsize}"
    ).astype(f"=i{dtype.itemsize}")
    rows = torch.from_numpy(words).view(dtype).reshape(packed["shape"])
    if len(set(layers)) < len(layers):
        raise ValueError(f"{where} names a layer twice")
    return {
        layer: {"vector": row, "scale": scale}
        for layer, row, scale in zip(layers, rows, scales, strict=True)
    }
