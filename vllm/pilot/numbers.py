# SPDX-License-Identifier: Apache-2.0
"""Rows, vectors and scores as people have them, made tensors: the toolkit's one place for it."""

from typing import Any

import numpy as np
import torch


def as_numbers(given: Any, name: str) -> torch.Tensor:
    """Return an array, a tensor or a list of numbers as a float64 tensor on the CPU.

    Args:
        name: what errors call it.

    Raises:
        ValueError: it is masked, which a tensor cannot be, or has no real numbers.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(f"{name}: is a {type(given).__name__}; fill in what is masked")
    try:
        made = torch.as_tensor(given).detach()
        if not made.is_complex():
            return made.cpu().to_dense().double()
    except (TypeError, ValueError, RuntimeError):
        pass
    kind = given.dtype if isinstance(given, np.ndarray | torch.Tensor) else type(given).__name__
    raise ValueError(f"{name}: must be of real numbers, got {kind}")
