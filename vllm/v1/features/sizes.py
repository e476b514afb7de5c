# SPDX-License-Identifier: Apache-2.0
"""Memory that an autoencoder takes, counted from the headers of its file before any is read."""

from math import prod
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from safetensors import safe_open

from vllm.v1.features.files import readable, weights_of

_ENCODERS = ("W_enc", "w_enc", "encoder.weight")
"""Names of the encoder in files."""
_VECTORS = 4
"""Number of float32 vectors as long as there are features that are kept beside the matrices."""


class Size(NamedTuple):
    """Bytes that an autoencoder takes."""

    device: int
    """On a device."""
    host: int
    """In the memory of a process that has its file open; a matrix that is mapped takes none."""


def size_of(path: str | Path, hidden: int, itemsize: int, ranks: int = 1) -> Size:
    """Return what an autoencoder of rows [hidden] takes.

    Args:
        itemsize: bytes of a number of a matrix on the device.
        ranks: number of tensor-parallel ranks, each of which has a shard on its device.

    Raises:
        ValueError: it cannot be read, or has no encoder; the message names the file.
    """
    path = Path(path)
    with readable(path):
        file = weights_of(path)
        numbers = _numbers(file)
        name = next((name for name in _ENCODERS if name in numbers), None)
        if name is None:
            raise ValueError(f"{file} lacks {_ENCODERS[0]}; it has {sorted(numbers)[:12]}")
    features = numbers[name] // hidden
    shard = -(-features // ranks)
    stays = 4 * sum(numbers.values()) if file.suffix == ".npz" else 0
    return Size(
        2 * hidden * shard * itemsize + _vectors(shard, hidden),
        stays + _vectors(features, hidden),
    )


def _vectors(features: int, hidden: int) -> int:
    return 4 * (_VECTORS * features + hidden)


def _numbers(file: Path) -> dict[str, int]:
    """Return how many numbers each tensor of a file has, by name."""
    if file.suffix == ".npz":
        with ZipFile(file) as archive:
            return {
                name.removesuffix(".npy"): _of_npy(archive, name) for name in archive.namelist()
            }
    if file.suffix == ".pt":
        tensors = torch.load(file, map_location="meta", weights_only=True)
        if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
            raise ValueError(f"{file.name} is no mapping of tensors")
        return {name: tensor.numel() for name, tensor in tensors.items()}
    with safe_open(file, "pt") as opened:
        names = opened.keys()
        return {name: prod(opened.get_slice(name).get_shape()) for name in names}


def _of_npy(archive: ZipFile, name: str) -> int:
    with archive.open(name) as stream:
        major, _ = np.lib.format.read_magic(stream)
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        if major not in read:
            raise ValueError(f"{name} is of version {major}, 1 and 2 are read")
        return prod(read[major](stream)[0])
