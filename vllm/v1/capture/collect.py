# SPDX-License-Identifier: Apache-2.0
"""Frontend side of inline capture: rows arrive step by step, results leave with the outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.results import CapturedRows, CaptureResult, CaptureStatus
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.interventions import CapturedChunk, CapturePlan, Selection, dtype_of
from vllm.v1.positions import Positions

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


def collector_of(request: EngineCoreRequest) -> "RowCollector | None":
    """The collector of a request that captures."""
    if request.plan is None or request.plan.capture is None:
        return None
    assert request.prompt_token_ids is not None
    return RowCollector(request.plan.capture, request.prompt_token_ids)


def results_of(
    state: "RequestState", finish_reason: FinishReason | None
) -> dict[str, CaptureResult] | None:
    """The capture results of the completion output that is being made."""
    if state.rows is None:
        return None
    assert state.detokenizer is not None
    return state.rows.results(
        state.detokenizer.output_token_ids,
        finished=finish_reason is not None,
        aborted=finish_reason in (FinishReason.ABORT, FinishReason.ERROR),
        only_new=state.output_kind == RequestOutputKind.DELTA,
    )


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

    def __init__(self, plan: CapturePlan, prompt_token_ids: list[int]) -> None:
        self._plan = plan
        self._prompt_token_ids = prompt_token_ids
        self._prompt = len(prompt_token_ids)
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
            name: self._result(selection, merged, token_ids, finished, aborted, only_new)
            for name, selection in self._plan.consumers.items()
        }
        if only_new:
            self._delivered = len(token_ids) - 1
            # The last row may be wanted once more: as the last generated one, when none follows.
            rest = merged.positions >= self._delivered - 1
            self._rows.keep(rest)
        return results

    def _result(
        self,
        selection: Selection,
        merged: Rows,
        token_ids: np.ndarray,
        finished: bool,
        aborted: bool,
        only_new: bool,
    ) -> CaptureResult:
        # The prompt's rows are owed even when the request ends before its first token.
        num_rows = max(len(token_ids) - 1, self._prompt)
        known = self._known(selection, num_rows)
        generated = selection.last_generated and finished and num_rows > self._prompt
        last = Positions.of([num_rows - 1] if generated and num_rows - 1 not in known else [])
        since = self._delivered if only_new else 0
        keep = known.mask(merged.positions) & (merged.positions >= since)
        keep |= last.mask(merged.positions)  # not known before the end, so never delivered
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
        status, error = self._verdict(selection, known | last, num_rows, aborted)
        return CaptureResult(status=status, error=error, payload=payload)

    def _known(self, selection: Selection, num_rows: int) -> Positions:
        """The selected positions below `num_rows` that do not depend on where the request ends."""
        wanted = Positions.from_flat(selection.runs)
        if selection.last_generated:
            wanted = wanted.below(self._prompt) | Positions.from_flat(selection.named)
        return wanted.below(num_rows)

    def _verdict(
        self, selection: Selection, wanted: Positions, num_rows: int, aborted: bool
    ) -> tuple[CaptureStatus, str | None]:
        arrived = np.concatenate([np.zeros(0, np.int64), *self._arrived])
        missing = np.setdiff1d(wanted.array(), arrived)
        if len(missing):
            where = f"{len(missing)} of {len(wanted)} rows, first at position {missing[0]}"
            if aborted:
                return "partial_error", f"the request was aborted before {where} were computed"
            return "error", f"{where} are missing although they were computed; this is a bug"
        unreached = Positions.from_flat(selection.named).first_from(num_rows)
        if unreached is not None:
            return "partial_error", (
                f"the request ended with {num_rows} rows, before position {unreached}"
            )
        return "ok", None


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
