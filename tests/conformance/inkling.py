# SPDX-License-Identifier: Apache-2.0
"""What upstream's Inkling has for GPUs alone and Triton's interpreter cannot do, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm

from vllm.config import get_current_vllm_config
from vllm.models.inkling.nvidia.ops.sconv import fused_sconv
from vllm.models.inkling.nvidia.sconv_swa_attn import InklingConvState
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from .dsa import keep


@dataclass
class Step(AttentionMetadata):
    """FlashAttention's metadata, as far as it is asked for."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_query_len: int


class Builder(AttentionMetadataBuilder[Step]):
    """Makes it."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: torch.device) -> None:
        super().__init__(spec, names, config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:  # fmt: skip
        """Of a step."""
        common, n = common_attn_metadata, common_attn_metadata.num_reqs
        return Step(
            common.query_start_loc[: n + 1],
            common.seq_lens[:n],
            common.block_table_tensor[:n],
            common.slot_mapping,
            common.num_actual_tokens,
            common.max_query_len,
        )


class Backend(FlashAttentionBackend):
    """Says who makes it."""

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What says who."""
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(_spec: Any = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]


class ConvState(InklingConvState):
    """Inputs of convolutions in float32, where upstream has bfloat16."""

    def __init__(self, **options: Any) -> None:
        config: Any = get_current_vllm_config()
        dtype, config.model_config.dtype = config.model_config.dtype, torch.bfloat16
        super().__init__(**options)
        config.model_config.dtype = self._dtype = dtype


class Attention:
    """FlashAttention 4 with a bias by distance, which each query says for itself."""

    def register_warmup(self) -> None:
        """Nothing to do."""

    def __call__(self, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *,
        block_table: torch.Tensor, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor,
        softmax_scale: float, window_size: tuple[int, int], rel_extent: int,
        rel_logits: torch.Tensor, out: torch.Tensor, **_: Any,
    ) -> None:  # fmt: skip
        """Of each query head what it reads; caches are [blocks, tokens, heads, width]."""
        size, groups = key_cache.shape[1], q.shape[1] // key_cache.shape[2]
        for number, length in enumerate(cache_seqlens.tolist()):
            tokens = slice(int(cu_seqlens_q[number]), int(cu_seqlens_q[number + 1]))
            used = block_table[number, : -(-length // size)].long()
            keys, values = (
                x[used].flatten(0, 1)[:length].repeat_interleave(groups, dim=1)
                for x in (key_cache, value_cache)
            )
            n = tokens.stop - tokens.start
            back = torch.arange(length - n, length)[:, None] - torch.arange(length)
            far = back > window_size[0] if window_size[0] >= 0 else torch.zeros_like(back) > 0
            at = back.clamp(0, rel_extent - 1)[:, None].expand(-1, q.shape[1], -1)
            bias = rel_logits[tokens].gather(-1, at)
            bias = bias.masked_fill((back >= rel_extent)[:, None], 0.0)
            logits = torch.einsum("qhd,khd->qhk", q[tokens], keys) * softmax_scale + bias
            weights = logits.masked_fill(((back < 0) | far)[:, None], -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("qhk,khd->qhd", weights, values)


def prepared(qkvr: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor,
    q_norm: torch.Tensor, k_norm: torch.Tensor, distances: torch.Tensor, eps: float, heads: int,
    kv_heads: int, width: int, rel_width: int, conv_cache: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, positions: torch.Tensor, conv_blocks: torch.Tensor,
    requests: torch.Tensor, conv_slots: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor,
    off_k: int, off_v: int, conv_size: int, log_scaling: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Upstream's `fused_qkvr_prep`, convolutions by its kernel: queries and their biases by
    distance; keys and values go to the caches."""
    parts = [heads * width, kv_heads * width, kv_heads * width, heads * rel_width]
    q, k, v, rel = qkvr.split(parts, dim=-1)
    at = positions, conv_blocks, requests, conv_slots, starts
    k = fused_sconv(k.contiguous(), k_weight, conv_cache, *at, off_k, width, conv_size)
    v = fused_sconv(v.contiguous(), v_weight, conv_cache, *at, off_v, width, conv_size)
    k = rms_norm(k.unflatten(-1, (kv_heads, width)), (width,), k_norm, eps)
    q = rms_norm(q.unflatten(-1, (heads, width)), (width,), q_norm, eps)
    bias = rel.unflatten(-1, (heads, rel_width)) @ distances
    keep(k, key_cache, slots)
    keep(v.unflatten(-1, (kv_heads, width)), value_cache, slots)
    if log_scaling is not None:
        q, bias = q * log_scaling[:, None, None], bias * log_scaling[:, None, None]
    return q, bias


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Upstream's `_linear_with_fp32_out`."""
    return x @ weight.T
