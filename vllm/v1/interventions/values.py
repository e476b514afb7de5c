# SPDX-License-Identifier: Apache-2.0
"""Numbers, strings and lists that people give, made Python's own: the one place for it.

What travels to the engine core is plain data, and a subclass of `str` cannot be encoded.
"""

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

Array = np.ndarray | torch.Tensor

MOST_ENTRIES = 65_536
"""The most entries of a list or mapping over HTTP that is gone through before it is known what they
are: more than any model has layers, or than operations fit at its sites."""

_PLAIN = (int, float, str, bool, type(None))
_REAL = "biuf"
"""The kinds of numpy dtypes that are numbers or bools."""
_INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def is_array(value: Any) -> TypeGuard[Array]:
    """Tell whether a value is numpy's own array or torch's own tensor, dense.

    Whatever else passes for one may say more of its values than they do: which are masked, what
    unit they have.
    """
    if isinstance(value, torch.Tensor):
        dense = is_plain(value) and value.layout == torch.strided
        return dense and not value.is_meta and not value.is_nested
    return type(value) in (np.ndarray, np.memmap)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether torch computes with a tensor as with any other: its class is torch's own, or one
    like `torch.nn.Parameter` and captured rows, of which every result is a plain tensor."""
    own = torch._C._disabled_torch_function_impl
    return type(tensor) is torch.Tensor or type(tensor).__torch_function__ is own


def plain(value: Any) -> Any:
    """Return a number or string as Python's own; other values as they are.

    Args:
        value: whatever has `__index__` becomes an int, numpy's numbers and arrays and tensors
            without dimensions an int, float or bool, subclasses of str a str.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum the value and not its name
    if isinstance(value, float):
        return float(value)
    if isinstance(value, np.generic) or is_array(value):
        is_real = isinstance(value, torch.Tensor) or value.dtype.kind in _REAL
        item = value.item() if value.ndim == 0 and is_real else value
        return float(item) if isinstance(item, np.longdouble) else item
    if isinstance(value, Array):
        return value
    try:
        return operator.index(value)
    except Exception:  # of whatever the user has made
        return value


def says(value: Any, word: str) -> bool:
    """True if a value is a text, and this one; an array is compared number by number."""
    return isinstance(text := plain(value), str) and text == word


def plain_list(value: Any) -> Sequence[Any] | None:
    """Return a list, tuple, range, or one-dimensional array or tensor of integers as a sequence;
    None for other values. Its entries are still to be made plain."""
    if isinstance(value, list | tuple | range):
        return value
    if not is_array(value) or value.ndim != 1:
        return None
    if isinstance(value, torch.Tensor):
        is_listed = value.dtype in _INTEGERS
    else:
        is_listed = value.dtype.kind in "iu"
    return value.tolist() if is_listed else None
