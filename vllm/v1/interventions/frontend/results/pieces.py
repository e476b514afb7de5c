# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion where they came to lie, in pieces that are joined when they are read."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.capture.copies import (
    CopyThreads,
    copies_of,
    empty,
    fill,
    finished,
    integers,
    joined,
    steps_into,
)
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.messages import CapturedChunk

SHARED_BYTES = 1 << 20
"""The size from which the rows of a site are not copied when they are read."""


class Steps(NamedTuple):
    """The steps of a run, in arrays that all requests of the run share."""

    positions: np.ndarray
    """int64 [steps, rows]."""
    versions: np.ndarray
    """int64 [steps], of the global steering."""
    values: list[list[list[np.ndarray]]]
    """The values of each step: of each stream `CapturedChunk.parts`, as `integers` gives them."""


class Run:
    """Rows of the same requests in successive steps.

    Args:
        owners: (request id, number of rows in each step).
    """

    def __init__(self, owners: list[tuple[str, int]]) -> None:
        stops = accumulate(count for _, count in owners)
        self.rows = {n: slice(b - c, b) for (n, c), b in zip(owners, stops, strict=True)}
        """The rows of each request in a step's."""
        self.places = {name: i for i, (name, _) in enumerate(owners)}
        """The place of each request among the owners, which is that of its sums."""
        self.chunks: list[CapturedChunk] = []
        self.last_ordinary = -1
        """The last step whose rows did not land; they lie in ordinary memory."""
        self.made = Steps(np.empty((0, 0)), np.empty(0), [])
        """Steps that `steps` put together."""

    def steps(self) -> Steps:
        """All steps, which are put together once for all requests, as long as none comes."""
        values = self.made.values
        if new := self.chunks[len(values) :]:
            values = values + [_in_integers(chunk) for chunk in new]
            self.made = Steps(
                np.stack([chunk.positions for chunk in self.chunks]),
                np.array([chunk.version for chunk in self.chunks], dtype=np.int64),
                values,
            )
        return self.made


def _in_integers(chunk: CapturedChunk) -> list[list[np.ndarray]]:
    """Return the values of a step, as in `Steps`."""
    return [list(map(integers, chunk.parts(i))) for i in range(chunk.num_streams)]


class Piece(NamedTuple):
    """Rows of one completion: some of each of several steps, all of the same number."""

    positions: np.ndarray
    """int64 [n]."""
    versions: np.ndarray
    """int64 [n], of the global steering."""
    steps: list[list[list[np.ndarray]]]
    """The values of each step, as in `Steps`: of many steps numpy makes views faster than
    torch."""
    rows: slice
    """Slice of the rows of each step that are of this completion."""
    copies: Sequence[Future[None]] = ()
    """The copies that fill the values."""

    @classmethod
    def of(cls, steps: Steps, rows: slice, first: int) -> "Piece":
        """One request's rows of a run's steps, from step `first` on."""
        positions, versions, values = steps
        return cls(
            positions[first:, rows].ravel(),
            versions[first:].repeat(rows.stop - rows.start),
            values[first:],
            rows,
        )

    def parts(self, stream: int) -> list[list[np.ndarray]]:
        """The values of a stream: [rows, its sites, width] of each sender, of each step."""
        finished(self.copies)
        return [[v[self.rows] for v in values[stream]] for values in self.steps]


class StreamRows:
    """Rows of one stream of a completion, which are put together when they are first read.

    Args:
        dtype: of the rows.
        at: indices of the rows that are wanted, int64 [n], sorted.
        threads: copy rows of several steps, where they are many.
        memory: what they are copied to.
    """

    def __init__(
        self,
        pieces: list[Piece],
        stream: int,
        dtype: torch.dtype,
        at: np.ndarray,
        threads: CopyThreads,
        memory: KeptMemory,
    ) -> None:
        self._pieces, self._stream = pieces, stream
        self._dtype, self._at, self._threads, self._memory = dtype, at, threads, memory
        self._values: list[torch.Tensor] | None = None
        """The rows, [n, its sites, width] of each sender, where sites share memory."""
        self._alone: list[torch.Tensor] = []
        """The rows of each site, [n, width], where each site has memory of its own."""
        self._is_owned = False
        """True if the pieces are in memory of their own, and all their rows are wanted."""

    def site(self, index: int) -> torch.Tensor:
        """The rows of a site, [n, width]; from any thread. From `SHARED_BYTES` on they may be a
        view of memory that others share; fewer, and those of several steps as long as memory is
        kept, are alone in theirs."""
        pieces, values = self._pieces, self._values
        if values is None:
            values = self._values = self._read(pieces)
            self._pieces = []
        if self._alone:
            return self._alone[index]
        for part in values:
            if index < part.shape[1]:
                break
            index -= part.shape[1]
        rows = part[:, index]
        return rows if rows.nbytes >= SHARED_BYTES else joined([rows])

    def joined(self, later: "StreamRows") -> "StreamRows":
        """Return these rows and then `later`'s, in memory of their own; nobody has read either."""
        pieces = [*self._owned(), *later._owned()]
        at = np.arange(len(self._at) + len(later._at))
        both = StreamRows(pieces, 0, self._dtype, at, self._threads, self._memory)
        both._is_owned = True
        return both

    def _owned(self) -> list[Piece]:
        """Return the pieces with the rows that are wanted, in memory of their own."""
        if self._is_owned:
            return self._pieces
        steps = list(self._wanted_steps())
        shape = len(self._at), sum(part.shape[1] for part in steps[0]), steps[0][0].shape[2]
        values = integers(self._memory.of_rows(shape, self._dtype))
        copies = self._threads.follow(copies_of(steps_into([values], steps)))
        return [Piece(self._at, self._at, [[[values]]], slice(None), copies)]

    def _wanted_steps(self) -> Iterator[list[np.ndarray]]:
        """Yield the rows that are wanted of each step, as `Piece.parts` gives them."""
        first = 0
        for piece in self._pieces:
            for parts in piece.parts(self._stream):
                stop = first + len(parts[0])
                wanted = self._at[slice(*np.searchsorted(self._at, [first, stop]))] - first
                yield parts if len(wanted) == len(parts[0]) else [part[wanted] for part in parts]
                first = stop

    def _read(self, pieces: list[Piece]) -> list[torch.Tensor]:
        """Return the rows as `_values` has them, or fill `_alone` and return an empty list. Rows of
        a single step stay where they are; rows of several steps are copied once."""
        steps = [p for piece in pieces for p in piece.parts(self._stream)]
        if len(steps) == 1:
            return [self._cut(torch.from_numpy(part).view(self._dtype)) for part in steps[0]]
        num_rows, width = sum(len(step[0]) for step in steps), steps[0][0].shape[2]
        num_sites = sum(part.shape[1] for part in steps[0])
        taken = self._memory.of_sites(num_sites, (num_rows, width), self._dtype)
        places = [sites.together.transpose(0, 1) for sites in taken]
        shared = [] if taken else [empty((num_rows, num_sites, width), self._dtype)]
        fill(steps_into([*map(integers, places or shared)], steps), self._threads)
        self._alone = [self._cut(site) for sites in taken for site in sites.each]
        return [self._cut(rows) for rows in shared]

    def _cut(self, values: torch.Tensor) -> torch.Tensor:
        first, last = (int(self._at[0]), int(self._at[-1]) + 1) if len(self._at) else (0, 0)
        if last - first > len(self._at):
            return values[torch.from_numpy(self._at)]
        return values[first:last]  # neighbours, which stay where they are
