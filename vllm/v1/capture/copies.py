# SPDX-License-Identifier: Apache-2.0
"""Rows are copied on the host by several threads where one would be too slow.

A thread that runs Python takes the interpreter from the engine's loop, so a thread's work is one
call that lets go of it.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate, groupby

import numpy as np
import torch

THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
"""Number of threads that copy. Fresh memory costs a core more time than the copy, so it takes
several to keep up with a GPU."""
PIECE_BYTES = 4 << 20
"""The bytes for which another thread is woken."""
DIRECT_BYTES = 1 << 20
"""The bytes below which the caller copies itself."""
JOINED_BYTES = PIECE_BYTES
"""The bytes that are worth threads of their own, where rows are joined that somebody waits for."""
TEAM_NUMBERS = 1 << 15
"""The numbers of a tensor from which torch shares its copy among threads."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""
UNDERWAY_BYTES = 512 << 20
"""The most bytes of copies underway that nobody waits for."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""A list of tensors to copy into, and one of the tensors to copy there, in the same order."""
Filled = tuple[np.ndarray, Sequence[np.ndarray]]
"""A place for rows, and the rows to copy there one after the other; all made by `integers`."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for rows, of any content.

    It is numpy's, which asks for huge pages: they come several times faster than small ones.
    """
    return torch.from_numpy(np.empty(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def copy(copies: Copies) -> None:
    """Copy in this thread, in one call."""
    if copies[0]:
        torch._foreach_copy_(*copies)


def copy_alone(copies: Copies) -> None:
    """Copy in a thread that is not of `CopyThreads`.

    torch shares a large copy among as many threads as there are cores, and waits for each of them:
    where workers keep cores busy, that took 8 ms for half a megabyte.
    """
    if max((rows.numel() for rows in copies[1]), default=0) < TEAM_NUMBERS:
        copy(copies)
        return
    for into, rows in zip(*copies, strict=True):
        integers(into)[...] = integers(rows)


def integers(tensor: torch.Tensor) -> np.ndarray:
    """Return the same memory for numpy, which lacks bfloat16."""
    return tensor.view(_INTEGERS[tensor.itemsize]).numpy()


def steps_into(places: Sequence[np.ndarray], steps: Iterable[Sequence[np.ndarray]]) -> list[Filled]:
    """Put the rows of steps one after the other.

    Args:
        places: for some sites each, [rows of all steps, its sites, width].
        steps: of each, what several senders have of it: [rows, its sites, width].
    """
    filled, row = list[Filled](), 0
    for counts, alike in groupby(steps, lambda step: [part.shape[1] for part in step]):
        some = list(alike)
        stop_row, first = row + sum(len(step[0]) for step in some), 0
        for place in places:
            for sender, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
                begin, stop = end - count, min(end, first + place.shape[1])
                if (start := max(begin, first)) < stop:
                    parts = [step[sender][:, start - begin : stop - begin] for step in some]
                    filled.append((place[row:stop_row, start - first : stop - first], parts))
            first += place.shape[1]
        row = stop_row
    return filled


def fill(filled: list[Filled], threads: "CopyThreads | None" = None) -> None:
    """Copy rows where they are to be: this thread alone, or several where they are many.

    Args:
        threads: without them some are started, which takes longer than to copy 16 MiB.
    """
    if sum(place.nbytes for place, _ in filled) < JOINED_BYTES:
        for place, rows in filled:
            np.concatenate(rows, out=place)
    else:
        (threads or CopyThreads("joined-rows")).run(copies_of(filled))


def copies_of(filled: Iterable[Filled]) -> Copies:
    """Return the copies that `fill` would do."""
    into: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for place, parts in filled:
        into += torch.from_numpy(place).split([len(part) for part in parts])
        rows += map(torch.from_numpy, parts)
    return into, rows


def joined(parts: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """Return rows one after the other, [sum of n, ...], copied by this thread alone, or by several
    where they are many.

    Args:
        parts: [n, ...], at least one; alike but for n.
        axis: which one n is of.
    """
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    values = empty(shape, parts[0].dtype)
    place, *rows = (integers(one).swapaxes(0, axis) for one in (values, *parts))
    fill([(place, rows)])
    return values


class CopyThreads:
    """The threads that copy for one owner.

    Args:
        name: the threads' name.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(THREADS, name, initializer=_without_team)
        self._underway: deque[tuple[list[Future[None]], int]] = deque()
        """Copies that nobody waits for, and their bytes, the oldest first."""
        self._bytes = 0
        """All of theirs."""

    def start(self, copies: Copies) -> list[Future[None]]:
        """Start copying in as many threads as the size is worth; return a future for each."""
        parts = _parts(copies, min(THREADS, 1 + _bytes_of(copies) // PIECE_BYTES))
        return [self._threads.submit(copy, part) for part in parts]

    def run(self, copies: Copies) -> None:
        """Copy, and wait until it is done."""
        if _bytes_of(copies) < DIRECT_BYTES:
            copy_alone(copies)
        else:
            finished(self.start(copies))

    def follow(self, copies: Copies) -> list[Future[None]]:
        """Start copying, and do not wait for it.

        A small copy is done when this returns. If more than `UNDERWAY_BYTES` are underway, the
        oldest of these are waited for first.

        Returns:
            The futures of the copies that are not done.
        """
        num_bytes = _bytes_of(copies)
        if num_bytes < DIRECT_BYTES:
            copy_alone(copies)
            return []
        while self._bytes > UNDERWAY_BYTES:
            oldest, done = self._underway.popleft()
            wait(oldest)  # who needs what was copied gets the error
            self._bytes -= done
        started = self.start(copies)
        self._underway.append((started, num_bytes))
        self._bytes += num_bytes
        return started


def finished(copies: Iterable[Future[None]]) -> None:
    """Wait for copies to be done.

    Raises:
        Exception: a copy failed with it.
    """
    for future in copies:
        future.result()


def _without_team() -> None:
    """Keep OpenMP from starting threads for this one.

    Else each thread would split its copies among a team of its own, with a member for each core,
    that spins between copies.
    """
    torch.get_num_threads()  # the first call in a thread sets OpenMP's number, which we undo
    ctypes.CDLL(None).omp_set_num_threads(1)


def _bytes_of(copies: Copies) -> int:
    return sum(values.nbytes for values in copies[1])


def _parts(copies: Copies, number: int) -> list[Copies]:
    """Split copies into at most `number` parts of about the same size."""
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
