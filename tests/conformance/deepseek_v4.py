# SPDX-License-Identifier: Apache-2.0
"""What DeepSeek-V4 has kernels of GPUs for, in torch: hyper-connections, and attention to a window
and to compressed tokens, of which an indexer chooses some.

Attention has one cache here, of what each token projects, in float32: upstream's keeps keys and
compressed ones in FP8, and tokens that are not compressed yet apart. What is called, and with what,
is upstream's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu, softplus

from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from . import dsa, experts

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""How much of a sub-layer's output each lane gets, how lanes are mixed meanwhile, and its input."""


def _factors(raw: torch.Tensor, lanes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    least: float, sinkhorn: float, most: float, rounds: int, *, weight: torch.Tensor, eps: float,
) -> Factors:  # fmt: skip
    k = lanes.shape[1]
    of = [k, k, k * k]
    parts = zip(raw.split(of, 1), scale, base.split(of), strict=True)
    pre, post, comb = (part * by + more for part, by, more in parts)
    square = comb.unflatten(1, (k, k)).softmax(-1) + sinkhorn
    square = square / (square.sum(-2, keepdim=True) + sinkhorn)
    for _ in range(rounds - 1):
        square = square / (square.sum(-1, keepdim=True) + sinkhorn)
        square = square / (square.sum(-2, keepdim=True) + sinkhorn)
    one = ((pre.sigmoid() + least)[..., None] * lanes).sum(1)
    return most * post.sigmoid()[..., None], square, rms_norm(one, weight.shape, weight, eps)


def mixed(lanes: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    rms_eps: float, *sizes: Any, norm_weight: torch.Tensor, norm_eps: float, **_: Any,
) -> Factors:  # fmt: skip
    """Upstream's `mhc_pre`: of the lanes."""
    flat = lanes.flatten(1)
    raw = rms_norm(flat, flat.shape[1:], eps=rms_eps) @ fn.T
    return _factors(raw, lanes, scale, base, *sizes, weight=norm_weight, eps=norm_eps)


def written(
    out: torch.Tensor, lanes: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Upstream's `mhc_post`: the lanes after a sub-layer."""
    return torch.einsum("njk,njh->nkh", comb, lanes) + post * out[:, None]


def written_and_mixed(
    out: torch.Tensor, lanes: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Upstream's `mhc_fused_post_pre`: both."""
    lanes = written(out, lanes, post, comb)
    return lanes, *mixed(lanes, *rest, **options)


def spread(rows: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    rms_eps: float, *sizes: Any, norm_weight: torch.Tensor, norm_eps: float,
    fn_broadcast: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Upstream's `mhc_pre_broadcast`: lanes, each of them the embedding, and they are mixed."""
    lanes = rows[:, None].repeat(1, fn.shape[1] // rows.shape[1], 1)
    raw = rms_norm(rows, rows.shape[1:], eps=rms_eps) @ fn_broadcast.T
    return lanes, *_factors(raw, lanes, scale, base, *sizes, weight=norm_weight, eps=norm_eps)


def joined(lanes: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor,
    rms_eps: float, least: float,
) -> torch.Tensor:  # fmt: skip
    """Upstream's `hc_head_fused`: what the final norm reads."""
    flat = lanes.flatten(1)
    raw = rms_norm(flat, flat.shape[1:], eps=rms_eps) @ fn.T
    return (((raw * scale + base).sigmoid() + least)[..., None] * lanes).sum(1)


@dataclass
class Batch(dsa.Batch):
    """What attention must know of a step."""

    slots: torch.Tensor | None = None
    """Of each token, in the cache."""


class Builder(dsa.Builder):
    """Makes it."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:  # fmt: skip
        """Of a step."""
        known = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return Batch(**vars(known), slots=common_attn_metadata.slot_mapping)


class Backend(dsa.SparseBackend):
    """Of the cache."""

    @staticmethod
    def get_name() -> str:
        """Another one than upstream's."""
        return "DEEPSEEK_V4_IN_TORCH"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What says who."""
        return Builder


class Without(nn.Module):
    """In place of upstream's caches, and of its kernel that chooses."""

    def __init__(self, *_: Any, prefix: str = "", **__: Any) -> None:
        super().__init__()
        self.prefix = prefix


class Attention(DeepseekV4Attention):
    """With upstream's weights."""

    backend_cls = Backend
    use_fp8_ds_mla_layout = False

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """No more."""
        return num_heads

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        """As wide in all layers: keys, and what compressors get for themselves and the indexer."""
        config = vllm_config.model_config.hf_config
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=5 * self.head_dim + 4 * config.index_head_dim,
            dtype=torch.float32,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """All of it."""
        qkv, _ = self.fused_wqa_wkv(hidden_states)
        latent, key = qkv.split([self.q_lora_rank, self.head_dim], dim=-1)
        latent = self.q_norm(latent.contiguous())
        q = self.wq_b(latent).unflatten(-1, (self.n_local_heads, self.head_dim))
        q = self._turned(rms_norm(q, q.shape[-1:], eps=self.eps), positions)
        rows = [self._turned(self.kv_norm(key.contiguous()), positions)]
        for compressor in self._compressors():
            rows.append(compressor.fused_wkv_wgate(hidden_states))
        batches = get_forward_context().attn_metadata
        out = torch.zeros_like(q)
        if isinstance(batches, dict):
            batch: Any = batches[self.prefix]
            made = torch.cat(rows, dim=-1)
            made = nn.functional.pad(made, (0, self.kv_cache.shape[-1] - made.shape[-1]))
            dsa.keep(made, self.kv_cache, batch.slots)
            for tokens, cached, later in batch.requests(self.kv_cache):
                x, at = (latent[tokens], hidden_states[tokens]), positions[tokens]
                out[tokens] = self._attended(q[tokens], cached, later, *x, at)
        return self._o_proj(out, positions)

    def _compressors(self) -> list[DeepseekCompressor]:
        """Of the layer, and of its indexer."""
        found = [self.compressor, self.indexer.compressor if self.indexer is not None else None]
        return [one for one in found if one is not None]

    def _attended(self, q: torch.Tensor, cached: torch.Tensor, later: torch.Tensor,
        latent: torch.Tensor, x: torch.Tensor, at: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Of a request's tokens; `later` masks keys that are later than each."""
        past = at[:, None] - torch.arange(len(cached)) >= self.window_size
        keys, masked = cached[:, : self.head_dim], later | past
        if self.compressor is not None:
            both, rest = self._compressed(self.compressor, cached[:, self.head_dim :])
            open_ = torch.arange(len(both)) >= (at[:, None] + 1) // self.compress_ratio
            if self.indexer is not None:
                index_keys, _ = self._compressed(self.indexer.compressor, rest)
                open_ = open_ | self._left_out(index_keys, open_, latent, x, at)
            keys, masked = torch.cat([keys, both]), torch.cat([masked, open_], dim=1)
        logits = torch.einsum("qhd,kd->qhk", q, keys) * self.scale
        logits = logits.masked_fill(masked[:, None], -torch.inf)
        sinks = self.attn_sink[None, :, None].expand(len(q), -1, 1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("qhk,kd->qhd", weights, keys)

    def _compressed(
        self, compressor: DeepseekCompressor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys of all that is complete, and the columns of `rows` that are not its own."""
        rate, width, twice = compressor.compress_ratio, compressor.head_dim, compressor.coff
        values, gates, rest = rows.tensor_split([twice * width, 2 * twice * width], dim=1)
        full = len(rows) // rate * rate
        values = values[:full].unflatten(0, (-1, rate))
        gates = gates[:full].unflatten(0, (-1, rate)) + compressor.ape
        if twice == 2:  # the first half is for the next window
            nothing = values.new_zeros(1, rate, width)
            before = torch.cat([nothing, values[:-1, :, :width]])[: len(values)]
            closed = torch.cat([nothing - torch.inf, gates[:-1, :, :width]])[: len(values)]
            values = torch.cat([before, values[..., width:]], dim=1)
            gates = torch.cat([closed, gates[..., width:]], dim=1)
        keys = compressor.norm((gates.softmax(1) * values).sum(1))
        return self._turned(keys, rate * torch.arange(len(keys))), rest

    def _left_out(self, keys: torch.Tensor, open_: torch.Tensor, latent: torch.Tensor,
        x: torch.Tensor, at: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Those that the indexer does not choose for each token."""
        indexer = self.indexer
        assert indexer is not None
        q = indexer.wq_b(latent)[0].unflatten(-1, (indexer.n_head, indexer.head_dim))
        matches = torch.einsum("qhd,kd->qhk", self._turned(q, at), keys).relu()
        heads = indexer.weights_proj(x)[0] * (indexer.softmax_scale * indexer.n_head**-0.5)
        scores = torch.einsum("qh,qhk->qk", heads, matches).masked_fill(open_, -torch.inf)
        best = scores.topk(min(indexer.topk_tokens, len(keys)), dim=-1).indices
        return torch.ones_like(open_).scatter(1, best, False)

    def _turned(self, x: torch.Tensor, at: torch.Tensor, back: bool = False) -> torch.Tensor:
        """The last numbers turned by position."""
        cos, sin = self.rotary_emb.cos_sin_cache.chunk(2, -1)
        table = torch.cat([cos, -sin if back else sin], dim=-1)
        plain, last = x.tensor_split([x.shape[-1] - self.rope_head_dim], dim=-1)
        return torch.cat([plain, dsa.turned(last, at, table, True)], dim=-1)

    def _o_proj(self, o: Any, positions: torch.Tensor) -> torch.Tensor:
        """Turned back, each group of heads by its own matrix, and all by one."""
        groups = self._turned(o, positions, back=True).unflatten(1, (self.n_local_groups, -1))
        # Upstream's layer has the groups' matrices as one, and each group reads its own part.
        parts = [
            self.wo_a(group.flatten(1)).unflatten(-1, (self.n_local_groups, -1))[:, number]
            for number, group in enumerate(groups.unbind(1))
        ]
        return self.wo_b(torch.cat(parts, dim=-1))

    def forward_mqa(self, q: Any, kv: Any, positions: Any, output: Any) -> None:
        """Not called."""
        raise NotImplementedError


class Experts(experts.Experts):
    """With a limit."""

    def activated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What the second matrix gets."""
        limit = self.moe_config.swiglu_limit
        assert limit is not None
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def routed(router_logits: torch.Tensor, top_k: int, renormalize: bool,
    e_score_correction_bias: torch.Tensor | None, routed_scaling_factor: float,
    input_ids: torch.Tensor | None, hash_indices_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Weights and numbers of each token's experts, by a table of tokens or by scores."""
    scores = softplus(router_logits.float()).sqrt()
    if hash_indices_table is not None:
        assert input_ids is not None
        chosen = hash_indices_table[input_ids].long()
    else:
        assert e_score_correction_bias is not None
        chosen = (scores + e_score_correction_bias).topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    return weights, chosen.int()
