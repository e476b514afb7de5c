# SPDX-License-Identifier: Apache-2.0
"""Arrays as requests and answers have them: `{"dtype", "shape", "data"}`."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

_FLOATS = {"float16": "<f2", "float32": "<f4"}


def pack(values: Any, path: str = "values") -> dict[str, Any]:
    """Pack an array as `{"dtype", "shape", "data"}`, which a request may have in place of numbers.

    Args:
        values: [hidden] or [n, hidden]; float16 and float32 as they are, others as float32.
        path: what errors call it.

    Raises:
        ValueError: values are masked, or no real numbers: a packed array cannot say so.
    """
    array = _numbers(values, path)
    name = array.dtype.name if array.dtype.name in _FLOATS else "float32"
    data = np.ascontiguousarray(array, dtype=_FLOATS[name]).tobytes()
    return {
        "dtype": name,
        "shape": list(array.shape),
        "data": base64.b64encode(data).decode(),
    }


def _numbers(values: Any, path: str) -> np.ndarray:
    array = np.asarray(values)
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{path}: is a {type(values).__name__}; fill in what is masked")
    if array.dtype.kind == "b" or not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise ValueError(f"{path}: must be of real numbers, got {array.dtype}")
    return array


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
    packed = pack(np.stack([_numbers(vectors[layer], f"vectors[{layer}]") for layer in layers]))
    packed["layers"] = layers
    if scales:
        packed["scales"] = [float(scales.get(layer, 1.0)) for layer in layers]
    return packed


def packed_fields(value: Any, path: str = "") -> Any:
    """Return a request with every numpy array in it packed.

    Args:
        path: where it stands, for errors.

    Raises:
        ValueError: as `pack`, with the path of the array.
    """
    if isinstance(value, np.ndarray):
        return pack(value, path)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: packed_fields(v, f"{path}.{key}".strip(".")) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [packed_fields(v, f"{path}[{i}]") for i, v in enumerate(value)]
    return value
