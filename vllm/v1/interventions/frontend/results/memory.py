# SPDX-License-Identifier: Apache-2.0
"""Memory that rows are copied to in the process that reads them."""

import threading
from collections.abc import Sequence
from math import prod

import torch

from vllm.v1.capture.copies import empty
from vllm.v1.capture.transport.landing import Neighbours, Room, own_memory

KEPT_BYTES = 1 << 17
"""The size from which memory is kept: for less, the C library has some without the kernel."""


class KeptMemory:
    """Memory for rows, of any content, which is kept for further ones when results let go of it:
    the kernel takes several times longer to give new memory than a copy to it does. For use from
    any thread."""

    def __init__(self) -> None:
        self.most = 0
        """The bytes that may be kept, when the first are taken."""
        self._room: Room | None = None
        self._taking = threading.Lock()

    def of_rows(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for rows of all sites together."""
        taken = self.of_sites(1, shape, dtype)
        return taken[0].each[0] if taken else empty(shape, dtype)

    def of_sites(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> list[Neighbours]:
        """Return memory that is kept for the rows of sites, [*shape] each, of each alone; none if
        they are few, or if there is none left."""
        size = prod(shape) * dtype.itemsize
        if number * size < KEPT_BYTES:
            return []
        with self._taking:
            if self._room is None and self.most:
                self._room = Room(own_memory(self.most))
            taken = self._room.take_each(size, number) if self._room is not None else []
        return [
            Neighbours(
                together[:, :size].view(dtype).unflatten(1, shape),
                [one[:size].view(dtype).view(*shape) for one in each],
            )
            for together, each in taken
        ]
