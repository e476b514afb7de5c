# SPDX-License-Identifier: Apache-2.0
"""Copies rows that came with outputs to their completions' memory, beside the engine's loop."""

from concurrent.futures import Future
from itertools import accumulate
from weakref import WeakValueDictionary

from vllm.v1.capture.transport.copies import Copies, CopyThreads, finished, join_copies
from vllm.v1.interventions.frontend.row_collector import RowCollector
from vllm.v1.interventions.messages import CapturedChunk

BYTES = 192 << 20
"""Memory that rows may keep before they are copied."""

STEPS = 32
"""Steps whose rows may be kept before they are copied."""


class RowCopier:
    """Has the rows of one frontend's collectors copied by threads, many in one call.

    Rows of a step are views of the memory of all its rows, which stays until all were copied. So
    they are copied soon: when they keep `BYTES` of memory, or are of `STEPS` steps. At most as much
    again gathers while the threads are busy; then the caller waits for them.
    """

    def __init__(self, threads: CopyThreads) -> None:
        self._threads = threads
        self._collectors: WeakValueDictionary[str, RowCollector] = WeakValueDictionary()
        self._shared: list[CapturedChunk] = []
        """Rows of several requests that were not cut yet: later is cheaper than step by step, where
        the cut ones would be thousands of objects that live for many steps."""
        self._new: dict[RowCollector, None] = {}
        self._bytes = self._kept = self._steps = 0
        self._last: CapturedChunk | None = None
        self._due: list[Copies] = []
        """Copies that results which are being made wait for."""
        self._copying: set[RowCollector] = set()
        self._copies: Copies = [], []
        """Views that are being copied, so that they are freed here and not in a thread."""
        self._running: list[Future[None]] = []

    def open(self, request_id: str, collector: RowCollector) -> None:
        """Give a collector what `share` brings for its request, for as long as it is in use."""
        self._collectors[request_id] = collector

    def share(self, chunk: CapturedChunk) -> None:
        """Take rows of several requests, the chunk's `owners`; some may have no collector."""
        if not any(name in self._collectors for name, _ in chunk.owners):
            return
        self._shared.append(chunk)
        self._bytes += sum(values.nbytes for values in chunk.values)
        self._last = chunk

    def add(self, collector: RowCollector, chunks: list[CapturedChunk]) -> None:
        """Take rows that came with an output."""
        self._cut()
        self._give(collector, chunks)
        for chunk in chunks:
            self._bytes += len(chunk.positions) * collector.row_bytes
        self._last = chunks[-1]

    def _give(self, collector: RowCollector, chunks: list[CapturedChunk]) -> None:
        collector.add(chunks)
        if collector not in self._new:
            self._new[collector] = None

    def _cut(self) -> None:
        """Give the shared rows to their collectors; they come before any others of these."""
        if self._shared:
            for request_id, chunks in unpack(self._shared).items():
                collector = self._collectors.get(request_id)
                if collector is not None:
                    self._give(collector, chunks)
            self._shared.clear()

    def finish(self, collector: RowCollector) -> None:
        """Place all rows of a collector, for its results. They are copied when `settle` or `step`
        returns: those of all requests that end in a step at once."""
        self._cut()
        if collector in self._copying:
            self._wait()
        self._due.append(collector.place(collector.pop_new()))

    def settle(self) -> None:
        """Return when all rows that `finish` placed are copied."""
        due, self._due = join_copies(self._due), []
        self._threads.run(due)

    def step(self) -> None:
        """Copy what is due, when all outputs of a step were taken."""
        self.settle()
        if not (self._new or self._shared):
            return
        self._steps += 1
        if self._last is not None:
            # One request may keep all rows of a step, others' included.
            self._kept += sum(values.untyped_storage().nbytes() for values in self._last.values)
            self._last = None
        due = max(self._bytes / BYTES, self._kept / BYTES, self._steps / STEPS)
        if due < 1 or (due < 2 and not all(future.done() for future in self._running)):
            return
        self._wait()
        self._cut()
        new = {collector: rows for collector in self._new if (rows := collector.pop_new())}
        self._copying = set(new)
        self._copies = join_copies(collector.place(rows) for collector, rows in new.items())
        self._running = self._threads.start(self._copies)
        self._new.clear()
        self._bytes = self._kept = self._steps = 0

    def _wait(self) -> None:
        finished(self._running)
        self._running, self._copying, self._copies = [], set(), ([], [])


def unpack(chunks: list[CapturedChunk]) -> dict[str, list[CapturedChunk]]:
    """Cut chunks that have `owners`: request id -> its rows, views."""
    rows: dict[str, list[CapturedChunk]] = {}
    for chunk in chunks:
        counts = [count for _, count in chunk.owners]
        values = [v.split(counts) for v in chunk.values]
        stops = accumulate(counts)
        at = [chunk.positions[b - n : b] for n, b in zip(counts, stops, strict=True)]
        for (name, _), here, *mine in zip(chunk.owners, at, *values, strict=True):
            rows.setdefault(name, []).append(CapturedChunk(here, mine, chunk.version))
    return rows
