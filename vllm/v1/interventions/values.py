# SPDX-License-Identifier: Apache-2.0
"""What people give as numbers, strings and lists, made Python's own: the one place for it.

What travels to the engine core is plain data, and a subclass of `str` cannot be encoded.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MOST_ENTRIES = 65_536
"""The most entries of a list or mapping over HTTP that is gone through before it is known what they
are: more than any model has layers, or than operations fit at its sites."""

_PLAIN = (int, float, str, bool, type(None))
_REAL = "biuf"
"""The kinds of numpy dtypes that are numbers or bools."""


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
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.ndim == 0 and value.dtype.kind in _REAL else value
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 and not value.is_meta else value
    try:
        return operator.index(value)
    except TypeError:
        return value


def plain_list(value: Any) -> Sequence[Any] | None:
    """Return a list, tuple, range, or one-dimensional array or tensor of integers as a sequence;
    None for other values. Its entries are still to be made plain."""
    if isinstance(value, list | tuple | range):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        value = value.detach().cpu().numpy() if not value.is_floating_point() else value
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        listed: list[int] = value.tolist()
        return listed
    return None
