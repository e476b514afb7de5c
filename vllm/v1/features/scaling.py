# SPDX-License-Identifier: Apache-2.0
"""Scales of rows before an encoder reads them, by the names that SAELens has for those that depend
on the row (`normalize_activations`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch

_EPSILON = 1e-5
"""Number that `layer_norm` adds to the standard deviation before it divides by it."""


class Scaled(NamedTuple):
    """Rows as an encoder reads them: what is decoded, times `size` and plus `centre`, is in the
    units of the rows that were given."""

    rows: torch.Tensor
    """[..., hidden]."""
    size: torch.Tensor | float = 1.0
    """float32 [..., 1]."""
    centre: torch.Tensor | float = 0.0
    """float32 [..., 1]."""


def _layer_norm(rows: torch.Tensor) -> Scaled:
    """The row less its mean, divided by its standard deviation (of hidden - 1) plus 1e-5."""
    centre = rows.mean(-1, keepdim=True)
    size = rows.std(-1, keepdim=True)
    return Scaled((rows - centre) / (size + _EPSILON), size, centre)


def _constant_norm(rows: torch.Tensor) -> Scaled:
    """The row with norm sqrt(hidden)."""
    size = rows.norm(dim=-1, keepdim=True) / rows.shape[-1] ** 0.5
    return Scaled(rows / size, size)


SCALINGS: dict[str, Callable[[torch.Tensor], Scaled]] = {
    "layer_norm": _layer_norm,
    "constant_norm_rescale": _constant_norm,
}
"""Name -> scaling of float32 rows [..., hidden]."""
