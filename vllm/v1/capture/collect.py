# SPDX-License-Identifier: Apache-2.0
"""Frontend side of inline capture: rows arrive step by step, results leave with the outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.positions import Positions
from vllm.v1.capture.results import CapturedRows, CaptureResult, CaptureStatus
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.interventions import CapturedChunk, CapturePlan, Selection

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


class RowCollector:
    """The rows of one completion.

    Chunks arrive in position order, each position once (the scheduler sees to that). What is past
    the final length (stop strings are found here, after the engine sampled on) is trimmed here.
    """

    def __init__(self, plan: CapturePlan, prompt_token_ids: list[int]) -> None:
        self._plan = plan
        self._prompt_token_ids = prompt_token_ids
        self._prompt = len(prompt_token_ids)
        self._chunks = [CapturedChunk(np.zeros(0, np.int64), plan.no_rows)]
        self._arrived: list[np.ndarray] = []
        self._delivered = 0

    def add(self, chunks: list[CapturedChunk] | None) -> None:
        for chunk in chunks or ():
            self._chunks.append(chunk)
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
        merged = self._merged()
        results = {
            name: self._result(selection, merged, token_ids, finished, aborted, only_new)
            for name, selection in self._plan.consumers.items()
        }
        if only_new:
            self._delivered = len(token_ids) - 1
            # The last row may be wanted once more: as the last generated one, when none follows.
            rest = merged.positions >= self._delivered - 1
            self._chunks = [
                CapturedChunk(merged.positions[rest], merged.values[:, torch.from_numpy(rest)])
            ]
        return results

    def _result(
        self,
        selection: Selection,
        merged: CapturedChunk,
        token_ids: np.ndarray,
        finished: bool,
        aborted: bool,
        only_new: bool,
    ) -> CaptureResult:
        # The prompt's rows are owed even when the request ends before its first token.
        num_rows = max(len(token_ids) - 1, self._prompt)
        wanted = self._wanted(selection, num_rows, finished)
        since = self._delivered if only_new else 0
        if selection.last_generated:
            # Which one it is is not known before the end, so no generated row was delivered.
            since = min(since, self._prompt)
        keep = wanted.mask(merged.positions) & (merged.positions >= since)
        kept = merged.positions[keep]
        ids, index = token_ids[kept], torch.from_numpy(np.flatnonzero(keep))
        payload = {
            site: CapturedRows(kept, ids, merged.values[self._plan.sites.index(site)][index])
            for site in selection.sites
        }
        if not finished:
            return CaptureResult(status="ok", error=None, payload=payload)
        status, error = self._verdict(selection, wanted, num_rows, aborted)
        return CaptureResult(status=status, error=error, payload=payload)

    def _wanted(self, selection: Selection, num_rows: int, finished: bool) -> Positions:
        wanted = Positions.from_flat(selection.runs).below(num_rows)
        if not selection.last_generated:
            return wanted
        prompt = wanted.below(self._prompt)
        if finished and num_rows > self._prompt:
            return prompt | Positions.of([num_rows - 1])
        return prompt

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

    def _merged(self) -> CapturedChunk:
        if len(self._chunks) > 1:
            positions = np.concatenate([c.positions for c in self._chunks])
            values = torch.cat([c.values for c in self._chunks], dim=1)
            self._chunks = [CapturedChunk(positions, values)]
        return self._chunks[0]
