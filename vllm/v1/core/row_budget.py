# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of capture: which rows of a step leave the device, and that they fit."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

FIRST_TOKEN = np.zeros(1, dtype=np.int32)


class RowBudget:
    """The rows of the step that is being scheduled, by request."""

    def __init__(self, config: "VllmConfig") -> None:
        self._speculates = config.speculative_config is not None
        self._capacity = 0
        if config.tap_shape is not None:
            buffer_bytes = config.capture_config.capture_buffer_bytes
            self._capacity = buffer_bytes // config.tap_shape.row_bytes
        self._offsets: dict[str, np.ndarray] = {}
        self._counts: dict[str, int] = {}
        self._taken = 0

    def cap_tokens(self, request: "Request", first: int, num_tokens: int) -> int:
        """How many of the `num_tokens` positions from `first` this step's rows have room for.

        0 means: not in this step. Never 0 for a request that is first in a step (the frontend
        refused what can never fit).
        """
        capture = request.interventions.plan.capture
        if capture is None or num_tokens <= 0:
            return num_tokens
        self.withdraw(request)
        room = self._capacity - self._taken
        if num_tokens == 1 and not self._speculates:
            # Decoding, the common case, without numpy.
            if first not in request.interventions.wanted:
                return 1
            if len(capture.sites) > room:
                return 0
            self._take(request, FIRST_TOKEN, len(capture.sites))
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
            self._take(request, offsets, int(rows[fits - 1]))
        return fits

    def _take(self, request: "Request", offsets: np.ndarray, rows: int) -> None:
        self._offsets[request.request_id] = offsets
        self._counts[request.request_id] = rows
        self._taken += rows

    def withdraw(self, request: "Request") -> None:
        """The request is not part of this step after all."""
        self._offsets.pop(request.request_id, None)
        self._taken -= self._counts.pop(request.request_id, 0)

    def take(self, num_scheduled_tokens: dict[str, int]) -> dict[str, np.ndarray]:
        """Request id -> int32 offsets into its tokens of this step; starts the next step."""
        offsets, self._offsets, self._counts, self._taken = self._offsets, {}, {}, 0
        return {
            req_id: kept
            for req_id, at in offsets.items()
            if req_id in num_scheduled_tokens and len(kept := at[at < num_scheduled_tokens[req_id]])
        }
