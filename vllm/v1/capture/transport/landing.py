# SPDX-License-Identifier: Apache-2.0
"""Captured rows land once: their worker's device writes them where every process of the host reads.

A landing is anonymous shared memory of a worker. A step's rows take a place in it; what goes from
process to process is where they are. Whoever gets that has a view of the place, and the place is
free when nobody has one any more. A process that passes a place on keeps it until its receiver
has given it back, which a byte that both share tells. Rows that find no place, or whose receiver is
on another host, are ordinary memory, and go by the messages themselves.
"""

import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from vllm.v1.interventions.plan import dtype_of
from vllm.v1.serial_utils import OOBTensorConsumer

LEASES = 1 << 16
"""The most tensors that a process has passed on and not got back."""
ALIGNMENT = 64
"""Bytes that the beginning of a place is a multiple of."""

_MAP_NORESERVE = 0x4000
"""Python names it from 3.13 on."""


class Address(NamedTuple):
    """Bytes of shared memory, as every process of the host finds them."""

    pid: int
    fd: int
    first: int
    size: int


class Reference(NamedTuple):
    """A place that was passed on, until the byte at `lease` is 0."""

    place: Address
    lease: Address


class Places:
    """The places of landings that this process has views of."""

    def __init__(self) -> None:
        self._viewed = self._dropped = 0
        self._drops: deque[int] = deque()
        """Bytes of places that were given back and are not in `_dropped` yet. A finalizer may run
        in any thread and in the middle of anything, so it only appends."""
        self._mapped: dict[tuple[int, int], np.ndarray] = {}
        """Shared memory, by the process that made it and its file there."""
        self._borrowed: WeakValueDictionary[Address, np.ndarray] = WeakValueDictionary()
        self._own_leases: tuple[IO[bytes], np.ndarray] | None = None
        self._lent: dict[int, torch.Tensor] = {}
        """Lease -> the tensor that is passed on by it."""
        self._leased = np.zeros(0, np.uint8)
        """1 for each lease in `_lent`, up to the highest that there was."""
        self._lends = threading.Lock()
        """Held by who changes these: messages are written by a thread of their own."""

    @property
    def held(self) -> int:
        """The bytes of all places that this process has views of."""
        while self._drops:
            self._dropped += self._drops.popleft()
        return self._viewed - self._dropped

    @property
    def size(self) -> int:
        """The bytes of all landings that it knows."""
        return sum(len(memory) for memory in self._mapped.copy().values())

    def address_of(self, tensor: torch.Tensor) -> Address | None:
        """Return the place that a tensor is a view of; None if it is ordinary memory."""
        storage = tensor.untyped_storage()
        for (pid, fd), memory in self._mapped.copy().items():
            first = storage.data_ptr() - memory.ctypes.data
            if 0 <= first < len(memory):
                return Address(pid, fd, first, storage.nbytes())
        return None

    def _count(self, place: np.ndarray, give_back: Callable[[], object]) -> None:
        """Count a place, uint8 [size], an array of its own that the views of it keep alive, and
        nobody else. `give_back` is called when none is left."""
        self._viewed += place.nbytes
        weakref.finalize(place, self._drop, place.nbytes, give_back).atexit = False

    def _drop(self, size: int, give_back: Callable[[], object]) -> None:
        self._drops.append(size)
        give_back()

    def lend(self, tensor: torch.Tensor) -> Reference | None:
        """Pass a tensor's place on to one other process of this host, which calls `borrow`.

        Returns:
            None if the tensor is ordinary memory.
        """
        place = self.address_of(tensor)
        with self._lends:
            if place is None or len(self._lent) == LEASES:
                return None
            if self._own_leases is None:
                self._own_leases = open_memory("vllm-row-leases", LEASES)
            file, flags = self._own_leases
            lease = int(flags.argmin())
            if lease >= len(self._leased):
                more = np.zeros(lease + 1 - len(self._leased), np.uint8)
                self._leased = np.concatenate([self._leased, more])
            flags[lease] = self._leased[lease] = 1
            self._lent[lease] = tensor
        return Reference(place, Address(os.getpid(), file.fileno(), lease, 1))

    def reclaim(self) -> None:
        """Let go of the places that their receivers have given back."""
        with self._lends:
            if self._own_leases is not None:
                flags = self._own_leases[1][: len(self._leased)]
                for lease in (self._leased > flags).nonzero()[0].tolist():
                    self._leased[lease] = 0
                    del self._lent[lease]

    def borrow(self, reference: Reference) -> torch.Tensor:
        """Return a place that another process passed on, uint8 [size]."""
        place, lease = reference
        flags = self._map(lease)
        array = self._borrowed.get(place)
        if array is None:
            array = self._map(place)[place.first : place.first + place.size]
            self._count(array, lambda: flags.__setitem__(lease.first, 0))
            self._borrowed[place] = array
        else:
            flags[lease.first] = 0  # it is this process's already, as long as that is in use
        return torch.from_numpy(array)

    def _map(self, at: Address) -> np.ndarray:
        """Map another process's memory. It has no name, and goes when no process uses it."""
        key = at.pid, at.fd
        if key not in self._mapped:
            with open(f"/proc/{at.pid}/fd/{at.fd}", "r+b") as file:
                self._mapped[key] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        return self._mapped[key]


class ReceivedPlaces:
    """Places of a frontend's rows, for the decoder of an engine core's messages."""

    def __init__(self) -> None:
        self.steps, self.kept = Places(), Places()

    @property
    def places(self) -> list[Places]:
        """Memory in which rows lie: that of steps, and what is kept."""
        return [self.steps, self.kept]

    def __call__(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> torch.Tensor:
        """Return a tensor that a `RowEncoder` passed on."""
        place, lease = meta["place"], meta["lease"]
        places = self.kept if meta["kept"] else self.steps
        rows = places.borrow(Reference(Address(*place), Address(*lease))).view(dtype_of(dtype))
        return rows.as_strided(shape, meta["stride"], meta["offset"])


class RowEncoder(OOBTensorConsumer):
    """Has the encoder of an engine core's messages pass places on, in place of their bytes.

    Args:
        kept: rows of cached blocks, in memory of the engine core; None if none are kept.
    """

    def __init__(self, kept: Places | None = None) -> None:
        self.steps: Places | None = None
        """Places in which the rows of steps lie; None while there are none."""
        self._kept = kept

    @property
    def places(self) -> list[Places]:
        """Memory in which rows lie: that of steps, and what is kept."""
        return [places for places in (self.steps, self._kept) if places is not None]

    def new_message(self) -> None:
        """Let go of what receivers have given back."""
        for places in self.places:
            places.reclaim()

    def __call__(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Return where `tensor` is; None if it has to go by the message."""
        for places in self.places:
            if (reference := places.lend(tensor)) is not None:
                break
        else:
            return None
        return {
            "kept": places is self._kept,
            "place": reference.place,
            "lease": reference.lease,
            "stride": tensor.stride(),
            "offset": tensor.storage_offset(),
        }

    def for_frontends(self, output_paths: Sequence[str]) -> "RowEncoder | None":
        """Return itself where all frontends are on this host, by the paths of their sockets."""
        return self if all(path.startswith("ipc://") for path in output_paths) else None


class Neighbours(NamedTuple):
    """Places that lie one after the other."""

    together: torch.Tensor
    """All of them, uint8 [places, bytes], for as long as none is free again."""
    each: list[torch.Tensor]
    """Each, uint8 [bytes]."""


class Room:
    """Memory that is taken in places. The lowest one that is free is taken first, so that memory
    which was used is used again.

    Args:
        memory: uint8, all of it.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        """All its bytes."""
        self.ready = len(memory)
        """Number of them that can be taken, from the first one on."""
        self._gaps = [(0, len(memory))]
        """The first byte and the end of all that is not in use, sorted."""
        self._free: deque[tuple[int, int]] = deque()
        """Places given back that are not in `_gaps` yet."""

    def _find(self, size: int, number: int = 1) -> tuple[int, int] | None:
        """Take places of `size` bytes, until they are in `_free`: as many of `number` as lie next
        to each other where the first one does; None if there is none."""
        while self._free:
            self._give_back(*self._free.popleft())
        for i, (first, end) in enumerate(self._gaps):
            if fit := max(0, min(end, self.ready) - first) // size:
                stop = first + size * min(fit, number)
                self._gaps[i : i + 1] = [(stop, end)] if stop < end else []
                return first, stop
        return None

    def _give_back(self, first: int, end: int) -> None:
        at = bisect(self._gaps, (first, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at and self._gaps[at - 1][1] == first:
            at -= 1
            first = self._gaps.pop(at)[0]
        self._gaps.insert(at, (first, end))

    def take_each(self, size: int, number: int) -> list[Neighbours]:
        """Take places of at least `size` bytes, of any content; none if there are not so many. Each
        is free again when nobody has a view of it."""
        size, taken = aligned(size), list[Neighbours]()
        while number and (found := self._find(size, number)):
            each = []
            for first in range(*found, size):
                array = self.memory[first : first + size]
                weakref.finalize(array, self._free.append, (first, first + size)).atexit = False
                each.append(torch.from_numpy(array))
            together = self.memory[slice(*found)].reshape(len(each), size)
            taken.append(Neighbours(torch.from_numpy(together), each))
            number -= len(each)
        return [] if number else taken


class Landing(Places, Room):
    """A worker's landing. It alone takes places.

    Args:
        size: its bytes.
    """

    def __init__(self, size: int) -> None:
        Places.__init__(self)
        self._file, memory = open_memory("vllm-captured-rows", size)
        Room.__init__(self, memory)
        self._mapped[os.getpid(), self._file.fileno()] = memory

    @property
    def size(self) -> int:
        """The bytes that can be taken."""
        return self.ready

    def take(self, size: int) -> torch.Tensor | None:
        """Take a place of at least `size` bytes, of any content, uint8, which other processes find;
        None if there is none. It is free again when nobody has a view of it."""
        if self._lent:
            self.reclaim()
        taken = self._find(aligned(size))
        if taken is None:
            return None
        array = self.memory[slice(*taken)]
        self._count(array, lambda: self._free.append(taken))
        return torch.from_numpy(array)


def aligned(size: int) -> int:
    """The bytes of a place for at least so many, and at least one."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def open_memory(name: str, size: int) -> tuple[IO[bytes], np.ndarray]:
    """Make anonymous memory that other processes can map: its file, and the bytes, all 0.

    The kernel gives memory to it as it is first used.
    """
    file = os.fdopen(os.memfd_create(name), "r+b")
    file.truncate(size)
    memory = mmap.mmap(file.fileno(), 0) if size else b""
    return file, np.frombuffer(memory, np.uint8)


def own_memory(size: int) -> np.ndarray:
    """Return memory of this process alone, uint8 [size], which the kernel gives as it is first
    used: in huge pages, which come several times faster than small ones. [0] where it refuses, as
    it may where it promises no more than it has."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags)
    except (OSError, ValueError):  # ValueError for nothing
        return np.empty(0, np.uint8)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
