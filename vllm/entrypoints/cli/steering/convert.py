# SPDX-License-Identifier: Apache-2.0
"""The verb `vllm steering convert`: a published Jacobian lens as a file for `--capture-lens`.

Such files are torch's: `J`, a matrix [d_model, d_model] for each of `source_layers`, which carries
what a layer returns to what the last one returns, and `d_model`. They are read with nothing in them
run, and mapped, so that no more than a layer is in memory twice.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm.v1.interventions.errors import describe, reject, show

MAX_LAYERS = 1024
"""The most layers of a lens."""

_KEYS = ("J", "source_layers", "d_model")


def need_new(out: Path) -> None:
    """Raise ValueError if something is at `out`, or its name is not that of a safetensors file."""
    if out.suffix != ".safetensors" or out.exists():
        reject(str(out), "must be a new file that ends with .safetensors")


def convert_lens(source: Path, out: Path) -> list[int]:
    """Write the lens of `source` to `out`, a file that is not there yet.

    Returns:
        The layers that it reads.

    Raises:
        ValueError: `source` is no such lens; the message names the entry.
        OSError: a file cannot be read or written.
    """

    def refuse(why: str) -> NoReturn:
        raise ValueError(f"{source}: {why}")

    need_new(out)
    size = source.stat().st_size
    try:
        given = load_tensors(source, mmap=True)
    except ValueError as error:
        refuse(str(error))
    if not isinstance(given, Mapping) or (lacks := [key for key in _KEYS if key not in given]):
        refuse(f"lacks {lacks[0]!r}" if isinstance(given, Mapping) else "is no mapping")
    width, layers = given["d_model"], given["source_layers"]
    layers = layers.tolist() if isinstance(layers, torch.Tensor) else layers
    if not _count(width, 1 << 20) or not width:
        refuse(f"d_model must be an int, got {show(width)}")
    if not isinstance(layers, list | tuple) or not 1 <= len(layers) <= MAX_LAYERS:
        refuse(f"source_layers must be a list of 1-{MAX_LAYERS} layers")
    if not all(_count(layer, 1 << 20) for layer in layers) or len(set(layers)) < len(layers):
        refuse("source_layers must be different ints, from 0 on")
    matrices = _matrices(given["J"], list(layers))
    if matrices is None:
        refuse("J must have a matrix for each of source_layers: [layers, d_model, d_model]")
    total = 0
    for layer, matrix in matrices.items():
        if not isinstance(matrix, torch.Tensor) or list(matrix.shape) != [width, width]:
            shape = list(matrix.shape) if isinstance(matrix, torch.Tensor) else show(matrix)
            refuse(f"J of layer {layer} is {shape}, needed are [{width}, {width}]")
        if not matrix.is_floating_point():
            refuse(f"J of layer {layer} is {matrix.dtype}, no floating-point numbers")
        total += matrix.numel() * matrix.element_size()
        if total > size:  # views of less than they say, which would be written out
            refuse(f"J of layer {layer} says more than the file has")
        if not matrix.isfinite().all():
            refuse(f"J of layer {layer} has numbers that are not finite")
    tensors = {
        f"{layer}.weight": (m.float() if m.dtype == torch.float64 else m).contiguous().clone()
        for layer, m in matrices.items()
    }
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, {"kind": "jacobian"})
        os.link(unfinished, out)  # unlike a rename it replaces nothing
    except SafetensorError as error:
        raise OSError(f"{out}: cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return sorted(matrices)


def load_tensors(source: Path, mmap: bool) -> Any:
    """Read a file that `torch.save` wrote of tensors in lists and mappings; nothing in it is run.

    Args:
        mmap: leave the tensors in the file until they are used; a file of an old format cannot be.

    Raises:
        ValueError: it is damaged, or a pickle of other things.
        OSError: it cannot be read.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ValueError(f"is not tensors alone: {describe(error)[:200]}") from error


def _count(value: Any, stop: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < stop


def _matrices(value: Any, layers: list[int]) -> dict[int, Any] | None:
    """The matrix of each layer: of a mapping by layer, or in the order of the layers; None if they
    are of others."""
    if isinstance(value, Mapping):
        return {n: value[n] for n in layers} if value.keys() == set(layers) else None
    if not isinstance(value, list | tuple | torch.Tensor) or not _long(value, len(layers)):
        return None
    return dict(zip(layers, value, strict=True))


def _long(value: Any, number: int) -> bool:
    if isinstance(value, torch.Tensor) and value.ndim != 3:
        return False
    return len(value) == number
