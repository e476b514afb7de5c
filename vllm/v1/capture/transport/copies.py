# SPDX-License-Identifier: Apache-2.0
"""Copies of rows on the host: by several threads where one would be too slow.

A thread that runs Python takes the interpreter from the engine's loop, so a thread's work is one
call that lets go of it.
"""

import ctypes
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
"""Fresh memory costs a core more time than the copy: it takes several to keep up with a GPU."""
PIECE_BYTES = 4 << 20
"""A thread is woken for so much."""
DIRECT_BYTES = 1 << 20
"""Less is copied at once by the caller."""
UNDERWAY_BYTES = 256 << 20
"""Of copies that nobody waits for."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""(where to, what)."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for rows, by numpy, which asks for huge pages: they come several times faster than
    small ones."""
    return torch.from_numpy(np.empty(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def copy(copies: Copies) -> None:
    if copies[0]:
        torch._foreach_copy_(*copies)


def joined(copies: Iterable[Copies]) -> Copies:
    into: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for some_into, some_rows in copies:
        into += some_into
        rows += some_rows
    return into, rows


class CopyThreads:
    """The threads of one owner.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(THREADS, name, initializer=_without_team)
        self._underway: list[Future[None]] = []
        self._bytes = 0

    def start(self, copies: Copies) -> list[Future[None]]:
        """Copy, in as many threads as that is worth."""
        parts = _parts(copies, min(THREADS, 1 + _bytes_of(copies) // PIECE_BYTES))
        return [self._threads.submit(copy, part) for part in parts]

    def run(self, copies: Copies) -> None:
        """Copy and wait."""
        if _bytes_of(copies) < DIRECT_BYTES:
            copy(copies)
        else:
            finished(self.start(copies))

    def copied(self, values: torch.Tensor) -> torch.Tensor:
        """In memory of its own."""
        into = empty(values.shape, values.dtype)
        self.run(([into], [values]))
        return into

    def follow(self, copies: Copies) -> list[Future[None]]:
        """Copy without waiting, as long as no more than `UNDERWAY_BYTES` were left to do; what is
        little is done when this returns."""
        num_bytes = _bytes_of(copies)
        if num_bytes < DIRECT_BYTES:
            copy(copies)
            return []
        if self._bytes > UNDERWAY_BYTES:
            wait(self._underway)  # who needs what was copied gets the error
            self._underway, self._bytes = [], 0
        started = self.start(copies)
        self._underway += started
        self._bytes += num_bytes
        return started


def finished(copies: Iterable[Future[None]]) -> None:
    """Wait for them.

    Raises:
        Exception: what a copy raised.
    """
    for future in copies:
        future.result()


def _without_team() -> None:
    """Else each thread would split its copies among an OpenMP team of its own, with a member for
    each core, that spins between copies."""
    torch.get_num_threads()  # the first call in a thread sets OpenMP's number, which we undo
    ctypes.CDLL(None).omp_set_num_threads(1)


def _bytes_of(copies: Copies) -> int:
    return sum(values.nbytes for values in copies[1])


def _parts(copies: Copies, number: int) -> list[Copies]:
    """At most `number`, of about the same size."""
    if number == 1:
        return [copies]
    into: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for one_into, one_rows in zip(*copies, strict=True):
        if one_rows.nbytes < PIECE_BYTES:
            into.append(one_into)
            rows.append(one_rows)
        else:
            into += one_into.chunk(number)
            rows += one_rows.chunk(number)
    return [(into[i::number], rows[i::number]) for i in range(min(number, len(into)))]
