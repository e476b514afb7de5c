# SPDX-License-Identifier: Apache-2.0
"""The captured rows of a step on their way from a worker's device to its landing."""

from collections.abc import Iterator

import torch

from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.step_rows import Block, StepRows
from vllm.v1.interventions.worker.making.maker import Captured, Material
from vllm.v1.interventions.worker.making.makers import MAKERS
from vllm.v1.interventions.worker.rows.pinning import PIECE_BYTES


class Outbox:
    """Writes the rows of steps to a landing; on a GPU on a stream of its own, while the next steps
    run.

    What is sent after a forward leaves from a second buffer of half the size, because the next step
    writes to the arena: a move on the device takes next to no time. What is sent while its forward
    goes on leaves from the arena itself, as does what has no room there, and the next forward waits
    for that.

    Args:
        landing: None on a rank that sends nothing.
        material: has the arena.
        sleeps: whether who waits for rows sleeps meanwhile, and does not spin beside the thread
            that launches kernels; upstream waits for a step's tokens so.
    """

    def __init__(
        self,
        landing: Landing | None,
        material: Material,
        sleeps: bool = False,
    ) -> None:
        arena = material.arena
        self._arena, self._landing = arena, landing
        self._cuda, self._sleeps = arena.device.type == "cuda", sleeps
        self.makers = {making: maker(material) for making, maker in MAKERS.items()}
        self._straight: list[torch.cuda.Event] = []
        """Events that mark that what leaves from the arena itself has arrived."""
        self._moved = 0
        """Bytes of this step in the second buffer."""
        self._sent: torch.cuda.Event | None = None
        """Event that marks that the last of what leaves from the second buffer has arrived."""
        self._rows, self._row_bytes = _bytes_of(arena), arena.shape[1] * arena.itemsize
        if self._cuda and landing is not None:
            self._leaving = torch.empty_like(self._rows[: len(self._rows) // 2])
            self._stream = torch.cuda.Stream(arena.device)
            self._left = torch.cuda.Event()

    def next_step(self) -> None:
        """Have the forward that comes next wait for what leaves from the arena itself."""
        for arrived in self._straight:
            torch.cuda.current_stream().wait_event(arrived)
        self._straight, self._moved = [], 0

    def send(self, step: StepRows, captured: Captured, early: bool = False) -> None:
        """Give a step's result the rows that its forward left in the arena.

        Args:
            early: whether the forward goes on, and will have ended much later than these arrive.
        """
        assert self._landing is not None
        blocks = step.blocks
        *others_at, rows_at = blocks.parts
        others = [captured.positions]
        if len(others_at) > 1:
            own = captured.of_blocks(blocks)
            others += [values for block, at in own for values in self._made_of(block, at)]
        size = blocks.num_bytes
        memory = self._landing.take(size)
        places = None if memory is None else self._landing
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        sent = torch.cuda.Event(blocking=self._sleeps) if self._cuda else None
        step.fill(memory, places, sent)
        first = blocks.first * self._row_bytes
        stop = first + rows_at.stop - rows_at.first
        rows = self._rows[first:stop]
        if sent is None:
            for part, values in zip(blocks.parts, (*map(_bytes_of, others), rows), strict=True):
                memory[part.first : part.stop].copy_(values)
            return
        main = torch.cuda.current_stream()
        begin, end = self._moved, self._moved + len(rows)
        moves = not early and end <= len(self._leaving)
        if moves:
            if not begin and self._sent is not None:
                main.wait_event(self._sent)
            rows = self._leaving[begin:end].copy_(rows)
            self._moved, self._sent = end, sent
        else:
            self._straight.append(sent)
        self._left.record(main)
        self._stream.wait_event(self._left)
        with torch.cuda.stream(self._stream):
            self._copy(memory, rows_at.first, rows)
            for part, values in zip(others_at, others, strict=True):
                self._copy(memory, part.first, _bytes_of(values))
                values.record_stream(self._stream)
            sent.record()

    def _copy(self, memory: torch.Tensor, first: int, values: torch.Tensor) -> None:
        """Copy bytes to a step's memory, from byte `first` on, in parts that each lie in one of the
        pieces that the GPU knows."""
        assert self._landing is not None
        start = memory.data_ptr() - self._landing.memory.ctypes.data + first
        done = 0
        while done < len(values):
            stop = min(len(values), done + PIECE_BYTES - (start + done) % PIECE_BYTES)
            memory[first + done : first + stop].copy_(values[done:stop], non_blocking=True)
            done = stop

    def _made_of(self, block: Block, captured: Captured) -> Iterator[torch.Tensor]:
        """Yield what leaves of a block's rest, stream by stream.

        Args:
            captured: the block's tokens.
        """
        for stream in block.group.streams:
            if not stream.is_raw:
                yield self.makers[type(stream.making)].make(block, stream, captured)

    def take_part(self, step: StepRows, captured: Captured) -> None:
        """Make what all tensor-parallel ranks make together, in the order in which the first rank
        does, which sends it."""
        for block, at in captured.of_blocks(step.blocks):
            for stream in block.group.streams:
                if stream.making.shared:
                    self.makers[type(stream.making)].make(block, stream, at)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [n]; a view if the tensor is contiguous."""
    return values.reshape(-1).view(torch.uint8)
