# SPDX-License-Identifier: Apache-2.0
"""Arrays as requests and answers have them: `{"dtype", "shape", "data"}`."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

_FLOATS = {"float16": "<f2", "float32": "<f4"}


def pack(values: Any) -> dict[str, Any]:
    """Pack an array as `{"dtype", "shape", "data"}`, which a request may have in place of numbers.

    Args:
        values: [hidden] or [n, hidden]; float16 and float32 as they are, others as float32.
    """
    array = np.asarray(values)
    name = array.dtype.name if array.dtype.name in _FLOATS else "float32"
    data = np.ascontiguousarray(array, dtype=_FLOATS[name]).tobytes()
    return {
        "dtype": name,
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode(),
    }


def unpack(packed: Mapping[str, Any]) -> np.ndarray:
    """Return the array of a packed one; bfloat16, which numpy lacks, becomes float32, exactly."""
    raw = base64.b64decode(packed["data"])
    if packed["dtype"] == "bfloat16":
        halves = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        return halves.view(np.float32).reshape(packed["shape"])
    dtype = _FLOATS.get(packed["dtype"], packed["dtype"])
    return np.frombuffer(raw, dtype).reshape(packed["shape"])


def pack_layers(
    vectors: Mapping[int, Any], scales: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Pack all vectors of a point as one array, in place of `{layer: vector}`.

    Args:
        vectors: layer -> [hidden].
        scales: layer -> scale; 1 for layers that are not named.
    """
    layers = list(vectors)
    packed = pack(np.stack([np.asarray(vectors[layer]) for layer in layers]))
    packed["layers"] = layers
    if scales:
        packed["scales"] = [float(scales.get(layer, 1.0)) for layer in layers]
    return packed


def packed_fields(value: Any) -> Any:
    """Return a request with every numpy array in it packed."""
    if isinstance(value, np.ndarray):
        return pack(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: packed_fields(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [packed_fields(entry) for entry in value]
    return value
