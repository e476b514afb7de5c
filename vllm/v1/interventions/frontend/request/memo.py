# SPDX-License-Identifier: Apache-2.0
"""Frontend: vectors that come again are neither parsed nor hashed again, and what many requests
ask of `inline` alike is parsed once."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.capture.registry import INLINE
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.given import Select
from vllm.v1.interventions.plan import CapturePlan, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import Array, is_array
from vllm.v1.interventions.vectors import Vectors, parse_vectors, vector_set_of

KEPT = 256
"""The most contents that are kept, and the most plans: as many as requests of a large batch."""
KEPT_BYTES = 256 << 20
"""The most bytes of them; each is up to 5 times as large as it was given."""

_COMPARED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of tensors that are kept; torch cannot compare all others."""


class _Known(NamedTuple):
    arrays: list[Array]
    vectors: Vectors
    vector_set: VectorSet

    @property
    def num_bytes(self) -> int:
        arrays = [*self.arrays, *self.vectors.values()]
        return len(self.vector_set.data) + sum(array.nbytes for array in arrays)


class VectorMemo:
    """The contents that requests brought lately.

    What comes is compared with a copy: an array may be changed in place between two requests. It is
    found by what it says but the numbers, and by a few of these: of two that are alike so far, one
    is kept.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, _Known] = {}
        """The oldest first."""
        self._bytes = 0
        self._lock = Lock()
        """Held while contents are added; several threads parse."""

    def parse(
        self, value: Any, path: str, shape: TapShape, select: Select
    ) -> Iterator[tuple[Vectors, Positions | None, VectorSet | None]]:
        """Yield what `parse_vectors` returns, each with the set that the vectors make; None if the
        set is not known."""
        given = _arrays_in(value)
        if given is None:
            for vectors, positions in parse_vectors(value, path, shape, select):
                yield vectors, positions, None
            return
        names, arrays = given
        numbers = (array.reshape(-1)[:4].tolist() for array in (arrays[0], arrays[-1]))
        key = *names, *map(tuple, numbers)
        known = self._kept.get(key)
        if known is None or not _are_equal(known.arrays, arrays):
            copies = [a.clone() if isinstance(a, torch.Tensor) else a.copy() for a in arrays]
            [(vectors, _)] = parse_vectors(value, path, shape, select)
            with np.errstate(over="ignore"):  # the sum of all that acts is looked at
                known = _Known(copies, vectors, vector_set_of(vectors))
            self._keep(key, known)
        yield known.vectors, None, known.vector_set

    def _keep(self, key: Any, known: _Known) -> None:
        with self._lock:
            replaced = self._kept.pop(key, None)
            self._bytes += known.num_bytes - (replaced.num_bytes if replaced is not None else 0)
            self._kept[key] = known
            while len(self._kept) > KEPT or (self._bytes > KEPT_BYTES and len(self._kept) > 1):
                self._bytes -= self._kept.pop(next(iter(self._kept))).num_bytes


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
            if not is_array(array):
                return None
            if isinstance(array, torch.Tensor):
                if array.device.type != "cpu" or array.dtype not in _COMPARED:
                    return None
            elif array.dtype.kind != "f":
                return None
            # With their types: True is 1, too, and no layer.
            names += point, type(layer), layer, array.dtype, array.shape
            arrays.append(array)
    return (names, arrays) if arrays else None


def _are_equal(known: list[Array], arrays: list[Array]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)  # type: ignore[arg-type]
        for a, b in zip(known, arrays, strict=True)
    )


LONGEST = 1024
"""The most entries that a capture which is kept may have: three for a point, and its layers."""


class CaptureMemo:
    """The plans of captures that came lately.

    A plan depends on what the capture says and on how long the prompt and the answer may be. Only
    captures are kept that say nothing but points, layers and one name of positions: what texts,
    matrices and consumers' own fields mean is not seen from the capture alone.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, CapturePlan] = {}
        """The oldest first."""
        self._lock = Lock()
        """Held while a plan is added; several threads parse."""

    def plan(
        self, value: Any, prompt: Prompt, make: Callable[[], CapturePlan | None]
    ) -> CapturePlan | None:
        """The plan of a capture; of one that is known, without parsing it.

        Args:
            value: as `SamplingParams.capture`.
            make: parses and checks it; what it raises is raised.
        """
        said = _said(value)
        if said is None or prompt.media.items:
            return make()
        key = (*said, len(prompt.token_ids), prompt.max_tokens, prompt.work.completions)
        plan = self._kept.get(key)
        if plan is None and (plan := make()) is not None:
            with self._lock:
                self._kept[key] = plan
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
        return plan


def _said(value: Any) -> list[Hashable] | None:
    """All that a capture says; None if that is more than points, layers and a name."""
    if not isinstance(value, dict) or value.keys() != {INLINE}:
        return None
    asked = value[INLINE]
    if type(asked) is not dict or asked.keys() - {"hooks", "positions"}:
        return None
    hooks, positions = asked.get("hooks"), asked.get("positions", "last_prompt")
    if type(hooks) is not dict or type(positions) is not str:
        return None
    said: list[Hashable] = [positions]
    for point, layers in hooks.items():
        is_list = type(layers) is list
        listed = layers if is_list else [layers]
        if len(said) + len(listed) > LONGEST:
            return None
        # Of these types only: True is 1, too, and no layer.
        if not {type(point), *map(type, listed)} <= {str, int}:
            return None
        said += point, is_list, len(listed), *listed
    return said
