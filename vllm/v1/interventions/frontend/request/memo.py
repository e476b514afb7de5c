# SPDX-License-Identifier: Apache-2.0
"""Frontend: vectors that come again are neither parsed nor hashed again, and what many requests
ask of `inline` alike is parsed once."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from vllm.v1.capture.registry import INLINE
from vllm.v1.interventions.frontend.request.contents import Contents
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.given import Select
from vllm.v1.interventions.plan import CapturePlan, Site, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.vectors import (
    AnyVectors,
    RowsOf,
    Vectors,
    packed_set,
    parse_vectors,
    vector_set_of,
)

KEPT = 256
"""The most contents that are kept, and the most plans: as many as requests of a large batch."""
KEPT_BYTES = 256 << 20
"""The most bytes of them; each is up to 7 times as large as it was given."""
EDGE = 16
"""Bytes of numbers at both ends by which contents are found."""


class _Layout(NamedTuple):
    """Sites of a tier whose names were parsed."""

    order: Sequence[int]
    """Indices of its arrays, by the order of their sites; as they are given if one of them is for
    several sites."""
    sites: list[Site]
    """The site of each array, so ordered; empty if one of them is for several."""
    widths: tuple[int, ...]
    """The length of each site's vector."""
    places: dict[Site, slice]
    """Site -> where its vector is among all numbers so ordered; the sites as they are given."""


class _Known(NamedTuple):
    raw: bytes
    vectors: AnyVectors
    vector_set: VectorSet

    @property
    def num_bytes(self) -> int:
        data, rows = self.vector_set.data, self.vectors
        size = rows.num_bytes if isinstance(rows, RowsOf) else sum(r.nbytes for r in rows.values())
        return size + len(data) + (len(self.raw) if self.raw is not data else 0)


class VectorMemo:
    """The contents that requests brought lately.

    What comes is compared with a copy: an array may be changed in place between two requests. It is
    found by what it says but the numbers, and by a few of these: of two that are alike so far, one
    is kept. The names of points and layers are parsed once, whatever the numbers.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, _Known] = {}
        """The oldest first."""
        self._layouts: dict[Any, _Layout] = {}
        """Names -> what they mean, the oldest first."""
        self._bytes = 0
        self._lock = Lock()
        """Held while contents are added; several threads parse."""

    def parse(
        self, value: Any, path: str, shape: TapShape, select: Select
    ) -> Iterator[tuple[AnyVectors, Positions | None, VectorSet | None]]:
        """Yield what `parse_vectors` returns, each with the set that the vectors make; None if the
        set is not known."""
        given = Contents.of(value)
        layout = None if given is None else self._layout(given, value, path, shape, select)
        raw = None if given is None or layout is None else given.raw(layout.order)
        if given is None or layout is None or raw is None:
            for vectors, positions in parse_vectors(value, path, shape, select):
                yield vectors, positions, None
            return
        key = *given.names, raw[:EDGE], raw[-EDGE:]
        known = self._kept.get(key)
        if known is None or known.raw != raw:
            known = _at_once(given, layout, raw)
            if known is None:
                [(vectors, _)] = parse_vectors(value, path, shape, select)
                with np.errstate(over="ignore"):  # the sum of all that acts is looked at
                    known = _Known(raw, vectors, vector_set_of(vectors))
            self._keep(key, known)
        yield known.vectors, None, known.vector_set

    def _layout(
        self, given: Contents, value: Any, path: str, shape: TapShape, select: Select
    ) -> _Layout | None:
        """The layout of a tier; of names that are new, its vectors are parsed, as they may be
        wrong."""
        layout = self._layouts.get(given.names)
        if layout is None:
            [(vectors, _)] = parse_vectors(value, path, shape, select)
            layout = _layout_of(given, vectors)
            with self._lock:
                self._layouts[given.names] = layout
                if len(self._layouts) > KEPT:
                    del self._layouts[next(iter(self._layouts))]
        return layout

    def _keep(self, key: Any, known: _Known) -> None:
        with self._lock:
            replaced = self._kept.pop(key, None)
            self._bytes += known.num_bytes - (replaced.num_bytes if replaced is not None else 0)
            self._kept[key] = known
            while len(self._kept) > KEPT or (self._bytes > KEPT_BYTES and len(self._kept) > 1):
                self._bytes -= self._kept.pop(next(iter(self._kept))).num_bytes


def _layout_of(given: Contents, vectors: Vectors) -> _Layout:
    sites, count = list(vectors), len(given.arrays)
    sizes = [len(a) if given.dtype is None else math.prod(a.shape) for a in given.arrays]
    # As many sites as arrays, each of which has one at least: then each has its own.
    if [len(vector) for vector in vectors.values()] != sizes:
        return _Layout(range(count), [], (), {})
    order = sorted(range(count), key=lambda i: site_order(sites[i]))
    stops = dict(zip(order, accumulate(sizes[i] for i in order), strict=True))
    places = {site: slice(stops[i] - sizes[i], stops[i]) for i, site in enumerate(sites)}
    return _Layout(order, [sites[i] for i in order], tuple(sizes[i] for i in order), places)


def _at_once(given: Contents, layout: _Layout, raw: bytes) -> _Known | None:
    """The vectors of a tier, made for all sites at once; None if they must be looked at one by one:
    an array is for several sites, or a number is not finite."""
    numbers = given.numbers(raw, layout.order) if layout.sites else None
    if numbers is None:
        return None
    with np.errstate(over="ignore"):
        rows = numbers.astype(np.float32, copy=False)
    largest = float(max(rows.max(), -rows.min()))
    if not math.isfinite(largest):
        return None
    data = raw if len(raw) == rows.nbytes else rows.tobytes()
    kept = np.frombuffer(data, np.float32) if numbers is rows else numbers
    vector_set = packed_set(layout.sites, layout.widths, data, largest)
    return _Known(raw, RowsOf(layout.places, kept), vector_set)


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
