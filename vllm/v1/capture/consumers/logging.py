# SPDX-License-Identifier: Apache-2.0
"""The logging consumer writes a line to vLLM's log for each completion.

It shows that capture works, and what it costs.
"""

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    RequestEnd,
    RequestInfo,
    RowBatch,
)

logger = init_logger(__name__)

_SHOWN = 4
"""Number of sites that a line names."""


class LoggingConsumer(CaptureConsumer):
    """Logs a line for each completion; the payload of a result is that line."""

    location = "engine"

    def open(self, request: RequestInfo) -> CaptureSession:
        """Start the session of one completion."""
        return _Session(request)


class _Session(CaptureSession):
    def __init__(self, request: RequestInfo) -> None:
        self._request = request
        self._rows = 0
        self._norms = torch.zeros(len(request.sites), dtype=torch.float64)

    def rows(self, batch: RowBatch) -> None:
        norms = torch.linalg.vector_norm(batch.values, dim=-1, dtype=torch.float64)
        self._norms += norms.sum(dim=1)
        self._rows += len(batch.positions)

    def done(self, end: RequestEnd) -> str:
        return self._say("" if end.error is None else f": {end.error}")

    def failed(self, reason: str) -> None:
        self._say(f": failed: {reason}")

    def _say(self, how: str) -> str:
        """Log the line of this completion and return it; `how` is put at its end."""
        request = self._request
        means = (self._norms / max(self._rows, 1)).tolist()
        sites = [
            f"{point} {layer} |h|={mean:.4g}"
            for (point, layer), mean in zip(request.sites, means, strict=True)
        ]
        if len(sites) > _SHOWN:
            sites[_SHOWN:] = [f"{len(sites) - _SHOWN} more sites"]
        what = f"{self._rows} rows of {', '.join(sites)}{how}"
        # A client may have chosen the id: no line breaks.
        logger.info("captured %r.%d: %s", request.external_id, request.sample, what)
        return what
