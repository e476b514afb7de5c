# SPDX-License-Identifier: Apache-2.0
"""GGUF files, as far as a control vector needs them: a few keys, and one-dimensional tensors.

Our own and small, because a file may be anybody's: everything is bounded by the bytes there are,
and what is read is a plain array.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

ARCHITECTURE = "controlvector"
"""`general.architecture` of a control vector."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_UINT32, _STRING, _ARRAY = 4, 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its struct code."""
_TENSORS = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
"""Type of a tensor -> the dtypes that control vectors have."""


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keys and the tensors; of keys that are arrays, the length.

    Raises:
        ValueError: not such a file, truncated, or with tensors of another kind.
    """
    reader = _Reader(data)
    if reader.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"it is of version {version}; versions 2 and 3, little-endian, are read")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        name = reader.string()
        keys[name] = reader.value(reader.number("I"))
    tensors: dict[str, tuple[int, np.dtype, int]] = {}
    for _ in range(num_tensors):
        name = reader.string()
        if name in tensors:
            raise ValueError(f"it has {name[:40]!r} twice")
        sizes = [reader.number("Q") for _ in range(reader.number("I"))]
        kind, offset = reader.number("I"), reader.number("Q")
        if len(sizes) != 1 or kind not in _TENSORS:
            raise ValueError(
                f"{name[:40]!r} is of type {kind} with {len(sizes)} dimensions; a control vector "
                "has one dimension, of float32 (type 0) or float16 (1)"
            )
        tensors[name] = (sizes[0], _TENSORS[kind], offset)
    alignment = keys.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    start = -(-reader.position // alignment) * alignment
    return keys, {
        name: np.frombuffer(reader.at(start + offset, size * dtype.itemsize), dtype)
        for name, (size, dtype, offset) in tensors.items()
    }


def write_gguf(keys: Mapping[str, str | int], tensors: Mapping[str, np.ndarray]) -> bytes:
    """A file of version 3.

    Args:
        keys: strings, and ints that fit 32 bits.
        tensors: float32, one dimension.
    """
    head = _MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(keys))
    for name, value in keys.items():
        if isinstance(value, str):
            head += _string(name) + struct.pack("<I", _STRING) + _string(value)
        else:
            head += _string(name) + struct.pack("<II", _UINT32, value)
    body = b""
    for name, tensor in tensors.items():
        head += _string(name) + struct.pack("<IQIQ", 1, len(tensor), 0, len(body))
        body += _aligned(tensor.astype(_TENSORS[0]).tobytes())
    return _aligned(head) + body


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


class _Reader:
    """Reads forward and never past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def at(self, position: int, size: int) -> bytes:
        if position + size > len(self._data):
            raise ValueError(f"it is truncated: it has {len(self._data)} bytes and needs more")
        return self._data[position : position + size]

    def take(self, size: int) -> bytes:
        taken = self.at(self.position, size)
        self.position += size
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        # Errors are kept, not raised: a key that we do not read may be anything.
        return self.take(self.number("Q")).decode(errors="backslashreplace")

    def value(self, kind: int) -> Any:
        """A key's value; of an array, the length."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"it has a value of unknown type {kind}")
        kind, length = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            self.take(length * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _STRING:
            for _ in range(length):
                self.string()
        else:
            raise ValueError(f"it has an array of type {kind}")
        return length
