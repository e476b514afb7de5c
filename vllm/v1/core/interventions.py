# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: who gets which slot, which rows a step captures, what is sent to the workers."""

from typing import TYPE_CHECKING

import numpy as np

from vllm.v1.interventions import StepInterventions, WorkerRequest
from vllm.v1.steering.slots import SlotTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.step_rows import StepRows


FIRST_TOKEN = np.zeros(1, dtype=np.int32)


class SchedulerInterventions:
    """All decisions about steering and capture; the workers only copy.

    A step's order: `cap_tokens` and `can_admit` while requests are chosen, `admit` for each that
    joins, `withdraw` for each that is preempted, `message` when the step is complete.
    """

    def __init__(self, config: "VllmConfig") -> None:
        self.slots = SlotTable(config.steering_config.max_steering_configs)
        self._speculates = config.speculative_config is not None
        self._row_capacity = 0
        if config.tap_shape is not None:
            self._row_capacity = (
                config.capture_config.capture_buffer_bytes // config.tap_shape.row_bytes
            )
        self._admitted: dict[str, WorkerRequest] = {}
        self._offsets: dict[str, np.ndarray] = {}
        self._rows: dict[str, int] = {}
        self._rows_taken = 0

    def can_admit(self, request: "Request") -> bool:
        """Whether a waiting request may start now: all slots it will ever need are free."""
        contents = request.interventions.plan.contents
        return not contents or self.slots.can_reserve(request.request_id, contents)

    def admit(self, request: "Request") -> None:
        """A request joins the running ones, for the first time or after a preemption."""
        plan = request.interventions.plan
        if not plan.contents and plan.capture is None:
            return
        self.slots.reserve(request.request_id, plan.contents)
        self._admitted[request.request_id] = WorkerRequest(
            prefill_slot=self.slots.slot(plan.prefill),
            decode_slot=self.slots.slot(plan.decode),
            num_prompt_tokens=request.num_prompt_tokens,
            capture_sites=tuple(plan.capture.sites) if plan.capture else (),
        )

    def cap_tokens(self, request: "Request", first: int, num_tokens: int) -> int:
        """How many of the `num_tokens` positions from `first` this step's rows have room for.

        0 means: not in this step. Never 0 for a request that is first in a step (the frontend
        refused what can never fit).
        """
        capture = request.interventions.plan.capture
        if capture is None or num_tokens <= 0:
            return num_tokens
        self.withdraw(request)
        room = self._row_capacity - self._rows_taken
        if num_tokens == 1 and not self._speculates:
            # Decoding, the common case, without numpy.
            if first not in request.interventions.wanted:
                return 1
            if len(capture.sites) > room:
                return 0
            self._take_rows(request, FIRST_TOKEN, len(capture.sites))
            return 1
        positions = np.arange(first, first + num_tokens)
        wanted = request.interventions.wanted.mask(positions)
        if self._speculates and request.interventions.wanted.stop > request.num_prompt_tokens:
            # With drafts in flight the true positions may lie before these: reserve every row
            # past the prompt; the true positions come back with the rows.
            wanted |= positions >= request.num_prompt_tokens
        rows = np.cumsum(wanted) * len(capture.sites)
        fits = int(np.searchsorted(rows, room, side="right"))
        if fits < num_tokens and self._speculates and first + num_tokens > request.num_tokens:
            # The sampler counts on all of a request's draft rows or none, those that upstream
            # pads a prompt's last token with included. Recomputed tokens are no drafts.
            return 0
        if fits:
            offsets = np.flatnonzero(wanted[:fits]).astype(np.int32)
            self._take_rows(request, offsets, int(rows[fits - 1]))
        return fits

    def _take_rows(self, request: "Request", offsets: np.ndarray, rows: int) -> None:
        self._offsets[request.request_id] = offsets
        self._rows[request.request_id] = rows
        self._rows_taken += rows

    def withdraw(self, request: "Request") -> None:
        """The request is not part of this step after all."""
        self._offsets.pop(request.request_id, None)
        self._rows_taken -= self._rows.pop(request.request_id, 0)

    def finish(self, request: "Request") -> None:
        self.slots.release(request.request_id, request.interventions.plan.contents)
        self._admitted.pop(request.request_id, None)

    def message(self, num_scheduled_tokens: dict[str, int]) -> StepInterventions | None:
        """This step's decisions, or None if there are none; starts the next step."""
        rows = {
            req_id: kept
            for req_id, offsets in self._offsets.items()
            if req_id in num_scheduled_tokens
            and len(kept := offsets[offsets < num_scheduled_tokens[req_id]])
        }
        step = StepInterventions(
            contents=self.slots.take_uploads(), admitted=self._admitted, rows=rows
        )
        self._admitted, self._offsets, self._rows, self._rows_taken = {}, {}, {}, 0
        return step if step.contents or step.admitted or step.rows else None

    def accept(self, request: "Request", captured: "StepRows | None") -> None:
        """Hand a request the rows of a step whose tokens it has just been given."""
        if captured is None or request.interventions.plan.capture is None:
            return
        chunk = captured.of(request.request_id)
        if chunk is not None:
            request.interventions.accept(chunk, request.num_tokens)
