# SPDX-License-Identifier: Apache-2.0
"""A base class for consumers written for RhizoNymph/vllm: `on_capture`, once a site, at the end.

    class Mine(OnCapture):
        capture = {"hooks": {"post_block": "all"}, "positions": "last_prompt"}

        def on_capture(self, key, tensor, sidecar):
            request_id, layer, hook = key

    llm = LLM("/path/to/model", capture_consumers=[Mine()])

What it captures of every request is the attribute `capture`, in place of `global_capture_spec`.
`on_step` is not there: nothing of a request runs Python while the model steps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    RequestEnd,
    RequestInfo,
    RowBatch,
)

Key = tuple[str, int, str]
"""The caller's id of the request, the layer, the point."""


class OnCapture(CaptureConsumer):
    """Calls `on_capture` with all rows of a site. Rows of a request wait in memory, which it has
    reserved, until it ends."""

    @abstractmethod
    def on_capture(self, key: Key, tensor: torch.Tensor, sidecar: dict[str, Any]) -> None:
        """Take the rows of one site of a completion, in one of the consumer's threads.

        Args:
            tensor: [rows, hidden] in the model's dtype, on the CPU.
            sidecar: `positions`, `token_ids` and `versions`, lists of one int a row; `sample`,
                `num_prompt_tokens`, `num_tokens`; `error`, why rows are absent, or None.
        """

    def open(self, request: RequestInfo) -> CaptureSession:
        """Start to gather the rows of a completion."""
        return _Gathering(self, request)


class _Gathering(CaptureSession):
    def __init__(self, consumer: OnCapture, request: RequestInfo) -> None:
        self._consumer, self._request = consumer, request
        self._batches: list[RowBatch] = []

    def rows(self, batch: RowBatch) -> None:
        self._batches.append(batch)

    def done(self, end: RequestEnd) -> int:
        """Return the number of sites."""
        request, batches = self._request, self._batches
        sidecar: dict[str, Any] = {
            name: [int(n) for batch in batches for n in np.asarray(vars(batch)[name])]
            for name in ("positions", "token_ids", "versions")
        }
        sidecar |= {
            "sample": request.sample,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_tokens": end.num_tokens,
            "error": end.error,
        }
        none = torch.empty(0, request.width, dtype=request.dtype)
        for i, (point, layer) in enumerate(request.sites):
            rows = torch.cat([none, *(batch.values[i] for batch in batches)])
            self._consumer.on_capture((request.external_id, layer, point), rows, dict(sidecar))
        return len(request.sites)
