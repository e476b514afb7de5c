# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion, gathered as they come: what `inline` returns."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.capture.results import CapturedRows, CaptureResult
from vllm.v1.capture.selected import RowsLost, Selected
from vllm.v1.interventions import CapturedChunk, CapturePlan, dtype_of


class Rows(NamedTuple):
    """Rows of all sites, in position order."""

    positions: np.ndarray
    """int64 [n]."""
    versions: np.ndarray
    """int64 [n], of the global steering."""
    values: list[torch.Tensor]
    """Of each relayed stream: [sites, n, width]."""


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
        self._arrived: list[np.ndarray] = []
        self._delivered = 0

    def add(self, chunks: list[CapturedChunk] | None) -> None:
        for chunk in chunks or ():
            self._rows.append(chunk)
            self._arrived.append(chunk.positions)

    def results(
        self, output_token_ids: Sequence[int], *, finished: bool, aborted: bool, only_new: bool
    ) -> dict[str, CaptureResult]:
        """The results so far.

        Args:
            output_token_ids: the generated tokens so far.
            finished: whether these are all there will be.
            aborted: whether the request was cut off, so that rows may be missing.
            only_new: leave out rows that an earlier call returned (streaming of deltas).
        """
        token_ids = np.array([*self._prompt_token_ids, *output_token_ids], dtype=np.int64)
        merged = self._rows.view()
        results = {
            name: self._result(selected, merged, token_ids, finished, aborted, only_new)
            for name, selected in self._selected.items()
        }
        if only_new:
            self._delivered = len(token_ids) - 1
            # The last row may be wanted once more: as the last generated one, when none follows.
            rest = merged.positions >= self._delivered - 1
            self._rows.keep(rest)
        return results

    def _result(
        self,
        selected: Selected,
        merged: Rows,
        token_ids: np.ndarray,
        finished: bool,
        aborted: bool,
        only_new: bool,
    ) -> CaptureResult:
        selection = selected.selection
        num_rows = selected.rows_of(len(token_ids))
        since = self._delivered if only_new else 0
        keep = selected.known(num_rows).mask(merged.positions) & (merged.positions >= since)
        if finished:
            keep |= selected.last(num_rows).mask(merged.positions)  # so never delivered before
        kept = merged.positions[keep]
        # `kept` and what is indexed are copies: the buffer may go on growing.
        ids, index = token_ids[kept], torch.from_numpy(np.flatnonzero(keep))
        values, order = merged.values[selection.stream], self._plan.streams[selection.stream].sites
        payload = {
            site: CapturedRows(kept, ids, values[order.index(site)][index], merged.versions[keep])
            for site in selection.sites
        }
        if not finished:
            return CaptureResult(status="ok", error=None, payload=payload)
        try:
            error = selected.missing(num_rows, self._arrived, aborted)
        except RowsLost as lost:
            return CaptureResult(status="error", error=str(lost), payload=payload)
        return CaptureResult("ok" if error is None else "partial_error", error, payload)


class RowBuffer:
    """Rows of one request in memory of its own, which doubles as they come.

    Chunks may be views of a whole step's rows, so they are copied on arrival.
    """

    def __init__(self, plan: CapturePlan) -> None:
        empty = np.zeros(0, np.int64)
        values = [
            torch.empty(len(s.sites) if s.relayed else 0, 0, s.width, dtype=dtype_of(s.dtype))
            for s in plan.streams
        ]
        self._rows = Rows(empty, empty, values)
        self._count = 0

    def append(self, chunk: CapturedChunk) -> None:
        stop = self._count + len(chunk.positions)
        if stop > len(self._rows.positions):
            self._grow(max(stop, 2 * len(self._rows.positions)))
        new = slice(self._count, stop)
        self._rows.positions[new] = chunk.positions
        self._rows.versions[new] = chunk.version
        for mine, theirs in zip(self._rows.values, chunk.values, strict=True):
            mine[:, new].copy_(theirs)
        self._count = stop

    def _grow(self, capacity: int) -> None:
        old = self.view()
        self._rows = Rows(
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            [v.new_empty(v.shape[0], capacity, v.shape[2]) for v in old.values],
        )
        for mine, theirs in zip(self._rows[:2], old[:2], strict=True):
            mine[: self._count] = theirs
        for values, before in zip(self._rows.values, old.values, strict=True):
            values[:, : self._count].copy_(before)

    def view(self) -> Rows:
        """All rows. Valid until the next change."""
        positions, versions, values = self._rows
        stop = self._count
        return Rows(positions[:stop], versions[:stop], [v[:, :stop] for v in values])

    def keep(self, mask: np.ndarray) -> None:
        """Forget the rows where bool [n] `mask` is False."""
        positions, versions, values = self.view()
        kept = torch.from_numpy(mask)
        self._rows = Rows(positions[mask], versions[mask], [v[:, kept] for v in values])
        self._count = len(self._rows.positions)
