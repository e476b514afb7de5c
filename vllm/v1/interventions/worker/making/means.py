# SPDX-License-Identifier: Apache-2.0
"""Sums of rows, of which means are made where they are gathered."""

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.makings import Mean
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker
from vllm.v1.interventions.worker.tables.matrices import CHUNK_BYTES


class SumMaker(Maker):
    """Makes `Mean`: the sum of each request's rows, float32 [requests, sites * lanes, hidden], a
    bounded number of rows at a time."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Add up the rows of each request at the positions of its mean."""
        assert isinstance(stream.making, Mean)
        arena = self.material.arena
        edges = async_tensor_h2d(np.array(stream.making.runs), arena.device)
        inside = torch.bucketize(captured.positions, edges, right=True) % 2 == 1
        wanted, hidden, kind = inside.view(-1, 1, 1), arena.shape[1], torch.float32
        number = len(stream.places) * stream.lanes
        sums = torch.zeros(len(block.owners), number, hidden, device=arena.device)
        for sites, of_run in self.material.by_run(block, stream):
            into, parts = sums[:, sites], of_run.split(block.counts)
            at_once = max(CHUNK_BYTES // (parts[0].shape[1] * hidden * 4), 1)
            for total, rows, takes in zip(into, parts, wanted.split(block.counts), strict=True):
                for some, which in zip(rows.split(at_once), takes.split(at_once), strict=True):
                    total += some.where(which, 0).sum(0, dtype=kind)
        return sums
