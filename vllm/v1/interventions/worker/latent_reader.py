# SPDX-License-Identifier: Apache-2.0
"""Attention weights over a latent cache (MLA).

A token's keys and values of all heads are made of one latent c and one rotated key r, and the cache
has (c, r). With queries (a, b) of a head, a's product with its keys is `a W_UK c`: queries times
W_UK are queries of the cache itself, as upstream's own decoding has them ("absorbed").
"""

from collections.abc import Sequence

import torch

from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.interventions.worker.layer_reader import LayerReader, Queriers


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

    def products(
        self,
        queries: torch.Tensor,
        heads: Sequence[int],
        key_heads: torch.Tensor,
        positions: torch.Tensor,
        queriers: Queriers,
        out: torch.Tensor,
    ) -> None:
        """As `LayerReader.products`, of a request at a time: absorbed queries are wide."""
        weight = self._module.get_parameter("W_UK_T")[list(heads)].float()
        first = 0
        for request, count in queriers.places:
            own = slice(first, first + count)
            first = own.stop
            plain, rotated = (
                queries[own]
                .float()
                .split([weight.shape[1], queries.shape[2] - weight.shape[1]], dim=2)
            )
            absorbed = torch.einsum("nhp,hpl->nhl", plain, weight)
            keys = self.rows(self.pages.keys, request, 0, out.shape[2]).float()
            out[own] = torch.cat([absorbed, rotated], 2) @ keys.T * self.sight.scale

    def attended(self, weights: torch.Tensor, request: int) -> torch.Tensor:
        """As `LayerReader.attended`, [n, heads, v_head_dim]."""
        latent = super().attended(weights, request)
        return torch.einsum("nhl,hlv->nhv", latent, self._module.get_parameter("W_UV").float())
