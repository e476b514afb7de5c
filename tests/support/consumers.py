# SPDX-License-Identifier: Apache-2.0
"""Consumers and completions to run in a `ConsumerHost`, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    ConsumerResult,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.registry import ConsumerSpec, HostLimits
from vllm.v1.capture.transport.host import ConsumerHost

SITES = (("post_block", 0), ("post_block", 2))
WIDTH = 3
END = RequestEnd(num_tokens=9)
PATIENCE = 300.0
"""Seconds after which a test gives up waiting: others may hold the processors for long."""
SHORT = 0.2
"""Seconds of what must not come in time; what must come has PATIENCE."""


def request_of(request_id: str, rows: int = 8, **fields: Any) -> RequestInfo:
    return RequestInfo(
        request_id=request_id,
        external_id=request_id,
        sample=0,
        num_samples=1,
        prompt_token_ids=list(range(100, 104)),
        sites=SITES,
        width=WIDTH,
        dtype=torch.float32,
        projected=False,
        max_rows=rows,
        fields=fields,
    )


def batch_of(*positions: int) -> RowBatch:
    """A row's values are its position."""
    at = np.array(positions, dtype=np.int64)
    values = torch.tensor(positions, dtype=torch.float32)[None, :, None]
    return RowBatch(
        positions=at,
        token_ids=at + 100,
        versions=np.zeros_like(at),
        values=values.expand(len(SITES), -1, WIDTH).contiguous(),
    )


class Session(CaptureSession):
    """Calls the functions of its consumer, and says what happened to it, in order."""

    def __init__(self, consumer: Recorder, request: RequestInfo) -> None:
        self.consumer, self.request = consumer, request
        self.calls: list[Any] = consumer.calls.setdefault(request.request_id, [])
        self.turn = threading.Lock()

    def _call(self, name: str, said: Any) -> Any:
        assert self.turn.acquire(blocking=False), "two threads in one session"
        try:
            self.calls.append(said)
            do = self.consumer.do.get(name)
            return do(self.request.request_id) if do else list(self.calls)
        finally:
            self.turn.release()

    def rows(self, batch: RowBatch) -> None:
        self._call("rows", batch.positions.tolist())

    def done(self, end: RequestEnd) -> Any:
        return self._call("done", "done")

    def aborted(self, end: RequestEnd) -> Any:
        return self._call("aborted", "aborted")

    def failed(self, reason: str) -> None:
        self._call("failed", ("failed", reason))


class Recorder(CaptureConsumer):
    """`do`: name of a method -> a function of the request id, called in it; its result counts."""

    def __init__(self, **do: Callable[[str], Any]) -> None:
        self.do = do
        self.calls: dict[str, list[Any]] = {}
        self.down = threading.Event()

    def open(self, request: RequestInfo) -> CaptureSession:
        if "open" in self.do:
            self.do["open"](request.request_id)
        return Session(self, request)

    def shutdown(self) -> None:
        self.down.set()
        if "shutdown" in self.do:
            self.do["shutdown"]("")


def limit(host: ConsumerHost, seconds: float) -> None:
    """Give a host's calls and results another limit, those that are awaited already too."""
    with host._lock:
        limits = replace(host._spec.limits, timeout=seconds)
        host._spec = replace(host._spec, limits=limits)
        host._tick.notify()


class Running:
    """A host and what it reported."""

    def __init__(
        self,
        consumer: CaptureConsumer,
        *,
        threads: int = 2,
        cls: type[CaptureConsumer] | None = None,
    ) -> None:
        limits = HostLimits(threads=threads, timeout=PATIENCE)
        instance = consumer if cls is None else None
        spec = ConsumerSpec("probe", cls=cls or type(consumer), instance=instance, limits=limits)
        self.results: dict[str, ConsumerResult] = {}
        self.reports = 0
        self._changed = threading.Condition()
        self.host = ConsumerHost(spec, consumer, self._take)

    def _take(self, request_id: str, result: ConsumerResult) -> None:
        with self._changed:
            self.results[request_id] = result
            self.reports += 1
            self._changed.notify_all()

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Calls and results, those that are awaited already too, have SHORT meanwhile."""
        limit(self.host, SHORT)
        try:
            yield
        finally:
            limit(self.host, PATIENCE)

    def result(self, request_id: str) -> ConsumerResult:
        with self._changed:
            there = self._changed.wait_for(lambda: request_id in self.results, PATIENCE)
            assert there, f"no result of {request_id}"
            return self.results[request_id]

    def send(self, request_id: str, *batches: RowBatch, error: str | None = None) -> None:
        """One completion from open to end."""
        self.host.open(request_of(request_id))
        for batch in batches:
            self.host.rows(request_id, batch)
        self.host.end(request_id, RequestEnd(num_tokens=9, error=error))

    def run(self, request_id: str, *batches: RowBatch, error: str | None = None) -> ConsumerResult:
        """One completion from open to result."""
        self.send(request_id, *batches, error=error)
        return self.result(request_id)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.shutdown(PATIENCE)
