# SPDX-License-Identifier: Apache-2.0
"""Lengths of rows."""

import torch

from vllm.v1.interventions.capture_groups import LocalStream
from vllm.v1.interventions.step_rows import Block
from vllm.v1.interventions.worker.making.maker import Captured, Maker


class NormMaker(Maker):
    """Makes `Norms`, float32 [count, sites, heads]; without heads or lanes [count, sites, 1]."""

    def make(self, block: Block, stream: LocalStream, captured: Captured) -> torch.Tensor:
        """Take the norm of each row, added up in float32."""
        shape, kind = (block.count, len(stream.places), stream.width), torch.float32
        if stream.columns is not None:
            heads = self.material.heads(block, stream)
            size = heads.shape[1] // max(shape[1] * shape[2], 1)
            return torch.linalg.vector_norm(heads.view(*shape, size), dim=-1, dtype=kind)
        norms = torch.empty(shape, device=self.material.arena.device)
        for sites, rows in self.material.by_run(block, stream):
            norms[:, sites] = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=kind)
        return norms
