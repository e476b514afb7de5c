# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's captured queries, block by block."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch

from vllm.v1.interventions.capture_groups import CaptureGroup
from vllm.v1.interventions.plan import AttentionRead
from vllm.v1.interventions.step_rows import Block, Blocks
from vllm.v1.interventions.worker.attention_reader import AlikeSites, AttentionReader, Queriers
from vllm.v1.interventions.worker.token_map import to_device


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
        """What each stream reads of attention, the sites of which, and its columns."""
        self._queriers: WeakKeyDictionary[Block, list[Queriers]] = WeakKeyDictionary()
        """The requests of each of these streams, by block."""

    def read(self, block: Block, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what leaves of the attention of a block's queries, of each stream that has any.

        Args:
            positions: int64 [count] on the device, of the block's tokens.
        """
        group, device = block.group, self._arena.device
        if group not in self._sites:
            self._sites[group] = [
                (stream.reads, self._reader.sites(stream.heads), to_device(stream.columns, device))
                for stream in group.streams
                if isinstance(stream.reads, AttentionRead) and stream.columns is not None
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
            yield self._reader.read(read, sites, queries, positions, queriers, block.stop)

    def add_own(self, blocks: Blocks, positions: torch.Tensor) -> None:
        """Give the tensor-parallel rank that sends a step's rows the part of this rank's heads.

        Args:
            positions: int64 [n] on the device, the captured tokens' in block order.
        """
        for block, at in blocks.split(positions):
            if block.group.attends:
                for _ in self.read(block, at):
                    pass
