# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion, gathered as they come: what `inline` returns."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.capture.results import CapturedRows, CaptureResult
from vllm.v1.capture.transport.copies import Copies, empty
from vllm.v1.capture.transport.selected import RowsLost, Selected
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, dtype_of
from vllm.v1.interventions.positions import Positions


class Rows(NamedTuple):
    """Rows of all sites, in position order."""

    positions: np.ndarray
    """int64 [n]."""
    versions: np.ndarray
    """int64 [n], version of the global steering."""
    values: list[torch.Tensor]
    """One tensor per stream: [n, sites, width]; no sites in one that is not relayed."""


class RowCollector:
    """The rows of one completion.

    Chunks arrive in position order, each position once (the scheduler sees to that). What is past
    the final length (stop strings are found here, after the engine sampled on) is trimmed here.
    """

    def __init__(
        self, plan: CapturePlan, prompt_token_ids: list[int], consumers: Iterable[str]
    ) -> None:
        self._plan = plan
        self._prompt_token_ids = prompt_token_ids
        self._selected = {
            name: Selected(plan.consumers[name], len(prompt_token_ids)) for name in consumers
        }
        self._rows = RowBuffer(plan)
        self.row_bytes = sum(len(s.sites) * s.row_bytes for s in plan.streams if s.relayed)
        """Bytes of a row at all sites."""
        self._new: list[CapturedChunk] = []
        self._delivered = 0

    def add(self, chunks: list[CapturedChunk]) -> None:
        """Take rows; they may be views of all rows of a step, see `pop_new`."""
        self._new += chunks

    def pop_new(self) -> list[CapturedChunk]:
        """Hand out rows that were added and not copied.

        The caller copies them (`place`), in this order, and ends that before the next call of
        anything else. Until then they keep the memory of their steps, with the rows of all
        requests.
        """
        new, self._new = self._new, []
        return new

    def place(self, chunks: list[CapturedChunk]) -> Copies:
        """Give rows a place in memory of this completion's own; from any thread.

        Returns:
            The copies to make.
        """
        return self._rows.place(chunks)

    def results(
        self,
        output_token_ids: Sequence[int],
        *,
        finished: bool,
        aborted: bool,
        only_new: bool,
        settle: Callable[[], None],
    ) -> dict[str, CaptureResult]:
        """The results so far. Where they are views, rows may still be on their way into them.

        Args:
            output_token_ids: the generated tokens so far.
            finished: whether these are all there will be.
            aborted: whether the request was cut off, so that rows may be missing.
            only_new: leave out rows that an earlier call returned (streaming of deltas).
            settle: returns when all rows that were placed are copied.
        """
        token_ids = [*self._prompt_token_ids, *output_token_ids]
        if only_new:
            settle()
        merged = self._rows.view()
        results = {
            name: self._result(selected, merged, token_ids, finished, aborted, only_new, settle)
            for name, selected in self._selected.items()
        }
        if only_new:
            self._delivered = len(token_ids) - 1
            # The last row may be wanted once more: as the last generated one, when none follows.
            self._rows.forget(self._delivered - 1)
        return results

    def _result(
        self,
        selected: Selected,
        merged: Rows,
        token_ids: list[int],
        finished: bool,
        aborted: bool,
        only_new: bool,
        settle: Callable[[], None],
    ) -> CaptureResult:
        selection = selected.selection
        num_rows = selected.num_rows(len(token_ids))
        keep = selected.mask(merged.positions, num_rows)
        if only_new:
            keep &= merged.positions >= self._delivered
        if finished and selection.last_generated:
            keep |= selected.last(num_rows).mask(merged.positions)  # so never delivered before
        at = np.flatnonzero(keep)
        kept, versions = merged.positions[at], merged.versions[at]
        ids = np.array([token_ids[position] for position in kept.tolist()], dtype=np.int64)
        values = merged.values[selection.stream]
        first, last = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
        if only_new or last - first > len(at):
            settle()
            values = values[torch.from_numpy(at)]
        else:
            values = values[first:last]  # neighbours, which stay where they are
        of_sites = values.unbind(1)
        sites = self._plan.streams[selection.stream].sites
        payload = {
            site: CapturedRows(kept, ids, values, versions)
            for site, values in zip(sites, of_sites, strict=True)
        }
        if sites != selection.sites:
            payload = {site: payload[site] for site in selection.sites}
        if not finished:
            return CaptureResult(status="ok", error=None, payload=payload)
        try:
            error = selected.missing(num_rows, [self._rows.arrived], aborted)
        except RowsLost as lost:
            return CaptureResult(status="error", error=str(lost), payload=payload)
        return CaptureResult("ok" if error is None else "partial_error", error, payload)


class RowBuffer:
    """Rows of one completion in memory of its own.

    That is reserved whole, for the most rows that can come (the plan says so, and
    `capture_inline_max_bytes` bounds it): so a row is written once. The kernel gives memory to it
    page by page, as rows are written.
    """

    def __init__(self, plan: CapturePlan) -> None:
        runs = [n for s in plan.streams if s.relayed for n in s.runs]
        self._capacity = len(Positions.from_flat(runs))
        self._streams = plan.streams
        self._rows = self._reserve(0)
        self._count = 0
        self._first = 0

    def _reserve(self, capacity: int) -> Rows:
        values = []
        for stream in self._streams:
            shape = (capacity, len(stream.sites) if stream.relayed else 0, stream.width)
            values.append(empty(shape, dtype_of(stream.dtype)))
        return Rows(np.empty(capacity, np.int64), np.empty(capacity, np.int64), values)

    def place(self, chunks: list[CapturedChunk]) -> Copies:
        """Add rows whose values are still to be copied; returns the copies to make."""
        into: list[torch.Tensor] = []
        if not chunks:
            return into, []
        if not self._count:
            self._rows = self._reserve(self._capacity)
        start = self._count
        counts = [len(chunk.positions) for chunk in chunks]
        stop = start + sum(counts)
        np.concatenate([c.positions for c in chunks], out=self._rows.positions[start:stop])
        for values in self._rows.values:
            into += values[start - self._first : stop - self._first].split(counts)
        versions = np.array([chunk.version for chunk in chunks])
        self._rows.versions[start:stop] = versions.repeat(counts)
        self._count = stop
        return into, [c.values[i] for i in range(len(self._rows.values)) for c in chunks]

    @property
    def arrived(self) -> np.ndarray:
        """The positions of all rows there ever were, int64."""
        return self._rows.positions[: self._count]

    def view(self) -> Rows:
        """All rows. They stay as they are until `forget`."""
        rows = slice(self._first, self._count)
        values = [v[: self._count - self._first] for v in self._rows.values]
        return Rows(self._rows.positions[rows], self._rows.versions[rows], values)

    def forget(self, position: int) -> None:
        """Drop the values of rows before a position; their memory is used again."""
        first = int(np.searchsorted(self.arrived, position))
        for values in self._rows.values:
            rest = values[first - self._first : self._count - self._first]
            values[: len(rest)] = rest.clone()
        self._first = first
