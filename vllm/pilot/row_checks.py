# SPDX-License-Identifier: Apache-2.0
"""Checks of rows before numbers are made of them, and of these numbers before they are given.

Neither this module nor its users know how large rows usually are: a threshold is a share of the
rows' own size.
"""

import numpy as np
import torch

from vllm.pilot.numbers import as_numbers

Rows = torch.Tensor | np.ndarray


def need_rows(rows: Rows, name: str, least: int = 2, first: int = 0) -> torch.Tensor:
    """Rows as float64 on the CPU.

    Args:
        rows: of any float dtype, with `least` axes or one more, that of layers.
        name: of the class, for errors.
        first: the number of the first of them, for errors.

    Raises:
        ValueError: another shape, there are none, or one is not finite; the message has its number.
    """
    made = as_numbers(rows, name)
    if made.ndim not in (least, least + 1):
        raise ValueError(f"{name}: shape {list(made.shape)}, wanted [n, hidden] or one axis more")
    if not len(made):
        raise ValueError(f"{name}: there are no examples of this class")
    return need_finite(made, name, first)


def need_finite(rows: torch.Tensor, name: str, first: int = 0) -> torch.Tensor:
    """Rows [n, ...] as they are.

    Raises:
        ValueError: one is not finite; the message has its number, and its layer if there are some.
    """
    finite = rows.isfinite()
    if not finite.all():
        row, *rest = (~finite).nonzero()[0].tolist()
        layer = f" at layer {rest[0]}" if rows.ndim == 3 else ""
        raise ValueError(f"{name}: row {first + row} is not finite{layer}")
    return rows


def need_width(positive: torch.Tensor, negative: torch.Tensor) -> None:
    """Raise ValueError where rows of two classes are not of the same layers and width."""
    if positive.shape[1:] != negative.shape[1:]:
        raise ValueError(
            f"rows of shape {list(positive.shape[1:])} and {list(negative.shape[1:])} are not of "
            "the same layers"
        )


def need_differ(same: torch.Tensor, said: str = "positive and negative do not differ") -> None:
    """Raise ValueError where bool [] or [layers] `same` says that no direction can be found."""
    if same.any():
        where = "" if same.ndim == 0 else f" at layers {same.nonzero().flatten().tolist()}"
        raise ValueError(f"{said}{where}")


def as_float32(found: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers [..., hidden] as float32.

    Raises:
        ValueError: the largest of a vector is not finite in float32, or has too few bits there.
    """
    largest, holds = found.abs().amax(-1), torch.finfo(torch.float32)
    if not ((largest >= holds.tiny) & (largest <= holds.max)).all():
        raise ValueError(
            f"{name}: float32 cannot hold it, its largest number is "
            f"{float(largest.max()):.3g}; scale the rows"
        )
    return found.float()
