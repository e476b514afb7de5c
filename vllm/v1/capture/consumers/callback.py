# SPDX-License-Identifier: Apache-2.0
"""Calls a Python function with the rows of a request as they come."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.results import CapturedRows
from vllm.v1.interventions.plan import Site

Callback = Callable[[RequestInfo, Mapping[Site, CapturedRows]], Any]
"""Called with new rows, by site. Those of one request come in position order, one call at a time;
calls for different requests may overlap, unless the consumer has `threads=1`. What it raises makes
that request's result an error. What it returns is ignored."""


class CallbackConsumer(CaptureConsumer):
    """The payload of a result is the number of rows, over all sites."""

    location = "frontend"

    def __init__(self, function: Callback | str) -> None:
        """
        Args:
            function: or its place, "package.module:function".
        """
        found = resolve_name(function) if isinstance(function, str) else function
        if not callable(found):
            raise ValueError(f"function must be callable, got {type(found).__name__}")
        self._function: Callback = found

    def open(self, request: RequestInfo) -> CaptureSession:
        return _Session(self._function, request)


class _Session(CaptureSession):
    def __init__(self, function: Callback, request: RequestInfo) -> None:
        self._function = function
        self._request = request
        self._rows = 0

    def rows(self, batch: RowBatch) -> None:
        self._function(self._request, by_site(self._request, batch))
        self._rows += len(batch.positions) * len(self._request.sites)

    def done(self, end: RequestEnd) -> int:
        return self._rows


def by_site(request: RequestInfo, batch: RowBatch) -> dict[Site, CapturedRows]:
    """The rows of each site: views of the batch."""
    return {
        site: CapturedRows(batch.positions, batch.token_ids, values, batch.versions)
        for site, values in zip(request.sites, batch.values, strict=True)
    }
