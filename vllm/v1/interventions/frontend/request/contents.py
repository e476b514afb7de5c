# SPDX-License-Identifier: Apache-2.0
"""Frontend: all numbers of a tier at once, as bytes: what requests bring is compared, checked and
hashed as one, and not site by site."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm.v1.interventions.values import Array, is_array

_TORCH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of tensors that are read at once."""
_NUMPY = {torch.float64: "=f8", torch.float32: "=f4", torch.float16: "=f2"}
_SAYS_OF_TENSOR = attrgetter("dtype", "device", "layout", "is_nested", "shape")
_SAYS_OF_ARRAY = attrgetter("dtype", "shape")
_FLOAT = 0xCB
"""The byte that MessagePack puts before the eight of a float."""


class Contents(NamedTuple):
    """Arrays or lists of a tier, all of one kind."""

    names: tuple[Any, ...]
    """Points, layers with their types, dtypes and shapes of a tier: all of it but numbers."""
    arrays: Sequence[Any]
    """The value of each layer, in the order in which they are given."""
    dtype: Any
    """Their dtype, torch's or numpy's; None for lists."""

    @classmethod
    def of(cls, value: Any) -> "Contents | None":
        """Return the contents of a tier `{point: {layers: array or list}}`; None if anything else
        is in it, or a layer has arrays of another kind than the others."""
        if not isinstance(value, Mapping):
            return None
        names: list[Any] = []
        arrays: list[Any] = []
        for point, entries in value.items():
            if not isinstance(entries, Mapping):
                return None
            # With their types: True is 1, too, and no layer.
            names += point, *entries, *map(type, entries)
            arrays += entries.values()
        one_of_each = dict(zip(map(type, arrays), arrays, strict=True)).values()
        if one_of_each and all(map(is_array, one_of_each)):
            return cls._of_arrays(names, arrays)
        if one_of_each and all(type(each) in (list, tuple) for each in one_of_each):
            return cls((*names, *map(len, arrays)), arrays, None)
        return None

    @classmethod
    def _of_arrays(cls, names: list[Any], arrays: list[Any]) -> "Contents | None":
        is_torch = isinstance(arrays[0], torch.Tensor)
        if not all(isinstance(array, torch.Tensor) == is_torch for array in arrays):
            return None
        said = list(map(_SAYS_OF_TENSOR if is_torch else _SAYS_OF_ARRAY, arrays))
        if len({each[:-1] for each in said}) > 1:
            return None
        dtype = said[0][0]
        if is_torch:
            _, device, layout, is_nested, _ = said[0]
            known = dtype in _TORCH and device.type == "cpu" and layout is torch.strided
            known = known and not is_nested
        else:
            known = dtype.kind == "f" and dtype.itemsize <= 8 and dtype.isnative
        return cls((*names, dtype, *(each[-1] for each in said)), arrays, dtype) if known else None

    def raw(self, order: Sequence[int]) -> bytes | None:
        """Return the bytes of all numbers, read once: of arrays in their dtype, of lists as
        MessagePack writes them, with their types. None for lists of what is no number.

        Args:
            order: the indices of the arrays, in the order wanted.
        """
        arrays = [self.arrays[i] for i in order]
        if self.dtype is None:
            try:
                return b"".join(map(msgspec.msgpack.encode, arrays))
            except (TypeError, OverflowError, RecursionError):
                return None
        if self.dtype == torch.bfloat16:  # numpy lacks it, and a view of each would take longer
            alike = len(set(self.names[-len(arrays) :])) == 1
            flat = torch.cat(arrays if alike else [array.reshape(-1) for array in arrays])
            return flat.detach().view(torch.int16).numpy().tobytes()
        try:
            if isinstance(self.dtype, torch.dtype):
                arrays = [array.numpy() for array in arrays]
            return b"".join(arrays)
        except (RuntimeError, TypeError):  # gradients are wanted, or numbers do not lie in a row
            return b"".join([_in_a_row(array).data for array in arrays])

    def numbers(self, raw: bytes, order: Sequence[int]) -> np.ndarray | None:
        """Return the numbers of `raw`, float32 [n], or float64 of what is wider; None for lists of
        more than floats."""
        if self.dtype is None:
            return _floats(raw, [len(self.arrays[i]) for i in order])
        if self.dtype == torch.bfloat16:
            return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        numbers = np.frombuffer(raw, _NUMPY.get(self.dtype, self.dtype))
        return numbers if numbers.itemsize > 4 else numbers.astype(np.float32, copy=False)


def _in_a_row(array: Array) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach().resolve_neg().numpy()
    return np.ascontiguousarray(array)


def _floats(raw: bytes, lengths: Sequence[int]) -> np.ndarray | None:
    """Numbers of lists that MessagePack wrote, float64."""
    parts, at = [], 0
    for length in lengths:
        at += 1 if length < 16 else 3 if length < 1 << 16 else 5
        marks = np.frombuffer(raw, np.uint8)[at : at + 9 * length : 9]
        if len(marks) != length or not (marks == _FLOAT).all():
            return None
        parts.append(np.ndarray((length,), ">f8", raw, at + 1, (9,)).astype("=f8"))
        at += 9 * length
    return np.concatenate(parts) if at == len(raw) else None
