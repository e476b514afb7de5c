# SPDX-License-Identifier: Apache-2.0
"""Makers make, on the device, what leaves in place of rows; and the rows that they start from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.step_rows import Block, Blocks
from vllm.v1.interventions.worker.making.shards import Shards
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable


class Captured(NamedTuple):
    """Captured tokens, on the device, in block order."""

    positions: torch.Tensor
    """int64 [n]."""
    tokens: torch.Tensor
    """int64 [n]: their places in the batch."""
    programs: torch.Tensor | None = None
    """int32 [n]: their focus; None where no token of the step has any."""

    def of_blocks(self, blocks: Blocks) -> list[tuple[Block, "Captured"]]:
        """The blocks of a step, each with its tokens."""
        parts = [blocks.split(part) for part in self if part is not None]
        return [(of[0][0], Captured(*(part for _, part in of))) for of in zip(*parts, strict=True)]


class Material:
    """Rows of streams before anything is made of them, in the arena or computed of what lies there,
    and what they are multiplied with.

    Args:
        arena: [rows, hidden] on the device.
        matrices: those of `project`, there too.
        autoencoders: `Features.key` -> shard of an autoencoder of this worker's layers, there too.
        shards: which one that is.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        matrices: ProjectionTable,
        autoencoders: Mapping[str, Autoencoder],
        shards: Shards,
    ) -> None:
        self.arena, self.matrices, self.autoencoders = arena, matrices, autoencoders
        self.shards = shards
        self._columns: WeakKeyDictionary[LocalStream, torch.Tensor] = WeakKeyDictionary()
        """The columns of streams of heads, on the device."""

    def columns(self, stream: LocalStream) -> torch.Tensor | None:
        """Return `LocalStream.columns` on the device; None of the residual stream."""
        if stream.columns is None:
            return None
        found = self._columns.get(stream)
        if found is None:
            found = self._columns[stream] = async_tensor_h2d(stream.columns, self.arena.device)
        return found

    def heads(self, block: Block, stream: LocalStream) -> torch.Tensor:
        """Return the heads of a stream, [count, sites * width] in the model's dtype."""
        columns = self.columns(stream)
        assert columns is not None
        return block.heads(self.arena, columns)

    def by_run(self, block: Block, stream: LocalStream) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield parts of a stream's sites, as slices, each with the rows [count, number, hidden] of
        these sites: views of the arena in the model's dtype, or of branches float32, each the
        difference of two rows. Each lane counts as a site, where the stream has lanes."""
        if not stream.places:
            return  # another worker or part has them
        done = 0
        if stream.columns is not None:
            rows = self.heads(block, stream).view(block.count, -1, self.arena.shape[1])
            for part in rows.split(stream.lanes, dim=1):
                yield slice(done, done + stream.lanes), part
                done += stream.lanes
            return
        for i, (first, number) in enumerate(stream.runs):
            rows = block.of(self.arena, first, number)
            if stream.minus:
                rows = rows.float() - block.of(self.arena, stream.minus[i], 1).float()
            yield slice(done, done + number), rows
            done += number


class Maker(ABC):
    """Makes one kind of values, by its `Making`.

    Args:
        material: what they are made of.
    """

    def __init__(self, material: Material) -> None:
        self.material = material

    @abstractmethod
    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Return what leaves of a stream's rows in a block: [count, sites, width] on the device, or
        [requests, sites, width] where `Making.adds_up`.

        Args:
            captured: the block's tokens.
        """
