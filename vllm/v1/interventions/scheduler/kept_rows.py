# SPDX-License-Identifier: Apache-2.0
"""Rows of blocks that the prefix cache holds, kept for requests that find those blocks."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.v1.capture.copies import CopyThreads, finished
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import Site, Stream
from vllm.v1.interventions.positions import Positions
from vllm.v1.metrics.kept_stats import KeptStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request


class Slab:
    """Rows of neighbouring blocks that came in one step, in one place.

    Args:
        blocks: the hash of each.
        sites: of its columns.
        rows: [positions of all blocks, sites, width].
        copies: those of the rows that are underway.
    """

    def __init__(
        self,
        blocks: Sequence["BlockHash"],
        sites: tuple[Site, ...],
        rows: torch.Tensor,
        copies: Sequence[Future[None]] = (),
    ) -> None:
        self.blocks, self.rows, self._copies = blocks, rows, copies
        self.columns = {site: i for i, site in enumerate(sites)}

    def values(self, at: slice | np.ndarray, sites: tuple[Site, ...]) -> torch.Tensor:
        """Return the rows `at`, [n, sites, width]: a view where neighbours are asked for."""
        finished(self._copies)
        columns = [self.columns[site] for site in sites]
        first, number = columns[0], len(columns)
        if columns == [*range(first, first + number)]:
            return self.rows[at, first : first + number]
        return self.rows[at][:, columns]


class Found(NamedTuple):
    """A block's rows."""

    slab: Slab
    at: int
    """The block's place in its slab."""


class Filling(NamedTuple):
    """A block whose last rows have not come."""

    first: int
    """Its first position."""
    rows: list[torch.Tensor]
    """[block size, sites, width] of each stream that is kept."""
    came: int
    """Number of rows that came."""


class KeptRows:
    """Rows of one engine's requests, by the hash of their block and their sites.

    A block's hash says all that its rows depend on, as it says for its keys and values: the tokens
    up to its end, what steers them, adapter, salt. Rows are kept of whole blocks, as they left the
    device; those that are asked for least recently make room for others.

    Args:
        size: bytes of host memory.
        block_size: positions of a block, in `Request.block_hashes`.
    """

    def __init__(self, size: int, block_size: int) -> None:
        self.memory = Landing(size)
        self._threads = CopyThreads("kept-rows")
        self._block_size = block_size
        self._blocks: defaultdict[BlockHash, list[Found]] = defaultdict(list)
        self._slabs: OrderedDict[Slab, None] = OrderedDict()
        """The slabs, in the order in which they are dropped: of the rows asked for least recently
        first."""
        self._filling: dict[str, Filling] = {}
        """Request id -> the block that its last rows are of."""
        self._bytes = self._queries = self._hits = 0

    def stats(self) -> KeptStats:
        """Bytes in use, and what was asked for and found since the last call."""
        stats = KeptStats(self._bytes, self._queries, self._hits)
        self._queries = self._hits = 0
        return stats

    # -- rows that are asked for -------------------------------------------------------------

    def _find(self, block: "BlockHash", sites: frozenset[Site]) -> Found | None:
        for found in self._blocks.get(block, ()):
            if sites <= found.slab.columns.keys():
                return found
        return None

    def first_missing(
        self,
        wanted: Positions,
        first: int | None,
        sites: list[frozenset[Site]],
        blocks: Sequence["BlockHash"],
    ) -> int | None:
        """Return the lowest wanted position from `first` on whose rows are not kept; None if there
        is none.

        Args:
            sites: those of each stream.
            blocks: the hashes of the request.
        """
        while first is not None and first // self._block_size < len(blocks):
            number = first // self._block_size
            if not all(self._find(blocks[number], each) for each in sites):
                return first
            first = wanted.first_from((number + 1) * self._block_size)
        return first

    def take(self, request: "Request", stop: int, version: int) -> Iterator[CapturedChunk]:
        """Yield the rows that a request wants of its cached positions, in their order.

        Args:
            stop: number of positions that were found in the prefix cache. The rows of those that
                are wanted are kept: `first_missing` said so in this step.
            version: of the global steering, which these positions' hashes have in them.
        """
        ours, size, streams = request.interventions, self._block_size, _streams(request)
        first = ours.next_row
        asked = ours.wanted.between(first, request.num_tokens - 1)
        self._queries += len(asked)
        positions = asked[asked < stop]
        self._hits += len(positions)
        blocks = [int(number) for number in np.unique(positions // size)]
        found: dict[int, list[Found]] = {}
        for number in blocks:
            block = request.block_hashes[number]
            each = [self._find(block, sites) for sites in ours.kept_sites]
            found[number] = [one for one in each if one is not None]
            assert len(found[number]) == len(streams)

        def slabs(number: int) -> list[tuple[int, int]]:
            """Alike for blocks that follow each other in all their slabs."""
            return [(id(each.slab), each.at - number) for each in found[number]]

        for _, run in groupby(blocks, slabs):
            numbers = list(run)
            begin, end = numbers[0] * size, (numbers[-1] + 1) * size
            here = positions[(positions >= begin) & (positions < end)]
            values = [
                each.slab.values(_rows_at(here - begin + each.at * size), stream.sites)
                for each, stream in zip(found[numbers[0]], streams, strict=True)
            ]
            yield CapturedChunk(here, values, version, [(request.request_id, len(here))])
        # The first blocks of a prompt last: without them nobody finds those that follow.
        for number in reversed(blocks):
            for one in found[number]:
                self._slabs.move_to_end(one.slab)

    # -- rows that come ----------------------------------------------------------------------

    def keep(self, request: "Request", chunk: CapturedChunk | None) -> None:
        """Keep the rows of blocks that are whole with those that a request accepted of a step."""
        if chunk is None:
            return
        kept = [i for i, stream in enumerate(_streams(request)) if stream.is_raw]
        if not kept:
            return
        values = [chunk.stream(i) for i in kept]
        ends = np.flatnonzero(np.diff(chunk.positions) != 1) + 1
        for start, stop in zip([0, *ends], [*ends, len(chunk.positions)], strict=True):
            first = int(chunk.positions[start])
            self._keep_run(request, first, [v[start:stop] for v in values])

    def _keep_run(self, request: "Request", first: int, values: list[torch.Tensor]) -> None:
        """Keep rows of neighbouring positions from `first` on, [n, sites, width] of each stream."""
        size, filling = self._block_size, self._filling.pop(request.request_id, None)
        if filling is not None and filling.first + filling.came == first:
            values = self._fill(request, filling, values)
            first = filling.first + size
        skipped = -first % size
        whole = max(len(values[0]) - skipped, 0) // size * size
        for sites, rows in zip(_kept_sites(request), values, strict=True):
            self._keep_blocks(request, sites, first + skipped, rows[skipped : skipped + whole])
        rest = [rows[skipped + whole :] for rows in values]
        if len(rest[0]):
            places = [self._place(torch.Size((size, *rows.shape[1:])), rows.dtype) for rows in rest]
            begun = [place for place in places if place is not None]
            if len(begun) == len(places):
                self._fill(request, Filling(first + skipped + whole, begun, 0), rest)

    def _fill(
        self, request: "Request", filling: Filling, values: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Put the next rows into a block; returns those behind its end."""
        number = min(len(values[0]), self._block_size - filling.came)
        came = filling.came + number
        for place, rows in zip(filling.rows, values, strict=True):
            place[filling.came : came] = rows[:number]
        if came < self._block_size:
            self._filling[request.request_id] = filling._replace(came=came)
        else:
            for sites, place in zip(_kept_sites(request), filling.rows, strict=True):
                for _, hashes in self._lacking(request, sites, filling.first, 1):
                    self._add(Slab(hashes, sites, place))
        return [rows[number:] for rows in values]

    def _keep_blocks(
        self, request: "Request", sites: tuple[Site, ...], first: int, rows: torch.Tensor
    ) -> None:
        """Copy whole blocks from position `first` on that are not kept yet; of a stream."""
        size = self._block_size
        for begin, hashes in self._lacking(request, sites, first, len(rows) // size):
            fits = hashes[: self.memory.size // max(rows[:size].nbytes, 1)]
            at = slice(begin * size, (begin + len(fits)) * size)
            place = self._place(rows[at].shape, rows.dtype) if fits else None
            if place is not None:
                copies = self._threads.follow(([place], [rows[at]]))
                self._add(Slab(fits, sites, place, copies))

    def _lacking(
        self, request: "Request", sites: tuple[Site, ...], first: int, number: int
    ) -> Iterator[tuple[int, list["BlockHash"]]]:
        """Yield runs of the `number` blocks from position `first` on whose rows at these sites are
        not kept: the first one's place, and their hashes."""
        every, begin = frozenset(sites), first // self._block_size
        hashes = request.block_hashes[begin : begin + number]
        for known, run in groupby(enumerate(hashes), lambda e: bool(self._find(e[1], every))):
            if not known:
                places = list(run)
                yield places[0][0], [block for _, block in places]

    def _place(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Take memory for rows. Others make room, those asked for least recently first; None if as
        many bytes of them do not do, because results still have views of what was kept."""
        size, freed = shape.numel() * dtype.itemsize, 0
        while (place := self.memory.take(size)) is None and self._slabs and freed < size:
            freed += self._drop(next(iter(self._slabs)))
        return None if place is None else place[:size].view(dtype).view(shape)

    def _add(self, slab: Slab) -> None:
        self._slabs[slab] = None
        self._bytes += slab.rows.nbytes
        for index, block in enumerate(slab.blocks):
            self._blocks[block].append(Found(slab, index))

    def _drop(self, slab: Slab) -> int:
        """Forget a slab, and return its bytes."""
        del self._slabs[slab]
        for block in slab.blocks:
            left = [found for found in self._blocks[block] if found.slab is not slab]
            if left:
                self._blocks[block] = left
            else:
                del self._blocks[block]
        self._bytes -= slab.rows.nbytes
        return slab.rows.nbytes

    def leave(self, request_id: str) -> None:
        """Forget a block that a request began: it ends, or is computed again from its start, where
        something else may act."""
        self._filling.pop(request_id, None)

    def clear(self) -> None:
        """Forget all rows, as the prefix cache forgets its blocks."""
        self._filling.clear()
        self._slabs.clear()
        self._blocks.clear()
        self._bytes = 0


def _streams(request: "Request") -> list[Stream]:
    capture = request.interventions.plan.capture
    assert capture is not None
    return capture.streams


def _kept_sites(request: "Request") -> list[tuple[Site, ...]]:
    """Return the sites of each stream that is kept."""
    return [stream.sites for stream in _streams(request) if stream.is_raw]


def _rows_at(rows: np.ndarray) -> slice | np.ndarray:
    """Return neighbours as a slice."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    return slice(first, last) if last - first == len(rows) else rows
