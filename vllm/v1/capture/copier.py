# SPDX-License-Identifier: Apache-2.0
"""Copies rows that came with outputs to their completions' memory, beside the engine's loop."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain

import torch

from vllm.v1.capture.collect import Copies, RowCollector, copy, joined
from vllm.v1.interventions import CapturedChunk

THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
"""Fresh memory costs a core more time than the copy: it takes several to keep up with a GPU."""
BYTES = 192 << 20
STEPS = 32
SHARED_BYTES = 16 << 20
"""A thread is woken for so much."""


class RowCopier:
    """The collectors of one frontend.

    Rows of a step are views of the memory of all its rows, which stays until all were copied. So
    they are copied soon: when they keep `BYTES` of memory, or are of `STEPS` steps. At most as much
    again gathers while the threads are busy; then the caller waits for them. A thread's work is one
    call that lets go of the interpreter, so that the engine's loop need not wait its turn.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="capture-rows")
        self._new: dict[RowCollector, None] = {}
        self._bytes = self._kept = self._steps = 0
        self._last: CapturedChunk | None = None
        self._copying: set[RowCollector] = set()
        self._copies: list[Copies] = []
        """Views that are being copied, so that they are freed here and not in a thread."""
        self._running: list[Future[None]] = []

    def add(self, collector: RowCollector, chunks: list[CapturedChunk]) -> None:
        """Rows that came with an output."""
        collector.add(chunks)
        if collector not in self._new:
            self._new[collector] = None
        for chunk in chunks:
            self._bytes += len(chunk.positions) * collector.row_bytes
        self._last = chunks[-1]

    def finish(self, collector: RowCollector) -> None:
        """Return when all rows of this one are copied; if they are many, all threads do it."""
        if collector in self._copying:
            self._wait()
        into, rows = collector.place(collector.take_new())
        if sum(values.nbytes for values in rows) < SHARED_BYTES:
            copy((into, rows))
            return
        pieces = [i.chunk(THREADS) for i in into], [r.chunk(THREADS) for r in rows]
        list(self._threads.map(torch.Tensor.copy_, *map(chain.from_iterable, pieces)))

    def step(self) -> None:
        """All outputs of a step were taken."""
        if not self._new:
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
        new = {collector: rows for collector in self._new if (rows := collector.take_new())}
        self._copying = set(new)
        copies = [collector.place(rows) for collector, rows in new.items()]
        number = min(THREADS, 1 + self._bytes // SHARED_BYTES, len(copies))
        self._copies = [joined(copies[i::number]) for i in range(number)]
        self._running = [self._threads.submit(copy, c) for c in self._copies]
        self._new.clear()
        self._bytes = self._kept = self._steps = 0

    def _wait(self) -> None:
        wait(self._running)
        for future in self._running:
            future.result()
        self._running, self._copying, self._copies = [], set(), []
