# SPDX-License-Identifier: Apache-2.0
"""The recording of one CUDA graph: at start-up as torch does it, later without giving memory back.

Upstream's two recorders call `recorded` where they would call `torch.cuda.graph`. This file imports
none of theirs, as they import it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_KEEPS_MEMORY = ContextVar("keeps_memory", default=False)
"""True within `emptied_once`, in the thread that records."""


@contextmanager
def emptied_once() -> Iterator[None]:
    """Within, torch keeps the memory that it has and nobody uses: it would give it back before each
    piece that is recorded. That of the device it gives back before, so that a graph finds room."""
    torch.cuda.empty_cache()
    outside = _KEEPS_MEMORY.set(True)
    try:
        yield
    finally:
        _KEEPS_MEMORY.reset(outside)


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Within, record what this thread launches into a graph.

    Args:
        pool: torch's handle of the memory that the graph shares with others; None for its own.
        stream: the one to launch on.
    """
    if not _KEEPS_MEMORY.get():
        with torch.cuda.graph(graph, pool, stream, "thread_local"):
            yield
        return
    # As torch.cuda.graph, whose source test_recording.py reads, but without giving memory back.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, "thread_local")
        try:
            yield
        finally:
            graph.capture_end()
