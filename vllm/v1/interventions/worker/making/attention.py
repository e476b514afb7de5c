# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's captured queries, block by block, and the requests whose attention
is read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.makings import Attention
from vllm.v1.interventions.step_rows import Block, Blocks, KeyRanges
from vllm.v1.interventions.worker.attention.keys import Queriers
from vllm.v1.interventions.worker.attention.reader import AlikeSites, AttentionReader
from vllm.v1.interventions.worker.making.maker import Captured, Maker, Material

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class AttentionMaker(Maker):
    """Makes `Attention`. It keeps what it sends to the device once for each stream, and for each
    block."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.reader: AttentionReader | None = None
        """Reader of attention; None until the KV cache exists."""
        self._sites: WeakKeyDictionary[LocalStream, list[AlikeSites]] = WeakKeyDictionary()
        self._queriers: WeakKeyDictionary[Block, dict[LocalStream, Queriers]] = WeakKeyDictionary()
        """The requests of each block, with their key ranges in each stream."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Read the attention of a block's queries."""
        reader, making = self.reader, stream.making
        assert reader is not None and isinstance(making, Attention)
        if (sites := self._sites.get(stream)) is None:
            sites = self._sites[stream] = reader.sites(stream.heads)
        if (of_streams := self._queriers.get(block)) is None:
            of_streams = self._queriers[block] = self._queriers_of(block)
        queries = self.material.heads(block, stream)
        asking = of_streams[stream]._replace(programs=captured.programs)
        return reader.read(making, sites, queries, captured.positions, asking, block.stop)

    def _queriers_of(self, block: Block) -> dict[LocalStream, Queriers]:
        streams = [s for s in block.group.streams if isinstance(s.making, Attention)]
        device = self.material.arena.device
        return {
            stream: Queriers.of(block.in_batch, block.counts, ranges, device)
            for stream, ranges in zip(streams, zip(*block.ranges, strict=True), strict=True)
        }


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
            made = [s.making for s in request.streams]
            if ranges := [m.ranges for m in made if isinstance(m, Attention)]:
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
        attending = [block for block in blocks.all if Attention in block.group.kinds]
        places = {req_id: i for i, req_id in enumerate(req_ids)} if attending else {}
        for block in attending:
            block.in_batch = [places[req_id] for req_id, _ in block.owners]
            block.ranges = [self._ranges[req_id] for req_id, _ in block.owners]
        self.count_keys(blocks)

    def count_keys(self, blocks: Blocks) -> None:
        """Tell blocks how many keys this step's queries may see."""
        for block in blocks.all:
            if Attention in block.group.kinds:
                block.stop = max(self._stops[req_id] for req_id, _ in block.owners)
