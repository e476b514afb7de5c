# SPDX-License-Identifier: Apache-2.0
"""Reads and writes packed arrays, which stand in JSON in place of a list of numbers.

A packed array is `{"dtype", "shape", "data"}` with base64 of little-endian values. One array can
hold the vectors of all layers of a point. Whatever a client sends is checked first.
"""

import base64
import math
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch

from vllm.config.operations import VECTORS
from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.frontend.request.capture import MAX_CAPTURES
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.given_rules import MAX_RULES
from vllm.v1.interventions.values import MOST_ENTRIES

PACKED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

MAX_ARRAY_BYTES = 256 << 20
"""The largest array: more than the vectors of one point of any model."""

_KEYS = ("dtype", "shape", "data")


def pack(values: torch.Tensor) -> dict[str, Any]:
    """Pack a CPU tensor, bit for bit."""
    whole = values.contiguous()
    whole = whole.as_strided((whole.numel(),), (1,))  # one number is contiguous with any stride
    raw = whole.view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "data": base64.b64encode(raw).decode(),
    }


def unpack(value: Any, path: str, *, extra: tuple[str, ...] = ()) -> torch.Tensor:
    """Return the tensor of a packed array, on the CPU, of the dtype it was sent in.

    Args:
        path: where it stands, for errors.
        extra: the keys it may have beside `dtype`, `shape` and `data`.

    Raises:
        ValueError: a key is missing or unknown, the dtype is none of `PACKED_DTYPES`, the shape is
            not a list of one or two positive ints, the array is too large, `data` is not base64 of
            just as many bytes, or a value is not finite.
    """
    given = Given(value, path).fields(_KEYS, extra, "a packed array")
    unknown = f"unknown dtype {{given}}; use {', '.join(PACKED_DTYPES)}"
    name = given["dtype"].choice(PACKED_DTYPES, unknown, {"float64": "float32"})
    shape = _shape(given["shape"])
    dtype = PACKED_DTYPES[name]
    expected = math.prod(shape) * dtype.itemsize
    if expected > MAX_ARRAY_BYTES:
        reject(
            f"{path}.shape", f"{show(expected)} bytes are more than the {MAX_ARRAY_BYTES} allowed"
        )
    raw = _bytes(given["data"], expected)
    # numpy does the byte order, and has no bfloat16.
    words = np.frombuffer(raw, f"<i{dtype.itemsize}").astype(f"=i{dtype.itemsize}")
    values = torch.from_numpy(words).view(dtype).reshape(shape)
    if not torch.isfinite(values).all():
        reject(f"{path}.data", "is not finite")
    return values


def _shape(given: Given) -> list[int]:
    message = "must be a list of one or two ints"
    if not isinstance(given.value, list):
        given.refuse(message)
    at_least = "must be an int of at least 1, got {given}"
    return [size.int(1, message=at_least) for size in given.entries(message, 1, 2)]


def _bytes(given: Given, expected: int) -> bytes:
    """Decode base64, which must be of as many bytes as expected; too many are never decoded."""
    characters = 4 * -(-expected // 3)
    if isinstance(given.value, str) and len(given.value) != characters:
        given.refuse(
            f"has {len(given.value)} characters; the {expected} bytes of this shape and dtype are "
            f"{characters} in base64"
        )
    raw = given.base64()
    if len(raw) != expected:
        given.refuse(f"has {len(raw)} bytes, shape and dtype make {expected}")
    return raw


def _need_few(value: Sized, path: str) -> None:
    """Refuse a list or mapping that is too long to look at."""
    if len(value) > MOST_ENTRIES:
        reject(path, f"has {len(value)} entries, at most {MOST_ENTRIES} are looked at")


def is_packed(value: Any) -> bool:
    """Tell whether a value is meant as a packed array.

    It has one of the keys, which no layer or key of an entry has as its name.
    """
    return isinstance(value, Mapping) and any(key in value for key in _KEYS)


def read_array(value: Any, path: str) -> Any:
    """Return the tensor of a packed array; other values as they are, to be checked later."""
    return unpack(value, path) if is_packed(value) else value


def read_vectors(value: Any, path: str) -> Any:
    """Read the packed arrays in `{point: {layers: vector}}`: single vectors, and whole points.

    Raises:
        ValueError: as `unpack`; other values are checked where they are used.
    """
    if not isinstance(value, Mapping):
        return value
    _need_few(value, path)
    return {point: _read_point(e, f"{path}.{show_key(point)}") for point, e in value.items()}


def _read_point(entries: Any, path: str) -> Any:
    if is_packed(entries):
        return _by_layer(entries, path)
    if not isinstance(entries, Mapping):
        return entries
    _need_few(entries, path)
    return {layer: _read_entry(e, f"{path}.{show_key(layer)}") for layer, e in entries.items()}


def _read_entry(entry: Any, path: str) -> Any:
    if isinstance(entry, Mapping) and "vector" in entry:
        return {**entry, "vector": read_array(entry["vector"], f"{path}.vector")}
    return read_array(entry, path)


def _by_layer(value: Any, path: str) -> dict[int, Any]:
    """Return `{layer: {"vector", "scale"}}` of a point's vectors that are packed together."""
    if "layers" not in value:
        reject(path, "packed vectors need 'layers', which RhizoNymph/vllm calls 'layer_indices'")
    vectors = unpack(value, path, extra=("layers", "scales"))
    if vectors.ndim != 2:
        reject(f"{path}.shape", "must be [layers, hidden size]")
    layers = _list(value["layers"], len(vectors), f"{path}.layers")
    scales = _list(value.get("scales", [1.0] * len(vectors)), len(vectors), f"{path}.scales")
    entries: dict[int, Any] = {}
    for i, (layer, scale, vector) in enumerate(zip(layers, scales, vectors, strict=True)):
        layer = Given(layer, f"{path}.layers[{i}]").int()
        if layer in entries:
            reject(f"{path}.layers", f"names layer {show(layer)} twice")
        entries[layer] = {
            "vector": vector,
            "scale": Given(scale, f"{path}.scales[{i}]").number(),
        }
    return entries


def _list(value: Any, count: int, path: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, list) else show(value)
        reject(path, f"must be a list with an entry for each of the {count} rows, got {got}")
    return value


def read_ops(value: Any, path: str) -> Any:
    """Read the packed arrays in a list of operations; raises ValueError as `unpack`."""
    if not isinstance(value, list):
        return value
    _need_few(value, path)
    return [read_op(entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def read_op(entry: Any, path: str) -> Any:
    """Read the packed arrays in an operation; raises ValueError as `unpack`."""
    if not isinstance(entry, Mapping):
        return entry
    read = dict(entry)
    for key in VECTORS:
        if key in read:
            read[key] = read_array(read[key], f"{path}.{key}")
    gate = read.get("gate")
    if isinstance(gate, Mapping) and "probe" in gate:
        read["gate"] = {**gate, "probe": read_array(gate["probe"], f"{path}.gate.probe")}
    return read


def read_rules(value: Any, path: str) -> Any:
    """Read the packed probes in a list of rules; raises ValueError as `unpack`."""
    if not isinstance(value, list) or len(value) > MAX_RULES:  # refused where they are parsed
        return value
    return [
        {**rule, "probe": _read_probe(rule["probe"], f"{path}[{i}].probe")}
        if isinstance(rule, Mapping) and "probe" in rule
        else rule
        for i, rule in enumerate(value)
    ]


def _read_probe(value: Any, path: str) -> Any:
    """Read a packed vector, or the packed arrays of a probe's fields."""
    if is_packed(value) or not isinstance(value, Mapping):
        return read_array(value, path)
    _need_few(value, path)
    return {k: read_array(v, f"{path}.{show_key(k)}") for k, v in value.items()}


def read_capture(value: Any, path: str) -> Any:
    """Read the packed projections in `{consumer: {...}}`; raises ValueError as `unpack`."""
    if not isinstance(value, Mapping):
        return value
    _need_few(value, path)
    return {name: _read_asked(a, f"{path}.{show_key(name)}") for name, a in value.items()}


def _read_asked(asked: Any, path: str) -> Any:
    if isinstance(asked, list):
        if len(asked) > MAX_CAPTURES:  # refused where they are parsed
            return asked
        return [_read_asked(one, f"{path}[{i}]") for i, one in enumerate(asked)]
    if not isinstance(asked, Mapping) or "project" not in asked:
        return asked
    project = asked["project"]
    if isinstance(project, Mapping) and "modules" in project:  # names
        return asked
    return {**asked, "project": _read_matrices(project, f"{path}.project")}


def _read_matrices(value: Any, path: str, deep: int = 2) -> Any:
    """Read a packed matrix, or those in `{point: {layers: matrix}}`."""
    if is_packed(value) or not deep or not isinstance(value, Mapping):
        return read_array(value, path)
    _need_few(value, path)
    return {k: _read_matrices(v, f"{path}.{show_key(k)}", deep - 1) for k, v in value.items()}
