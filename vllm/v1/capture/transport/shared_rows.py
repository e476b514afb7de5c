# SPDX-License-Identifier: Apache-2.0
"""Large tensors of an engine core's messages go through memory that it shares with its frontends.

A socket copies what it is given twice, in one thread of each process; rows of all layers of a full
batch are more than that can carry. So the engine core copies them once into anonymous memory that
both processes have, and the message says where they are. The frontend's tensors are views: when the
last one of a message's tensor is gone, its place is free again. What finds no place in time goes by
the socket, as if there were no such memory.
"""

import mmap
import os
import time
import weakref
from bisect import insort
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from vllm.config.capture import CaptureConfig
from vllm.v1.capture.transport.copies import CopyThreads
from vllm.v1.interventions.plan import dtype_of
from vllm.v1.serial_utils import OOBTensorConsumer

LEAST_BYTES = 1 << 20
"""The size of the smallest tensor that is worth a place."""
SHARED_BYTES = 1 << 30
"""The least size of the memory. It is more than a frontend keeps before it copies rows
(`vllm.v1.interventions.frontend.row_copier`) and while it does. The kernel gives memory as it is
first used, so the lowest place that is free is taken."""
STEPS = 3
"""The number of steps whose rows fit, however many rows they have."""
SOCKET_BYTES_A_SECOND = 1 << 30
"""The rate of a socket, about (`python -m benchmarks.transport` measures it)."""
PLACES = 4096
"""The number of places. At the start of the memory is a byte for each, 1 while it is taken."""


class _Taken(NamedTuple):
    """A place in use: its number, and its first byte and end after the places' bytes."""

    place: int
    first: int
    end: int


def share_rows(config: CaptureConfig, output_paths: Sequence[str]) -> "SharedRows | None":
    """Make the shared memory for the encoder of an engine core.

    Returns:
        None where nothing is captured, or where a frontend may be on another host.
    """
    local = all(path.startswith("ipc://") for path in output_paths)
    if not config.enabled or not local:
        return None
    return SharedRows(max(SHARED_BYTES, STEPS * config.capture_buffer_bytes))


class SharedRows(OOBTensorConsumer):
    """The engine core's side of the memory. It alone takes places; frontends give them back.

    Args:
        size: how many bytes there are for tensors.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: list[_Taken] = []
        """The places in use, sorted by `first`; some may have been given back."""
        self._file: IO[bytes] | None = None

    def new_message(self) -> None:
        """Do nothing: a tensor need not know its message."""

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Copy `tensor` into the memory and say where; None if it goes by the socket."""
        if tensor.nbytes < LEAST_BYTES or not tensor.is_cpu:
            return None
        if self._file is None:
            self._file = self._open()
        taken = self._wait_for(tensor.nbytes)
        if taken is None:
            return None
        into = self._memory[taken.first : taken.first + tensor.nbytes].view(tensor.dtype)
        self._threads.run(([into.view(tensor.shape)], [tensor]))
        return {
            "pid": os.getpid(),
            "fd": self._file.fileno(),
            "place": taken.place,
            "first": taken.first,
        }

    def _open(self) -> IO[bytes]:
        """Make the memory, when the first tensor comes."""
        file = os.fdopen(os.memfd_create("vllm-captured-rows"), "r+b")
        file.truncate(PLACES + self._size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self._flags = memory[:PLACES]
        self._memory = torch.from_numpy(memory[PLACES:])
        self._threads = CopyThreads("shared-rows")
        return file

    def _wait_for(self, size: int) -> _Taken | None:
        """Take a place, waiting for one only as long as the socket would need for the tensor."""
        until = time.monotonic() + size / SOCKET_BYTES_A_SECOND
        while (taken := self._take(size)) is None and self._taken and time.monotonic() < until:
            time.sleep(0.001)
        return taken

    def _take(self, size: int) -> _Taken | None:
        """Take the lowest place of at least `size` bytes; None if there is none."""
        self._taken = [taken for taken in self._taken if self._flags[taken.place]]
        size = -(-size // 64) * 64
        first = 0
        for taken in self._taken:
            if taken.first - first >= size:
                break
            first = taken.end
        if first + size > self._size or len(self._taken) == PLACES:
            return None
        place = int(self._flags.argmin())
        self._flags[place] = 1
        taken = _Taken(place, first, first + size)
        insort(self._taken, taken, key=lambda taken: taken.first)
        return taken


class RowsOfOthers:
    """A frontend's side of the memory, for its decoder."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor:
        """Return a view of a tensor. Its place is free when nobody has a view of it any more."""
        memory = self._memory_of(meta["pid"], meta["fd"])
        of = dtype_of(dtype)
        first = PLACES + meta["first"]
        # An array of its own, which the views of it keep alive, and nobody else.
        values = memory[first : first + of.itemsize * int(np.prod(shape))]
        weakref.finalize(values, memory.__setitem__, meta["place"], 0).atexit = False
        return torch.from_numpy(values).view(of).view(shape)

    def _memory_of(self, pid: int, fd: int) -> np.ndarray:
        """Map an engine core's memory. It has no name, and goes when no process uses it."""
        if (pid, fd) not in self._memory:
            with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
                self._memory[pid, fd] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        return self._memory[pid, fd]
