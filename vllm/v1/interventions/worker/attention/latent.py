# SPDX-License-Identifier: Apache-2.0
"""Attention weights over a latent cache (MLA).

A token's keys and values of all heads are made of one latent c and one rotated key r, and the cache
has (c, r). With queries (a, b) of a head, a's product with its keys is `a W_UK c`: queries times
W_UK are queries of the cache itself, as upstream's own decoding has them ("absorbed").
"""

from collections.abc import Sequence

import torch

from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.interventions.worker.attention.keys import LayerReader


class LatentReader(LayerReader):
    """The attention of one layer over a latent cache.

    Args:
        module: whose weights can be read.
        table, rank: as `LayerReader` has them.
    """

    def __init__(self, module: MLAAttention, table: torch.Tensor, rank: int = 0) -> None:
        super().__init__(module, table, rank)
        self.width = module.qk_head_dim
        self._module = module

    def for_pages(self, queries: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Absorbed queries, float32 [n, heads, latent and rotated]."""
        weight = self._module.get_parameter("W_UK_T")[list(heads)].float()
        rotated = queries.shape[2] - weight.shape[1]
        plain, rest = queries.float().split([weight.shape[1], rotated], dim=2)
        return torch.cat([torch.einsum("nhp,hpl->nhl", plain, weight), rest], 2)

    def attended(self, weights: torch.Tensor, request: int, heads: Sequence[int]) -> torch.Tensor:
        """Return the sums of `LayerReader.attended`, here [n, heads, v_head_dim]."""
        latent = super().attended(weights, request, heads)
        values = self._module.get_parameter("W_UV")[list(heads)].float()
        return torch.einsum("nhl,hlv->nhv", latent, values)
