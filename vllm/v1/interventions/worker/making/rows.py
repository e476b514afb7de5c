# SPDX-License-Identifier: Apache-2.0
"""Rows as they are, where they do not lie in the arena as they leave: of heads, and of branches."""

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker


class RowMaker(Maker):
    """Makes `AsIs`: the heads that were chosen, in the model's dtype, or float32 differences."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Put the rows of all sites together."""
        if stream.columns is not None:
            return self.material.heads(block, stream)
        shape = block.count, len(stream.places), stream.width
        made = torch.empty(shape, device=self.material.arena.device)
        for sites, rows in self.material.by_run(block, stream):
            made[:, sites] = rows
        return made
