# SPDX-License-Identifier: Apache-2.0
"""The captured rows of one step on their way from the arena to their requests."""

from typing import Any

import numpy as np
import torch

from vllm.v1.interventions import CapturedChunk
from vllm.v1.worker.capture_layout import Layout, LocalStream
from vllm.v1.worker.projection_table import ProjectionTable

Members = list[tuple[str, np.ndarray]]
"""(request id, int [n]: where in the batch its captured tokens are)."""


class Block:
    """The rows of all requests of one layout: site, then token.

    In the arena they lie in two parts, from `raw` on those of the sites that leave the device as
    they are, from `rest` on the others.
    """

    def __init__(self, layout: Layout, members: Members) -> None:
        self.layout = layout
        self.members = [(req_id, len(tokens)) for req_id, tokens in members]
        self.count = sum(count for _, count in self.members)
        self.num_raw = layout.num_raw * self.count
        self.num_rest = len(layout.sites) * self.count - self.num_raw
        self.raw = self.rest = 0

    def rows(self) -> np.ndarray:
        """int32 [sites, count]: the arena row of each."""
        rows = np.arange(self.num_raw + self.num_rest, dtype=np.int32)
        rows[: self.num_raw] += self.raw
        rows[self.num_raw :] += self.rest - self.num_raw
        return rows.reshape(-1, self.count)

    def start(self, place: int) -> int:
        """The first arena row of a site."""
        base = self.raw if place < self.layout.num_raw else self.rest - self.num_raw
        return base + place * self.count


class StepRows:
    """The rows of one step, for `ModelRunnerOutput`.

    On a GPU the copy to pinned memory is in flight when this object is handed on; reading or
    pickling it waits for the copy.

    Args:
        version: of the global steering that the step runs under.
        groups: the requests of each layout; a request is in one.
    """

    def __init__(self, version: int, groups: dict[Layout, Members]) -> None:
        self._version = version
        self.blocks = [Block(layout, members) for layout, members in groups.items()]
        row = 0
        for block in self.blocks:
            block.raw, row = row, row + block.num_raw
        self._num_raw = row
        for block in self.blocks:
            block.rest, row = row, row + block.num_rest
        self._chunks: dict[str, CapturedChunk] | None = None
        self._later: list[StepRows] = []
        self._event: torch.cuda.Event | None = None

    def take_positions(self, positions: torch.Tensor, token_index: torch.Tensor) -> None:
        """Keep the positions of the captured tokens: int [n], in block order."""
        self._positions = positions[token_index.long()].long()

    def take_rows(self, arena: torch.Tensor, projections: ProjectionTable) -> None:
        self._scores = [
            [self._scores_of(block, stream, arena, projections) for stream in block.layout.streams]
            for block in self.blocks
        ]
        if arena.is_cuda:
            # On the main stream: the next step cannot overwrite rows before they are copied.
            self._rows = arena[: self._num_raw].to("cpu", non_blocking=True)
            self._positions = self._positions.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._rows = arena[: self._num_raw].clone()

    def _scores_of(
        self, block: Block, stream: LocalStream, arena: torch.Tensor, projections: ProjectionTable
    ) -> torch.Tensor | None:
        """float32 [sites, count, k] on the host; None for rows as they are."""
        if stream.projection is None:
            return None
        shape = (len(stream.places), block.count, stream.projection[1])
        scores = torch.empty(shape, pin_memory=arena.is_cuda)
        done = 0
        for place, number in stream.runs:
            rows = arena[block.start(place) :][: number * block.count]
            out = scores[done : done + number].flatten(0, 1)
            projections.scores(rows, stream.projection, out)
            done += number
        return scores

    def _resolve(self) -> dict[str, CapturedChunk]:
        if self._chunks is None:
            self._wait()
            self._chunks = {}
            positions, seen = self._positions.numpy(), 0
            for block, scores in zip(self.blocks, self._scores, strict=True):
                rows = self._rows[block.raw : block.raw + block.num_raw]
                rows = rows.view(block.layout.num_raw, block.count, self._rows.shape[1])
                streams = [
                    _raw(rows, stream) if of is None else of
                    for stream, of in zip(block.layout.streams, scores, strict=True)
                ]
                column = 0
                for req_id, count in block.members:
                    mine = slice(column, column := column + count)
                    self._chunks[req_id] = CapturedChunk(
                        positions[seen : (seen := seen + count)],
                        [values[:, mine] for values in streams],
                        self._version,
                    )
        return self._chunks

    def join(self, later: "StepRows") -> None:
        """Add the same step's rows of a later pipeline stage, whose sites follow in each stream."""
        self._later.append(later)

    def of(self, request_id: str) -> CapturedChunk | None:
        """Views of the step's rows, which keep all of them in memory; copies where the rows of
        several stages were joined."""
        chunk = self._resolve().get(request_id)
        for later in self._later:
            more = later.of(request_id)
            if chunk is not None and more is not None:
                assert np.array_equal(chunk.positions, more.positions)
                pairs = zip(chunk.values, more.values, strict=True)
                values = [torch.cat(pair) for pair in pairs]
                chunk = CapturedChunk(chunk.positions, values, chunk.version)
            chunk = chunk or more
        return chunk

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def __getstate__(self) -> dict[str, Any]:
        # The step's tensors whole, without a copy; the receiver cuts them.
        self._wait()
        return {**self.__dict__, "_chunks": None}


def _raw(rows: torch.Tensor, stream: LocalStream) -> torch.Tensor:
    """The stream's part of [sites, count, hidden]; a view where its sites are neighbours."""
    if len(stream.runs) == 1:
        [(first, number)] = stream.runs
        return rows[first : first + number]
    return rows[list(stream.places)]
