# SPDX-License-Identifier: Apache-2.0
"""Tensors as vLLM-Lens sends them: `{"data", "dtype", "original_dtype", "shape", "compression"}`.

`data` is base64 of zstd of the values in C order, little-endian, bfloat16 as int16. What a client
sends is bounded by what it says of itself, before anything is decoded or decompressed.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.v1.interventions.errors import refuse_unknown_keys, reject, show
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import dtype_of

MAX_BYTES = 256 << 20
"""Most bytes of a tensor, decompressed."""

_STORED = {"bfloat16": "<i2", "float16": "<f2", "float32": "<f4", "float64": "<f8"}
"""Dtype of a tensor -> of numpy's that it travels as."""
WIRE_KEYS = {"data", "dtype", "original_dtype", "shape", "compression"}
"""The keys of a tensor."""


def need_keys(given: Mapping[str, Any], path: str, known: set[str], needed: Sequence[str]) -> None:
    """Raise ValueError for a key that is not `known`, or one that is missing."""
    refuse_unknown_keys(given, sorted(known), path)
    for key in needed:
        if key not in given:
            reject(path, f"lacks {key!r}")


def decoded(
    value: Mapping[str, Any], path: str, admit: Callable[[list[int]], None] | None = None
) -> torch.Tensor:
    """Return the tensor of a wire form, of the dtype that it had.

    Args:
        admit: is told the shape before anything is decoded, and may refuse it.

    Raises:
        ValueError: a key is missing, unknown or wrong, or the data are not what the others say.
    """
    need_keys(value, path, WIRE_KEYS, ("data", "dtype", "shape"))
    name = value.get("original_dtype", value["dtype"])
    name = name.removeprefix("torch.") if isinstance(name, str) else ""
    if name not in _STORED:
        reject(f"{path}.original_dtype", f"must be one of {', '.join(_STORED)}")
    stored = np.dtype(_STORED[name])
    if value["dtype"] == "float32":  # whatever it was: the form of old versions
        name, stored = "float32", np.dtype("<f4")
    elif value["dtype"] != stored.name:
        reject(f"{path}.dtype", f"is {show(value['dtype'])}, {name} travels as {stored.name}")
    shape = value["shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= 3:
        reject(f"{path}.shape", "must be a list of one to three ints")
    shape = [Given(size, f"{path}.shape[{i}]").int() for i, size in enumerate(shape)]
    size = math.prod(shape) * stored.itemsize
    if min(shape) < 1 or size > MAX_BYTES:
        reject(f"{path}.shape", f"must be of 1 to {MAX_BYTES} bytes, is of {show(size)}")
    if admit is not None:
        admit(shape)
    data = value["data"]
    # Compressed, what cannot be made smaller is a little larger.
    if not isinstance(data, str) or len(data) > 4 * (size + size // 128 + 1024) // 3:
        reject(f"{path}.data", f"must be a string, base64, of at most {show(size)} bytes")
    raw = Given(data, f"{path}.data").base64()
    match value.get("compression"):
        case "zstd":
            raw = _decompressed(raw, size, f"{path}.data")
        case None:
            pass
        case other:
            reject(f"{path}.compression", f"must be 'zstd', got {show(other)}")
    if len(raw) != size:
        reject(f"{path}.data", f"has {len(raw)} bytes, shape and dtype make {size}")
    array = np.frombuffer(raw, stored).astype(stored.newbyteorder("="))
    return torch.from_numpy(array).view(dtype_of(name)).reshape(shape)


def _decompressed(raw: bytes, size: int, path: str) -> bytes:
    """Decompress one zstd frame of `size` bytes; a frame that says another size is not begun."""
    import zstandard

    try:
        said = zstandard.frame_content_size(raw)
        if said not in (-1, size):
            reject(path, f"has {said} bytes, shape and dtype make {size}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        return decompressor.decompress(raw, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        reject(path, f"is not zstd: {show(str(error))}")


def encoded(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the wire form of a CPU tensor, bit for bit."""
    import zstandard

    name = str(tensor.dtype).removeprefix("torch.")
    stored = np.dtype(_STORED[name])
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "data": base64.b64encode(zstandard.ZstdCompressor(level=1).compress(raw)).decode(),
        "dtype": stored.name,
        "original_dtype": f"torch.{name}",
        "shape": list(tensor.shape),
        "compression": "zstd",
    }
