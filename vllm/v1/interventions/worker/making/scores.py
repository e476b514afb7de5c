# SPDX-License-Identifier: Apache-2.0
"""Scores of rows under the matrices of `project`."""

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.makings import Scores
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker


class ScoreMaker(Maker):
    """Makes `Scores`, float32 [count, sites * lanes, size]."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Multiply the rows of each run of sites with its matrix."""
        making, lanes = stream.making, stream.lanes
        assert isinstance(making, Scores)
        shape = (block.count, len(stream.places) * lanes, making.size)
        scores = torch.empty(shape, device=self.material.arena.device)
        one = len(making.places) == 1
        for sites, rows in self.material.by_run(block, stream):
            first = making.places[0 if one else sites.start // lanes]
            self.material.matrices.scores(rows, (first, making.size), scores[:, sites])
        return scores
