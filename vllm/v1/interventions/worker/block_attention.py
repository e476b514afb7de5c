# SPDX-License-Identifier: Apache-2.0
"""The attention of a step's captured queries, block by block."""

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.capture_groups import CaptureGroup
from vllm.v1.interventions.reads import AttentionRead
from vllm.v1.interventions.step_rows import Block, Blocks
from vllm.v1.interventions.worker.attention_reader import AlikeSites, AttentionReader
from vllm.v1.interventions.worker.layer_reader import Queriers


class Captured(NamedTuple):
    """Captured tokens, on the device, in block order."""

    positions: torch.Tensor
    """int64 [n]."""
    programs: torch.Tensor | None = None
    """int32 [n]: their focus; None where no token of the step has any."""

    def of_blocks(self, blocks: Blocks) -> list[tuple[Block, "Captured"]]:
        """The blocks of a step, each with its tokens."""
        pairs = blocks.split(self.positions)
        if self.programs is None:
            return [(block, Captured(at)) for block, at in pairs]
        both = zip(pairs, blocks.split(self.programs), strict=True)
        return [(block, Captured(at, programs)) for (block, at), (_, programs) in both]


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
