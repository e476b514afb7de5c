# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's sparse attention (DSA) in torch, in place of upstream's kernels for GPUs.

A query reads the keys of a latent cache that an indexer scores highest, by the sum over its heads
of w relu(q . k), with keys of its own. Here the caches of both keep numbers as they are, where
upstream's have FP8 in the indexer's. What is called, and with what, is upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import layer_norm, rms_norm

from vllm.forward_context import get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl


@dataclass
class Batch(AttentionMetadata):
    """What attention must know of a step."""

    starts: list[int]
    """Of each request its first token, and the end."""
    lengths: list[int]
    """Of each request with what is cached of it."""
    blocks: torch.Tensor
    """[requests, blocks]."""
    num_actual_tokens: int
    prefill: None = None
    """Prompts do not go by dense attention."""

    def requests(self, cache: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of each: its tokens in the step, what is cached of it, [keys, ...], and a mask
        [tokens, keys] of what is later than a token.

        Args:
            cache: [blocks, tokens, ...].
        """
        for number, length in enumerate(self.lengths):
            tokens = slice(self.starts[number], self.starts[number + 1])
            n = tokens.stop - tokens.start
            used = self.blocks[number, : -(-length // cache.shape[1])].long()
            later = torch.ones(n, length, dtype=torch.bool).triu(length - n + 1)
            yield tokens, cache[used].flatten(0, 1)[:length], later


class Builder(AttentionMetadataBuilder[Batch]):
    """Makes it."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device) -> None:
        super().__init__(spec, names, config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:  # fmt: skip
        """Of a step."""
        common, n = common_attn_metadata, common_attn_metadata.num_reqs
        return Batch(
            common.query_start_loc_cpu[: n + 1].tolist(),
            common.seq_lens[:n].tolist(),
            common.block_table_tensor[:n],
            common.num_actual_tokens,
        )


class Sparse(CPUMLAImpl):
    """Attention to chosen keys."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False

    def prepare_for_batch(self, _batch: Any) -> None:
        """Nothing to do."""

    def record_logical_topk_ready(self) -> None:
        """Nothing to do."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Of each head the latent that it reads."""
        queries, out = torch.cat(q, dim=-1), torch.empty_like(q[0])
        for tokens, keys, later in attn_metadata.requests(kv_c_and_k_pe_cache):
            chosen = layer.topk_indices_buffer[tokens].long()
            # Where there are fewer keys than may be chosen, the rest is -1.
            kept = torch.zeros(len(chosen), len(keys) + 1, dtype=torch.bool)
            kept = kept.scatter(1, chosen.where(chosen >= 0, len(keys)), True)[:, :-1] & ~later
            logits = torch.einsum("qhd,kd->qhk", queries[tokens], keys) * self.scale
            weights = logits.masked_fill(~kept[:, None], -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("qhk,kd->qhd", weights, keys[:, : self.kv_lora_rank])
        return out, None


class SparseBackend(CPUMLABackend):
    """Of the latent cache."""

    @classmethod
    def is_sparse(cls) -> bool:
        """It is."""
        return True

    @staticmethod
    def get_impl_cls() -> type[Sparse]:
        """What attends."""
        return Sparse

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What says who."""
        return Builder


class IndexerBackend(SparseBackend):
    """Of the indexer's cache."""

    @staticmethod
    def get_name() -> str:
        """Another one than the latent's."""
        return "INDEXER_IN_TORCH"


class IndexerCache(DeepseekV32IndexerCache):
    """The indexer's keys, in float32."""

    def __init__(self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: Any) -> None:
        # Scales of FP8, which are not needed here: 4 bytes for 128 numbers.
        super().__init__(head_dim - head_dim // 132 * 4, torch.float32, prefix, cache_config)

    def get_attn_backend(self) -> type[IndexerBackend]:
        """That of torch."""
        return IndexerBackend


def turned(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, pairs: bool
) -> torch.Tensor:
    """The first numbers of x [n, ..., width], as many as the table has, turned by position."""
    cos, sin = (
        half.unflatten(0, (-1, *[1] * (x.ndim - 2))) for half in table[positions].chunk(2, -1)
    )
    first, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    a, b = (first[..., ::2], first[..., 1::2]) if pairs else first.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    first = torch.stack(parts, dim=-1).flatten(-2) if pairs else torch.cat(parts, dim=-1)
    return torch.cat([first, rest], dim=-1)


def keep(rows: torch.Tensor, cache: torch.Tensor | None, slots: torch.Tensor | None) -> None:
    """Rows of a step's tokens into a cache [blocks, tokens, ...], if there is one yet."""
    if cache is not None and cache.numel() and slots is not None:
        slots, rows = slots[slots >= 0], rows[: len(slots)][slots >= 0]
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def normed_and_turned(positions: torch.Tensor, q: torch.Tensor, q_weight: torch.Tensor,
    q_eps: float, latent: torch.Tensor, weight: torch.Tensor, eps: float, key: torch.Tensor,
    table: torch.Tensor, index_key: torch.Tensor | None, index_weight: Any, index_bias: Any,
    index_eps: float, index_table: Any, _buffer: torch.Tensor, *, slot_mapping: Any,
    indexer_slot_mapping: Any, indexer_k_cache: Any, mla_kv_cache: Any, index_rope_interleave: bool,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Upstream's `fused_norm_rope`: the normed latent of queries; keys of both go to the caches."""
    latent = rms_norm(latent, latent.shape[-1:], weight, eps)
    both = torch.cat([latent, turned(key, positions, table, True)], dim=-1)
    keep(both, mla_kv_cache, slot_mapping)
    if index_key is not None:
        index_key = layer_norm(index_key, index_key.shape[-1:], index_weight, index_bias, index_eps)
        index_key = turned(index_key, positions, index_table, index_rope_interleave)
        keep(index_key, indexer_k_cache, indexer_slot_mapping)
    return rms_norm(q, q.shape[-1:], q_weight, q_eps)


def turned_queries(positions: torch.Tensor, q: torch.Tensor, table: torch.Tensor,
    index_q: torch.Tensor | None, index_table: Any, _plain: torch.Tensor, _scale: torch.Tensor,
    index_weights: Any, by_width: float, by_heads: float, *, index_rope_interleave: bool, **_: Any,
) -> tuple[Any, Any, torch.Tensor]:  # fmt: skip
    """Upstream's `fused_q`: the indexer's queries, its heads' weights, attention's queries."""
    if index_q is not None:
        index_q = turned(index_q, positions, index_table, index_rope_interleave)
        index_weights = index_weights * (by_width * by_heads)
    return index_q, index_weights, turned(q, positions, table, True)


def choose(_hidden: torch.Tensor, name: str, cache: torch.Tensor, q: torch.Tensor, _scale: None,
    _key: None, weights: torch.Tensor, _block: int, _format: str, most: int, _width: int,
    _longest: int, _total: int, buffer: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """Upstream's `sparse_attn_indexer`: positions of keys into the buffer, of -1 where fewer."""
    batches = get_forward_context().attn_metadata
    if not isinstance(batches, dict):  # a run for memory's sake, without a cache
        return
    batch: Any = batches[name]
    for tokens, keys, later in batch.requests(cache):
        matches = torch.einsum("qhd,kd->qhk", q[tokens], keys).relu()
        scores = torch.einsum("qh,qhk->qk", weights[tokens], matches)
        best = scores.masked_fill(later, -torch.inf).topk(min(most, len(keys)), dim=-1)
        buffer[tokens] = -1
        found = best.indices.where(best.values > -torch.inf, -1)
        buffer[tokens, : found.shape[1]] = found.to(buffer.dtype)


def embedded(
    ids: torch.Tensor, table: torch.Tensor, chain_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's `fused_embed_norm`: the embedding, and its norm for the first block."""
    rows = table[ids]
    return rows, rms_norm(rows, rows.shape[-1:], chain_weight, eps)
