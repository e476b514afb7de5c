# SPDX-License-Identifier: Apache-2.0
"""Reads and writes control vectors in GGUF files, with the library that llama.cpp keeps.

It is imported when a file is read or written: it takes as long as much of the engine does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURE = "controlvector"
"""`general.architecture` of a control vector."""

_MOST_VALUES = 100_000
"""The most values in a file. Each costs the library an object; a vector has some ten."""


def read_gguf(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a control vector, by name.

    Raises:
        ValueError: the file is no control vector, is truncated, or has tensors that are not float32
            or float16.
        Exception: the library raises anything on bytes that may be anything.
    """
    from gguf import GGMLQuantizationType, GGUFReader

    class Reader(GGUFReader):
        """The library's reader, with bounds.

        Past the end of a file the library reads values of no bytes, without end.
        """

        values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            self.values += 1
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"it is truncated: it has {len(self.data)} bytes and needs more")
            if self.values > _MOST_VALUES:
                raise ValueError(f"it has more than {_MOST_VALUES} values")
            return super()._get(offset, dtype, count, *order, **more)

    reader = Reader(path)
    field = reader.get_field("general.architecture")
    architecture = field.contents() if field is not None else None
    if architecture != ARCHITECTURE:
        raise ValueError(f"it is of architecture {str(architecture)[:40]}, not {ARCHITECTURE}")
    vectors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            raise ValueError(f"{tensor.name[:40]} is of type {kind.name}; F32 and F16 are read")
        vectors[tensor.name] = tensor.data
    return vectors


def write_gguf(path: Path, model_hint: str, directions: Mapping[int, np.ndarray]) -> None:
    """Write a file as repeng does.

    Args:
        model_hint: the model's name, for readers.
        directions: layer -> float32 [hidden].
    """
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    # Of an empty string `add_string` writes nothing, and repeng wants the key.
    writer.add_key_value(f"{ARCHITECTURE}.model_hint", model_hint, GGUFValueType.STRING)
    writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(directions))
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
