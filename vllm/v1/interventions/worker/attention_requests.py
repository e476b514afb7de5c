# SPDX-License-Identifier: Apache-2.0
"""Requests whose attention is read, as a worker knows them: their key ranges, and the number of
keys that they have."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.interventions.reads import AttentionRead
from vllm.v1.interventions.step_rows import Blocks, KeyRanges

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class AttentionRequests:
    """The requests whose attention is read, from their admission to their end."""

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
