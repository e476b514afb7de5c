# SPDX-License-Identifier: Apache-2.0
"""Sets of token positions as sorted, disjoint runs."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

Run = tuple[int, int]
"""Neighbouring positions: start, and stop (exclusive)."""


class Positions:
    """An immutable set of positions >= 0.

    Runs rather than single numbers, because "all generated" of a long request is one run and
    the set is sent with every request.
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        # In lists, because single look-ups happen per request and step: bisect is several times
        # faster there, and so are sets of few runs, the common case.
        self._start_list: list[int] = []
        self._stop_list: list[int] = []
        for start, stop in sorted((int(a), int(b)) for a, b in runs if a < b):
            if self._stop_list and start <= self._stop_list[-1]:
                self._stop_list[-1] = max(self._stop_list[-1], stop)
            else:
                self._start_list.append(start)
                self._stop_list.append(stop)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and stops of the runs, int64."""
        return np.array(self._start_list, np.int64), np.array(self._stop_list, np.int64)

    @classmethod
    def of(cls, positions: Iterable[int]) -> "Positions":
        """The set of single positions, in any order."""
        return cls((p, p + 1) for p in positions)

    @classmethod
    def from_flat(cls, flat: Sequence[int]) -> "Positions":
        """The set whose `flat` this is: start, stop, start, stop, ..."""
        return cls(zip(flat[::2], flat[1::2], strict=True))

    def flat(self) -> list[int]:
        """The runs as one list, for sending: start, stop, start, stop, ..."""
        return [n for run in self.runs() for n in run]

    def runs(self) -> list[Run]:
        """The runs, sorted and disjoint."""
        return list(zip(self._start_list, self._stop_list, strict=True))

    def __or__(self, other: "Positions") -> "Positions":
        if not (self._stop_list and other._stop_list):
            return self if self._stop_list else other
        return Positions(self.runs() + other.runs())

    def __and__(self, other: "Positions") -> "Positions":
        return self - (self - other)

    def __sub__(self, other: "Positions") -> "Positions":
        if not other._stop_list:
            return self
        edges = sorted({*self.flat(), *other.flat()})
        at = np.array(edges, np.int64)
        kept = (self.mask(at) & ~other.mask(at)).tolist()  # what holds at an edge holds to the next
        runs = zip(edges[:-1], edges[1:], kept[:-1], strict=True)
        return Positions((start, stop) for start, stop, on in runs if on)

    def __len__(self) -> int:
        return sum(self._stop_list) - sum(self._start_list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self.runs() == other.runs()

    def __hash__(self) -> int:
        return hash(tuple(self.runs()))

    def __repr__(self) -> str:
        return f"Positions({self.runs()})"

    @property
    def stop(self) -> int:
        """One past the last position; 0 for the empty set."""
        return self._stop_list[-1] if self._stop_list else 0

    def mask(self, positions: np.ndarray) -> np.ndarray:
        """Return which of int [n] `positions` are in the set: bool [n]."""
        if len(self._stop_list) <= 1:
            start, stop = self.runs()[0] if self._stop_list else (0, 0)
            return (positions >= start) & (positions < stop)
        starts, stops = self._arrays
        run = np.searchsorted(starts, positions, side="right") - 1
        return (run >= 0) & (positions < stops[np.maximum(run, 0)])

    def first_from(self, position: int) -> int | None:
        """The lowest member >= position; None if there is none."""
        run = bisect_right(self._stop_list, position)
        if run == len(self._stop_list):
            return None
        return max(position, self._start_list[run])

    def __contains__(self, position: int) -> bool:
        starts, stops = self._start_list, self._stop_list
        if len(stops) == 1:
            return starts[0] <= position < stops[0]
        run = bisect_right(stops, position)
        return run < len(stops) and starts[run] <= position

    def below(self, stop: int) -> "Positions":
        """The members < stop."""
        if self.stop <= stop:
            return self
        return Positions((a, min(b, stop)) for a, b in self.runs())

    def array(self) -> np.ndarray:
        """The members, ascending: int64 [len(self)]."""
        parts = [np.arange(a, b, dtype=np.int64) for a, b in self.runs()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def between(self, first: int, stop: int) -> np.ndarray:
        """The members >= first and < stop, int64. Its cost grows with stop - first."""
        if len(self._stop_list) == 1:
            first, stop = max(first, self._start_list[0]), min(stop, self._stop_list[0])
            return np.arange(first, stop, dtype=np.int64)
        piece = np.arange(first, stop, dtype=np.int64)
        return piece[self.mask(piece)]


END = 1 << 40
"""A number past every position."""


ALL = Positions([(0, END)])
"""Every position."""


def in_a_row(parts: list[np.ndarray]) -> np.ndarray:
    """The int64 [n] of all parts; what is one part already is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
