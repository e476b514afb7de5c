# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer in its host, and what lies below its root."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.consumers import PATIENCE
from tests.support.stored import batch, context, request
from vllm.v1.capture.consumer import ConsumerResult, RequestEnd, RequestInfo
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.registry import ConsumerSpec, HostLimits
from vllm.v1.capture.transport.host import ConsumerHost


class Running:
    """A consumer in its host, and the results it gave."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._there = threading.Condition()
        self._results: dict[str, ConsumerResult] = {}
        self._ids = count()
        consumer = FilesystemConsumer(**({"flush_seconds": 0.01} | options))
        consumer.start(context())
        limits = HostLimits(timeout=PATIENCE, threads=2)
        spec = ConsumerSpec("filesystem", cls=FilesystemConsumer, limits=limits)
        self.host = ConsumerHost(spec, consumer, self._take)

    def _take(self, request_id: str, result: ConsumerResult) -> None:
        with self._there:
            self._results[request_id] = result
            self._there.notify_all()

    def send(self, info: RequestInfo, positions: list[int]) -> None:
        self.host.open(info)
        self.host.rows(info.request_id, batch(info, positions))
        self.host.end(info.request_id, RequestEnd(9))

    def result(self, info: RequestInfo) -> ConsumerResult:
        with self._there:
            key = info.request_id
            assert self._there.wait_for(lambda: key in self._results, PATIENCE)
            return self._results[key]

    def ask(self, name: str, positions: tuple[int, ...] = (0, 1), **more: Any) -> ConsumerResult:
        info = request(f"id{next(self._ids)}", request_id=name, **more)
        self.send(info, list(positions))
        return self.result(info)


@contextmanager
def running(**options: Any) -> Iterator[Running]:
    each = Running(options)
    try:
        yield each
    finally:
        each.host.shutdown(PATIENCE)


def all_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]
