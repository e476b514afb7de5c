# SPDX-License-Identifier: Apache-2.0
"""The captured rows of a step on their way from a worker's device to its host."""

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.step_rows import Block, StepRows
from vllm.v1.interventions.worker.projection_table import ProjectionTable


class Outbox:
    """Copies a step's rows to the host on a stream of its own, while the next steps run.

    They leave from a second buffer, because the next step writes to the arena: a move on the
    device takes next to no time.

    Args:
        arena: [rows, hidden], on a GPU.
    """

    def __init__(self, arena: torch.Tensor) -> None:
        self._rows = torch.empty_like(arena)
        self._stream = torch.cuda.Stream(arena.device)
        self._sent: torch.cuda.Event | None = None

    def send(
        self, rows: torch.Tensor, *others: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        """Start to copy `rows` of the arena, and `others` that are used no more, to the host.

        Returns:
            The host's tensors in this order, and the event after which they have the values.
        """
        main = torch.cuda.current_stream()
        if self._sent is not None:
            main.wait_event(self._sent)
        leaving = self._rows[: len(rows)]
        leaving.copy_(rows)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            host = [tensor.to("cpu", non_blocking=True) for tensor in (leaving, *others)]
            for tensor in others:
                tensor.record_stream(self._stream)
            self._sent = torch.cuda.Event()
            self._sent.record()
        return host, self._sent


def send_rows(
    step: StepRows,
    arena: torch.Tensor,
    positions: torch.Tensor,
    projections: ProjectionTable,
    outbox: Outbox | None,
) -> None:
    """Give a step's result the rows that its forward left in the arena.

    Args:
        step: filled here.
        arena: [rows, hidden] on the device.
        positions: int64 [n] on the device, the captured tokens' in block order.
        outbox: None on a CPU.
    """
    scores = [
        _scores_of(block, stream, arena, projections)
        for block in step.blocks.all
        for stream in block.group.streams
        if stream.projection is not None
    ]
    rows = arena[: step.blocks.num_raw]
    if outbox is None:
        step.fill(rows.clone(), positions, scores)
        return
    (rows, positions, *scores), copied = outbox.send(rows, positions, *scores)
    step.fill(rows, positions, scores, copied)


def _scores_of(
    block: Block, stream: LocalStream, arena: torch.Tensor, projections: ProjectionTable
) -> torch.Tensor:
    """The scores of a projected stream, float32 [count, sites, k] on the device."""
    assert stream.projection is not None
    shape = (block.count, len(stream.places), stream.projection[1])
    scores = torch.empty(shape, device=arena.device)
    done = 0
    for first, number in stream.runs:
        out = scores[:, done : done + number]
        projections.scores(block.of(arena, first, number), stream.projection, out)
        done += number
    return scores
