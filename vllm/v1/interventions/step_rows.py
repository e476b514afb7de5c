# SPDX-License-Identifier: Apache-2.0
"""The captured rows of one step on their way from the arena to their requests."""

from collections.abc import Collection
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.capture.transport.landing import Places, Reference
from vllm.v1.interventions.capture_groups import CaptureGroup, LocalStream
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import dtype_of

Members = list[tuple[str, np.ndarray]]
"""The requests of a group: (request id, int [n] places of its captured tokens in the batch)."""
KeyRanges = tuple[tuple[int, ...], ...]
"""Key ranges of one stream of a request, in the form of `Attention.ranges`."""


class Block:
    """The rows of all requests of one capture group, those of a request next to each other.

    In the arena they lie in two parts, each token by token: from row `raw` on those of the sites
    that leave the device as they are, from row `rest` on those of the others.
    """

    def __init__(self, group: CaptureGroup, members: Members) -> None:
        self.group = group
        self.counts = [len(tokens) for _, tokens in members]
        """Captured tokens of each request."""
        self.owners = [(req_id, len(tokens)) for req_id, tokens in members]
        self.names = [req_id for req_id, _ in members]
        self.count = sum(self.counts)
        self.num_raw = group.num_raw * self.count
        self.num_rest = group.rest_rows * self.count
        self.raw = self.rest = 0
        self.in_batch: list[int] = []
        """The place of each request in the batch."""
        self.ranges: list[list[KeyRanges]] = []
        """Key ranges of each request, for each stream that has any, where attention is read."""
        self.stop = 0
        """One past the last position that this step computes for these requests, or more."""

    def of(self, arena: torch.Tensor, first: int, number: int, begins: int = 0) -> torch.Tensor:
        """Rows of neighbouring sites of the residual stream, all of them raw or none: [count,
        number, hidden], a view.

        Args:
            arena: [rows, hidden], of the arena those from the row `begins` on.
            first: index into the group's sites of the first one.
        """
        at, num_sites = self.raw, self.group.num_raw
        if first >= num_sites:
            first -= num_sites
            at, num_sites = self.rest, self.group.rest_rows
        at -= begins
        rows = arena[at : at + self.count * num_sites]
        return rows.view(self.count, num_sites, -1)[:, first : first + number]

    def raw_of(self, arena: torch.Tensor, stream: LocalStream, begins: int) -> torch.Tensor:
        """A stream's rows as they are, [count, sites, hidden]; a view if its sites are neighbours.
        The rest is as for `of`."""
        if len(stream.runs) == 1:
            return self.of(arena, *stream.runs[0], begins)
        parts = [self.of(arena, *run, begins) for run in stream.runs]
        return torch.cat([arena.new_empty(self.count, 0, arena.shape[1]), *parts], dim=1)

    def heads(self, arena: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The heads of a stream, [count, sites * width].

        Args:
            columns: those of the stream, on the arena's device.
        """
        rest = arena[self.rest : self.rest + self.num_rest]
        return rest.view(self.count, -1).index_select(1, columns)


class Part(NamedTuple):
    """A part of a step's memory: its bytes [first, stop), and what they are."""

    first: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Blocks:
    """Places of the rows of a step in the arena; valid while nothing but positions changes.

    Args:
        groups: the requests of each capture group; a request is in one.
        first: the arena row in which they begin.
    """

    def __init__(self, groups: dict[CaptureGroup, Members], first: int = 0) -> None:
        self.all = [Block(group, members) for group, members in groups.items()]
        self.first = row = first
        for block in self.all:
            block.raw, row = row, row + block.num_raw
        self.num_raw = row - first
        for block in self.all:
            block.rest, row = row, row + block.num_rest
        self.stop = row
        """One past the last arena row."""
        self.names = frozenset(name for block in self.all for name, _ in block.owners)
        self.parts: list[Part] = []
        """Parts of a step's memory, once `lay_out` was called: int64 [n] positions in block order,
        what is made of rows on the device, and [num_raw, hidden] rows as they lay in the arena."""
        self.num_bytes = 0
        """Bytes of that memory."""

    def lay_out(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Set `parts`, for rows of this width and dtype."""
        made = [
            (_shape(block, stream), dtype_of(stream.dtype))
            for block in self.all
            for stream in block.group.streams
            if not stream.is_raw
        ]
        positions = (sum(block.count for block in self.all),), torch.int64
        rows = (self.num_raw, hidden_size), dtype
        for shape, kind in (positions, *made, rows):
            stop = self.num_bytes + prod(shape) * kind.itemsize
            self.parts.append(Part(self.num_bytes, stop, shape, kind))
            self.num_bytes = -(-stop // 8) * 8  # a tensor of any dtype may follow

    def split(self, positions: torch.Tensor) -> list[tuple["Block", torch.Tensor]]:
        """The blocks, each with the positions of its tokens; all are [n], in block order."""
        parts = positions.split([block.count for block in self.all])
        return list(zip(self.all, parts, strict=True))


class StepRows:
    """The rows of one step, for `ModelRunnerOutput`.

    They lie in one piece of host memory: positions, then what is made of rows on the device
    (scores, sums, heads, differences), then rows as they are. On a GPU the copy there is in flight
    when this object is handed on; reading or pickling it waits for that. What is pickled is where
    the memory is, if other processes of this host can read it.

    Args:
        version: of the global steering that the step runs under.
        hidden_size: width of the rows that leave the device as they are.
        dtype: theirs.
    """

    def __init__(self, version: int, blocks: Blocks, hidden_size: int, dtype: torch.dtype) -> None:
        if not blocks.parts:
            blocks.lay_out(hidden_size, dtype)
        self._version = version
        self.blocks = blocks
        self._memory: torch.Tensor | Reference | None = None
        self.places: Places | None = None
        """Object that knows the memory's place in a landing; None if it is ordinary memory."""
        self._parts: list[tuple[np.ndarray, list[torch.Tensor]]] | None = None
        self._chunks: dict[str, CapturedChunk] | None = None
        self._later: list[StepRows] = []
        self.packs = True
        """True if `packed` may be used: each sender has a part of every request's rows."""
        self._event: torch.cuda.Event | None = None

    def fill(
        self, memory: torch.Tensor, places: Places | None, copied: torch.cuda.Event | None = None
    ) -> None:
        """Take the memory in which everything will be.

        Args:
            memory: uint8 [>= `Blocks.num_bytes`] on the host.
            places: what knows where that is; None for ordinary memory.
            copied: happens when everything has arrived; None if it has.
        """
        self._memory, self.places, self._event = memory, places, copied

    def tensors(self) -> list[torch.Tensor]:
        """Views of the memory's parts."""
        memory, parts = self._memory, self.blocks.parts
        assert isinstance(memory, torch.Tensor)
        return [memory[a:b].view(kind).view(size) for a, b, size, kind in parts]

    def receive(self, places: Places) -> None:
        """Map the memory, where it came from another process of this host, and that of what joined.

        Args:
            places: those of this process.
        """
        if isinstance(self._memory, Reference):
            self._memory, self.places = places.borrow(self._memory), places
        for later in self._later:
            later.receive(places)

    def _whole(self) -> list[tuple[np.ndarray, list[torch.Tensor]]]:
        """All rows by block: int64 [count] positions, and [count, sites, width] of each stream,
        those of all senders if `packs`."""
        if self._parts is None:
            if self._event is not None:
                self._wait()
            of_all, *made, rows = self.tensors()
            positions = of_all.numpy().copy()  # small, and should keep no place
            left, self._parts = iter(made), []
            for block in self.blocks.all:
                own, positions = positions[: block.count], positions[block.count :]
                values = list[torch.Tensor]()
                for stream in block.group.streams:
                    raw = stream.is_raw
                    values += [block.raw_of(rows, stream, self.blocks.first) if raw else next(left)]
                self._parts.append((own, values))
            for later in self._later if self.packs else ():
                for (own, values), (same, more) in zip(self._parts, later._whole(), strict=True):
                    assert np.array_equal(own, same)
                    values += more
        return self._parts

    def _resolve(self) -> dict[str, CapturedChunk]:
        if self._chunks is None:
            self._chunks = {
                part.owners[0][0]: part
                for block, (positions, values) in zip(self.blocks.all, self._whole(), strict=True)
                for part in self._chunk(block, positions, values, block.owners).by_owner()
            }
        return self._chunks

    @property
    def names(self) -> frozenset[str]:
        """The requests with rows here, or in what joined these."""
        return self.blocks.names.union(*(later.names for later in self._later))

    def singles(self) -> tuple[list[str], list[int]]:
        """The requests with one row, as in decoding, and its positions; none if `packs` is
        false."""
        names, at = list[str](), list[int]()
        for block, (positions, _) in zip(self.blocks.all, self._whole(), strict=True):
            if not self.packs:
                break
            if block.count == len(block.counts):
                names += block.names
                at += positions.tolist()
                continue
            ones = np.flatnonzero(np.array(block.counts) == 1)
            names += [block.names[i] for i in ones]
            at += positions[np.cumsum(block.counts)[ones] - 1].tolist()
        return names, at

    def packed(self, request_ids: Collection[str]) -> list[CapturedChunk]:
        """All rows of some requests as they lie here, neighbours as one chunk with its `owners`:
        nothing is cut that is to be sent together."""
        wanted = self.blocks.names.intersection(request_ids)
        chunks = []
        for block, (positions, values) in zip(self.blocks.all, self._whole(), strict=True):
            if len(wanted) == len(self.blocks.names):
                chunks.append(self._chunk(block, positions, values, block.owners))
                continue
            start = first = 0
            for goes, run in groupby(block.owners, lambda owner: owner[0] in wanted):
                owners = list(run)
                stop, last = start + sum(count for _, count in owners), first + len(owners)
                if goes:
                    of_rows = len(positions)
                    cut = [v[start:stop] if len(v) == of_rows else v[first:last] for v in values]
                    chunks.append(self._chunk(block, positions[start:stop], cut, owners))
                start, first = stop, last
        return chunks

    def _chunk(
        self,
        block: Block,
        positions: np.ndarray,
        values: list[torch.Tensor],
        owners: list[tuple[str, int]],
    ) -> CapturedChunk:
        """Return rows of a block, with those of all senders if `packs`."""
        senders = len(values) // len(block.group.streams)
        return CapturedChunk(positions, values, self._version, owners, senders=senders)

    def join(self, later: "StepRows") -> None:
        """Add the same step's rows of a later part or worker, whose sites follow in each stream."""
        self._later.append(later)
        owners, others = ([block.owners for block in rows.blocks.all] for rows in (self, later))
        self.packs = self.packs and later.packs and owners == others

    def of(self, request_id: str) -> CapturedChunk | None:
        """The rows of one request, None if it has none: views of the step's rows."""
        chunks = self._resolve() if self._chunks is None else self._chunks
        chunk = chunks.get(request_id)
        for later in () if self.packs else self._later:
            more = later.of(request_id)
            if chunk is not None and more is not None:
                assert np.array_equal(chunk.positions, more.positions)
                chunk = CapturedChunk(
                    chunk.positions,
                    chunk.values + more.values,
                    chunk.version,
                    chunk.owners,
                    senders=chunk.senders + more.senders,
                )
            chunk = chunk or more
        return chunk

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        memory = self._memory
        if self.places is not None and isinstance(memory, torch.Tensor):
            memory = self.places.lend(memory) or memory
        made = dict.fromkeys(("places", "_parts", "_chunks"))
        return {**self.__dict__, **made, "_memory": memory}


def _shape(block: Block, stream: LocalStream) -> tuple[int, int, int]:
    """The shape of what is made of a stream's rows: [count, sites, width], or of sums [requests,
    sites, width]."""
    number = len(block.owners) if stream.making.adds_up else block.count
    return number, len(stream.places), stream.width
