# SPDX-License-Identifier: Apache-2.0
"""What MiniMax M3 has kernels of GPUs for, in torch.

A head of the indexer scores blocks of keys by their best key, and chooses some for its group of
query heads, with the block that a query is in. What is called, and with what, is upstream's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import rms_norm

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerBackend, MiniMaxM3IndexerImpl
from vllm.models.minimax_m3.common.sparse_attention import (
    MiniMaxM3SparseBackend,
    MiniMaxM3SparseImpl,
)
from vllm.v1.attention.backend import MultipleOf

from . import experts
from .dsa import Builder, keep, turned


class _InTorch:
    """What both backends say."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What says who."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(_spec: Any = None) -> list[int | MultipleOf]:
        """Any that the other layers take."""
        return [MultipleOf(16)]


class SparseBackend(_InTorch, MiniMaxM3SparseBackend):
    """Of keys and values."""


class IndexerBackend(_InTorch, MiniMaxM3IndexerBackend):
    """Of the indexer's keys."""


class Indexer(MiniMaxM3IndexerImpl):
    """Chooses blocks."""

    indexer_backend_cls = IndexerBackend

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.index_cache.dtype = torch.float32

    def forward(self, index_query: torch.Tensor) -> tuple[None, None]:
        """Numbers of blocks into the buffer, [tokens, heads, most], -1 where fewer."""
        batches, buffer = get_forward_context().attn_metadata, self.topk_indices_buffer
        if not isinstance(batches, dict) or buffer is None:
            return None, None
        batch: Any = batches[self.index_cache.prefix]
        size = self.block_size
        for tokens, keys, later in batch.requests(self.index_cache.kv_cache):
            q = index_query[tokens].unflatten(-1, (self.num_index_heads, -1))
            scores = torch.einsum("qhd,kd->qhk", q, keys)
            scores = scores.masked_fill(later[:, None], -torch.inf)
            scores = torch.nn.functional.pad(scores, (0, -len(keys) % size), value=-torch.inf)
            best = scores.unflatten(-1, (-1, size)).amax(-1)
            # Those that end at the block that a query is in are always taken.
            own = (~later).sum(-1, keepdim=True).sub(1) // size - torch.arange(best.shape[-1])
            near = (own >= 0) & (own < self.local_blocks)
            best = best.masked_fill(near[:, None], torch.inf)
            top = best.topk(min(self.topk_blocks, best.shape[-1]), dim=-1)
            found = top.indices.where(top.values > -torch.inf, -1)
            buffer[tokens] = -1
            buffer[tokens, :, : found.shape[-1]] = found.to(buffer.dtype)
        return None, None


class Attention(MiniMaxM3SparseImpl):
    """Attends to them."""

    def forward(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor,
        output: torch.Tensor, *, query_fp8: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Of each query head what it reads."""
        batches = get_forward_context().attn_metadata
        if not isinstance(batches, dict):
            return output
        batch: Any = batches[layer.layer_name]
        for tokens, both, later in batch.requests(kv_cache.transpose(1, 2)):
            keys, values = both.chunk(2, dim=-1)
            taken = layer.topk_indices_buffer[tokens].long()
            blocks = -(-len(keys) // self.block_size)
            kept = torch.zeros(*taken.shape[:2], blocks + 1, dtype=torch.bool)
            kept = kept.scatter(-1, taken.where(taken >= 0, blocks), True)[..., :-1]
            kept = kept.repeat_interleave(self.block_size, dim=-1)[..., : len(keys)]
            kept = kept & ~later[:, None]
            # Of each group of query heads, which read the same keys.
            q = query[tokens].unflatten(-1, (self.num_kv_heads, -1, self.head_size))
            logits = torch.einsum("qghd,kgd->qghk", q, keys) * self.scale
            weights = logits.masked_fill(~kept[:, :, None], -torch.inf).softmax(-1)
            output[tokens] = torch.einsum("qghk,kgd->qghd", weights, values).flatten(1)
        return output


class Experts(experts.Experts):
    """With an activation that upstream has no CPU code for."""

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE

    def activated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What the second matrix gets."""
        config = self.moe_config
        limit, alpha, beta = config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta
        assert limit is not None and alpha is not None and beta is not None
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + beta)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """FlashInfer's `gemma_rmsnorm`."""
    return rms_norm(x, x.shape[-1:], 1 + weight, eps)


def added_and_normed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """FlashInfer's `gemma_fused_add_rmsnorm`, which writes both in place."""
    residual += x
    x.copy_(normed(residual, weight, eps))


def prepared(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    table: torch.Tensor, positions: torch.Tensor, heads: int, kv_heads: int, _turned: int,
    eps: float, index_q_weight: Any = None, index_k_weight: Any = None, index_heads: int = 0,
    slots: Any = None, index_slots: Any = None, kv_cache: Any = None, index_cache: Any = None,
    _block: int = 0, q_out: Any = None, index_q_out: Any = None, *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Upstream's `fused_minimax_m3_qknorm_rope_kv_insert`: norms, turns, fills caches."""

    def done(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return turned(normed(x, weight, eps), positions, table, False)

    split = [heads, kv_heads, kv_heads, *([index_heads, 1] if index_heads else [])]
    q, k, v, *index = qkv.unflatten(-1, (-1, len(q_weight))).split(split, dim=1)
    k.copy_(done(k, k_weight))
    if not index:
        q.copy_(done(q, q_weight))
        return
    q_out.copy_(done(q, q_weight).flatten(1))
    index_q_out.copy_(done(index[0], index_q_weight).flatten(1))
    keep(torch.cat([k, v], dim=-1), kv_cache.transpose(1, 2), slots)
    keep(done(index[1], index_k_weight)[:, 0], index_cache, index_slots)
