# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's captured queries, block by block, and the requests whose attention
is read."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.capture_groups import CaptureGroup
from vllm.v1.interventions.makings import AttentionRead
from vllm.v1.interventions.step_rows import Block, Blocks, KeyRanges
from vllm.v1.interventions.worker.attention.keys import Queriers
from vllm.v1.interventions.worker.attention.reader import AlikeSites, AttentionReader
from vllm.v1.interventions.worker.making.maker import Captured

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class BlockAttention:
    """Reads attention of the queries in an arena; it keeps what it sends to the device once for
    each group of requests, and for each block.

    Args:
        arena: [rows, hidden] on the device.
    """

    def __init__(self, reader: AttentionReader, arena: torch.Tensor) -> None:
        self._reader, self._arena = reader, arena
        self._sites: WeakKeyDictionary[
            CaptureGroup, list[tuple[AttentionRead, list[AlikeSites], torch.Tensor]]
        ] = WeakKeyDictionary()
        """Group -> (values to read, sites, columns) of each of its streams that reads attention."""
        self._queriers: WeakKeyDictionary[Block, list[Queriers]] = WeakKeyDictionary()
        """The requests of each of these streams, by block."""

    def read(self, block: Block, captured: Captured) -> Iterator[torch.Tensor]:
        """Yield what leaves of the attention of a block's queries, of each stream that has any.

        Args:
            captured: the block's tokens.
        """
        group, device = block.group, self._arena.device
        if group not in self._sites:
            self._sites[group] = [
                (s.reads, self._reader.sites(s.heads), async_tensor_h2d(s.columns, device))
                for s in group.streams
                if isinstance(s.reads, AttentionRead) and s.columns is not None
            ]
        if block not in self._queriers:
            self._queriers[block] = [
                Queriers.of(block.in_batch, block.counts, ranges, device)
                for ranges in zip(*block.ranges, strict=True)
            ]
        for (read, sites, columns), queriers in zip(
            self._sites[group], self._queriers[block], strict=True
        ):
            queries = block.heads(self._arena, columns)
            asking = queriers._replace(programs=captured.programs)
            at = captured.positions
            yield self._reader.read(read, sites, queries, at, asking, block.stop)


class AttentionRequests:
    """The requests whose attention is read, from their admission to their end, as a worker knows
    them: their key ranges, and the number of keys that they have."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[KeyRanges]] = {}
        """The key ranges of each stream that has any."""
        self._stops: dict[str, int] = {}
        """One past the last position that this step may have of each."""

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Take over who came and went, and how far each is."""
        for req_id in scheduler_output.finished_req_ids:
            self._ranges.pop(req_id, None)
        step = scheduler_output.interventions
        for req_id, request in step.admitted.items() if step is not None else ():
            reads = [s.reads for s in request.capture_streams]
            if ranges := [read.ranges for read in reads if isinstance(read, AttentionRead)]:
                self._ranges[req_id] = ranges
        if not self._ranges:
            return
        cached = scheduler_output.scheduled_cached_reqs
        done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        done |= {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        tokens = scheduler_output.num_scheduled_tokens
        self._stops = {r: done[r] + tokens[r] for r in self._ranges if r in done}

    def place(self, blocks: Blocks, req_ids: Sequence[str]) -> None:
        """Tell blocks where their requests are in the batch, and which keys are wanted.

        Args:
            req_ids: in batch order.
        """
        attending = [block for block in blocks.all if block.group.attends]
        places = {req_id: i for i, req_id in enumerate(req_ids)} if attending else {}
        for block in attending:
            block.in_batch = [places[req_id] for req_id, _ in block.owners]
            block.ranges = [self._ranges[req_id] for req_id, _ in block.owners]
        self.count_keys(blocks)

    def count_keys(self, blocks: Blocks) -> None:
        """Tell blocks how many keys this step's queries may see."""
        for block in blocks.all:
            if block.group.attends:
                block.stop = max(self._stops[req_id] for req_id, _ in block.owners)
