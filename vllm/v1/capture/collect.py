# SPDX-License-Identifier: Apache-2.0
"""Frontend side of inline capture: rows arrive step by step, results leave with the outputs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.positions import Positions
from vllm.v1.capture.results import CapturedRows, CaptureResult
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
        aborted=finish_reason == FinishReason.ABORT,
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
        self._chunks: list[CapturedChunk] = []
        self._delivered = 0

    def add(self, chunks: list[CapturedChunk] | None) -> None:
        self._chunks += chunks or ()

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
        token_ids = [*self._prompt_token_ids, *output_token_ids]
        num_rows = len(token_ids) - 1
        positions, values = self._merged()
        if only_new:
            # `last_generated` is not known before the end, so it comes with the end.
            keep = positions >= self._delivered
            positions, values = positions[keep], values[:, torch.from_numpy(keep)]
            self._delivered = max(self._delivered, num_rows)
        return {
            name: self._result(name, positions, values, token_ids, finished, aborted, only_new)
            for name in self._plan.consumers
        }

    def _result(
        self,
        name: str,
        positions: np.ndarray,
        values: torch.Tensor,
        token_ids: Sequence[int],
        finished: bool,
        aborted: bool,
        only_new: bool,
    ) -> CaptureResult:
        selection = self._plan.consumers[name]
        num_rows = len(token_ids) - 1
        wanted = self._wanted(selection, num_rows, finished)
        keep = np.flatnonzero(wanted.mask(positions))
        kept = positions[keep]
        ids = np.asarray(token_ids, dtype=np.int64)[kept]
        index = torch.from_numpy(keep)
        payload = {
            site: CapturedRows(kept, ids, values[self._plan.sites.index(site)][index])
            for site in selection.sites
        }
        status, error = "ok", None
        if finished:
            status, error = self._verdict(selection, wanted, kept, num_rows, aborted, only_new)
        return CaptureResult(status=status, error=error, payload=payload)  # type: ignore[arg-type]

    def _wanted(self, selection: Selection, num_rows: int, finished: bool) -> Positions:
        wanted = Positions.from_flat(selection.runs).below(num_rows)
        if not selection.last_generated:
            return wanted
        prompt = wanted.below(self._prompt)
        if finished and num_rows > self._prompt:
            return prompt | Positions.of([num_rows - 1])
        return prompt

    def _verdict(
        self,
        selection: Selection,
        wanted: Positions,
        kept: np.ndarray,
        num_rows: int,
        aborted: bool,
        only_new: bool,
    ) -> tuple[str, str | None]:
        if not only_new and len(kept) < len(wanted):
            missing = np.setdiff1d(wanted.array(), kept)
            where = f"{len(missing)} of {len(wanted)} rows, first at position {missing[0]}"
            if aborted:
                return "partial_error", f"the request was aborted before {where} were computed"
            return "error", f"{where} are missing although they were computed; this is a bug"
        unreached = [p for p in Positions.from_flat(selection.named).array() if p >= num_rows]
        if unreached:
            return "partial_error", (
                f"the request ended with {num_rows} rows, before position {unreached[0]}"
            )
        return "ok", None

    def _merged(self) -> tuple[np.ndarray, torch.Tensor]:
        if len(self._chunks) > 1:
            positions = np.concatenate([c.positions for c in self._chunks])
            values = torch.cat([c.values for c in self._chunks], dim=1)
            self._chunks = [CapturedChunk(positions, values)]
        if self._chunks:
            return self._chunks[0].positions, self._chunks[0].values
        return np.zeros(0, np.int64), torch.zeros(len(self._plan.sites), 0, 0)
