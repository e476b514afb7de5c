# SPDX-License-Identifier: Apache-2.0
"""The captured rows of one step on their way from the arena to their requests."""

from collections.abc import Collection
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch

from vllm.v1.interventions.capture_groups import CaptureGroup, LocalStream
from vllm.v1.interventions.messages import CapturedChunk

Members = list[tuple[str, np.ndarray]]
"""The requests of a group: (request id, int [n] places of its captured tokens in the batch)."""


class Block:
    """The rows of all requests of one capture group, those of a request next to each other.

    In the arena they lie in two parts, each token by token: from row `raw` on those of the sites
    that leave the device as they are, from row `rest` on those of the others.
    """

    def __init__(self, group: CaptureGroup, members: Members) -> None:
        self.group = group
        self.req_ids = [req_id for req_id, _ in members]
        self.counts = [len(tokens) for _, tokens in members]
        """Captured tokens of each request."""
        self.owners = list(zip(self.req_ids, self.counts, strict=True))
        self.count = sum(self.counts)
        self.num_raw = group.num_raw * self.count
        self.num_rest = len(group.sites) * self.count - self.num_raw
        self.raw = self.rest = 0

    def rows(self) -> np.ndarray:
        """The arena row of each token at each site: int32 [sites, count]."""
        raw = np.arange(self.num_raw, dtype=np.int32) + self.raw
        rest = np.arange(self.num_rest, dtype=np.int32) + self.rest
        return np.concatenate([raw.reshape(self.count, -1).T, rest.reshape(self.count, -1).T])

    def of(self, arena: torch.Tensor, first: int, number: int) -> torch.Tensor:
        """Rows of neighbouring sites, all of them raw or none: [count, number, hidden], a view.

        Args:
            arena: [rows, hidden].
            first: index into the group's sites of the first one.
        """
        at, num_sites = self.raw, self.group.num_raw
        if first >= num_sites:
            first -= num_sites
            at, num_sites = self.rest, len(self.group.sites) - num_sites
        rows = arena[at : at + self.count * num_sites]
        return rows.view(self.count, num_sites, -1)[:, first : first + number]


class Blocks:
    """Where the rows of a step lie in the arena; valid while nothing but positions changes.

    Args:
        groups: the requests of each capture group; a request is in one.
    """

    def __init__(self, groups: dict[CaptureGroup, Members]) -> None:
        self.all = [Block(group, members) for group, members in groups.items()]
        row = 0
        for block in self.all:
            block.raw, row = row, row + block.num_raw
        self.num_raw = row
        for block in self.all:
            block.rest, row = row, row + block.num_rest
        self.num_requests = sum(len(block.owners) for block in self.all)


class StepRows:
    """The rows of one step, for `ModelRunnerOutput`.

    On a GPU the copy to pinned memory is in flight when this object is handed on; reading or
    pickling it waits for the copy.

    Args:
        version: of the global steering that the step runs under.
    """

    def __init__(self, version: int, blocks: Blocks) -> None:
        self._version = version
        self.blocks = blocks
        self._parts: list[tuple[np.ndarray, list[torch.Tensor]]] | None = None
        self._singles: dict[str, int] | None = None
        self._chunks: dict[str, CapturedChunk] | None = None
        self._later: list[StepRows] = []
        self._event: torch.cuda.Event | None = None

    def fill(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        scores: list[torch.Tensor],
        copied: torch.cuda.Event | None = None,
    ) -> None:
        """Take what was captured, on the host.

        Args:
            rows: [blocks.num_raw, hidden], as they lay in the arena.
            positions: int64 [n], in block order.
            scores: float32 [count, sites, k] of each block's projected streams.
            copied: happens when all of these have arrived; None if they have.
        """
        self._rows, self._positions, self._scores, self._event = rows, positions, scores, copied

    def _whole(self) -> list[tuple[np.ndarray, list[torch.Tensor]]]:
        """All rows by block: int64 [count] positions, and [count, sites, width] of each stream."""
        if self._parts is None:
            self._wait()
            self._parts, positions, scores = [], self._positions.numpy(), iter(self._scores)
            for block in self.blocks.all:
                own, positions = positions[: block.count], positions[block.count :]
                values = [
                    _raw(block, self._rows, s) if s.projection is None else next(scores)
                    for s in block.group.streams
                ]
                self._parts.append((own, values))
        return self._parts

    def _resolve(self) -> dict[str, CapturedChunk]:
        if self._chunks is None:
            self._chunks = {}
            for block, (positions, values) in zip(self.blocks.all, self._whole(), strict=True):
                stops = accumulate(block.counts)
                at = [positions[b - n : b] for n, b in zip(block.counts, stops, strict=True)]
                # Views of all requests at once: of each by itself takes several times longer.
                parts = [v.split(block.counts) for v in values]
                for req_id, here, *mine in zip(block.req_ids, at, *parts, strict=True):
                    self._chunks[req_id] = CapturedChunk(here, mine, self._version)
        return self._chunks

    @property
    def packs(self) -> bool:
        """Whether `packed` may be used: not where several stages have a part of each row."""
        return not self._later

    def position(self, request_id: str) -> int | None:
        """The position of a request's only row, as in decoding; None if there are more, or `packs`
        is false."""
        if self._singles is None:
            self._singles = {}
            if not self.packs:
                return None
            for block, (positions, _) in zip(self.blocks.all, self._whole(), strict=True):
                if block.count == len(block.counts):
                    self._singles.update(zip(block.req_ids, positions.tolist(), strict=True))
                    continue
                for (name, count), stop in zip(block.owners, accumulate(block.counts), strict=True):
                    if count == 1:
                        self._singles[name] = int(positions[stop - 1])
        return self._singles.get(request_id)

    def packed(self, request_ids: Collection[str]) -> list[CapturedChunk]:
        """All rows of some requests as they lie here, neighbours as one chunk with its `owners`:
        nothing is cut that is to be sent together."""
        wanted = set(request_ids)
        chunks = []
        for block, (positions, values) in zip(self.blocks.all, self._whole(), strict=True):
            if len(wanted) == self.blocks.num_requests:
                chunks.append(CapturedChunk(positions, values, self._version, block.owners))
                continue
            start = 0
            for goes, run in groupby(block.owners, lambda owner: owner[0] in wanted):
                owners = list(run)
                stop = start + sum(count for _, count in owners)
                if goes:
                    cut = [v[start:stop] for v in values]
                    chunks.append(CapturedChunk(positions[start:stop], cut, self._version, owners))
                start = stop
        return chunks

    def join(self, later: "StepRows") -> None:
        """Add the same step's rows of a later pipeline stage, whose sites follow in each stream."""
        self._later.append(later)

    def of(self, request_id: str) -> CapturedChunk | None:
        """The rows of one request, None if it has none: views of the step's rows, which keep all of
        them in memory; copies where the rows of several stages were joined."""
        chunks = self._resolve() if self._chunks is None else self._chunks
        chunk = chunks.get(request_id)
        for later in self._later:
            more = later.of(request_id)
            if chunk is not None and more is not None:
                assert np.array_equal(chunk.positions, more.positions)
                pairs = zip(chunk.values, more.values, strict=True)
                values = [torch.cat(pair, dim=1) for pair in pairs]
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
        return {**self.__dict__, "_parts": None, "_singles": None, "_chunks": None}


def _raw(block: Block, rows: torch.Tensor, stream: LocalStream) -> torch.Tensor:
    """A stream's rows as they are, [count, sites, hidden]; a view if its sites are neighbours."""
    parts = [block.of(rows, *run) for run in stream.runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([rows.new_empty(block.count, 0, rows.shape[1]), *parts], dim=1)
