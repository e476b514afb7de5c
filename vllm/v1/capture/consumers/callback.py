# SPDX-License-Identifier: Apache-2.0
"""The callback consumer calls a Python function with the rows of a request as they come."""

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
from vllm.v1.capture.results import CapturedRows, SiteRows
from vllm.v1.interventions.plan import Site

Callback = Callable[[RequestInfo, Mapping[Site, CapturedRows]], Any]
"""A function that is called with a request and its new rows, by site.

Rows of one request come in position order, one call at a time. Calls for different requests may
overlap, unless the consumer has `threads=1`. An exception makes that request's result an error. The
return value is ignored."""


class CallbackConsumer(CaptureConsumer):
    """Calls a function with rows; the payload of a result is the number of rows, over all sites."""

    location = "frontend"

    def __init__(self, function: Callback | str) -> None:
        """Keep the function, importing it first where only its place is given.

        Args:
            function: the function, or its place as "package.module:function".

        Raises:
            ValueError: it is not callable, or the place is not of that form.
            ImportError: there is no such module.
            AttributeError: the module has no such function.
        """
        found = resolve_name(function) if isinstance(function, str) else function
        if not callable(found):
            raise ValueError(f"function must be callable, got {type(found).__name__}")
        self._function: Callback = found

    def open(self, request: RequestInfo) -> CaptureSession:
        """Start the session of one completion."""
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


def by_site(request: RequestInfo, batch: RowBatch) -> SiteRows[CapturedRows]:
    """Split a batch into the rows of each site, which are views of it."""
    at = {site: i for i, site in enumerate(request.sites)}

    def rows(site: Site) -> CapturedRows:
        heads = request.heads[at[site]] if request.heads else ()
        values = batch.values[at[site]]
        return CapturedRows(batch.positions, batch.token_ids, values, batch.versions, heads)

    return SiteRows(at, rows)
