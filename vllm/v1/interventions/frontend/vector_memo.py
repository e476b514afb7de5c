# SPDX-License-Identifier: Apache-2.0
"""Frontend: vectors that come again are neither parsed nor hashed again."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.interventions.plan import TapShape, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.vectors import Select, Vectors, parse_vectors, vector_set_of

KEPT = 4
"""Contents that are kept, each up to 5 times as large as it was given."""

Array = torch.Tensor | np.ndarray


class _Known(NamedTuple):
    names: list[Any]
    arrays: list[Array]
    vectors: Vectors
    vector_set: VectorSet


class VectorMemo:
    """The contents that requests brought lately.

    What comes is compared with a copy: an array may be changed in place between two requests.
    """

    def __init__(self) -> None:
        self._kept: deque[_Known] = deque(maxlen=KEPT)

    def parse(
        self, value: Any, path: str, shape: TapShape, select: Select
    ) -> Iterator[tuple[Vectors, Positions | None, VectorSet | None]]:
        """As `parse_vectors`; with the set that the vectors make, if it is known."""
        given = _arrays_in(value)
        if given is None:
            for vectors, positions in parse_vectors(value, path, shape, select):
                yield vectors, positions, None
            return
        names, arrays = given
        known = next((k for k in tuple(self._kept) if _is_same(k, names, arrays)), None)
        if known is None:
            copies = [a.clone() if isinstance(a, torch.Tensor) else a.copy() for a in arrays]
            [(vectors, _)] = parse_vectors(value, path, shape, select)
            with np.errstate(over="ignore"):  # the sum of all that acts is looked at
                known = _Known(names, copies, vectors, vector_set_of(vectors))
            self._kept.append(known)
        yield known.vectors, None, known.vector_set


def _arrays_in(value: Any) -> tuple[list[Any], list[Array]] | None:
    """All arrays of a tier, and what else says what they do; None if anything else is in it."""
    names: list[Any] = []
    arrays: list[Array] = []
    if not isinstance(value, Mapping):
        return None
    for point, entries in value.items():
        if not isinstance(entries, Mapping):
            return None
        for layer, array in entries.items():
            if isinstance(array, torch.Tensor):
                if array.device.type != "cpu" or array.layout != torch.strided:
                    return None
            elif not isinstance(array, np.ndarray):
                return None
            # With their types: True is 1, too, and no layer.
            names += point, type(layer), layer, array.dtype, array.shape
            arrays.append(array)
    return (names, arrays) if arrays else None


def _is_same(known: _Known, names: list[Any], arrays: list[Array]) -> bool:
    return known.names == names and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)  # type: ignore[arg-type]
        for a, b in zip(known.arrays, arrays, strict=True)
    )
