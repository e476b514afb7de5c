# SPDX-License-Identifier: Apache-2.0
"""A decoder in plain PyTorch, for architectures that transformers lacks.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

`Plain` says which: of attention, grouped queries, queries by way of a normed latent (Step 3), or
keys and values from one (DeepSeek's MLA); of an MLP, a gated one or experts; norms behind both; and
layers that lack the one or the other (DeciLM). Weights have the names of a Llama's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


@dataclass(frozen=True)
class Plain:
    """The field `plain` of a Llama's config: what is not a Llama's."""

    kv_heads: tuple[int, ...] = ()
    """Of each layer, 0 for a layer without attention; empty: all have the config's."""
    widths: tuple[int, ...] = ()
    """Of each layer's MLP, 0 for a layer without; empty: all have the config's."""
    query_latent: int = 0
    """q = W norm(W' x), with a latent of this width between."""
    root_alibi: bool = False
    """No rotation: a head's logit at a key d positions back is slope * sqrt(d) less (Step 1)."""
    latent: int = 0
    """Of keys and values; they are [W_k norm(c), rotated k'] and W_v norm(c), with [c, k'] = W' x:
    k' is one for all heads. Rotations are of pairs then."""
    plain_width: int = 0
    """Of queries and keys, what is not rotated; with `latent`."""
    rotated_width: int = 0
    value_width: int = 0
    out_norms: bool = False
    """Both branches pass another norm before the sum."""
    experts: int = 0
    """Of each layer from `first_sparse` on."""
    first_sparse: int = 1
    top: int = 2
    expert_width: int = 64
    shared_width: int = 0
    """Of an expert that every token takes."""
    score: str = "softmax"
    """Of a token for an expert, of the router's logits: softmax or sigmoid."""
    corrected: bool = False
    """Experts are chosen by score + bias, and weighted by score."""
    groups: int = 1
    """Of as many experts each; a token takes those of `top_groups` of them, chosen by the sum of
    their two best."""
    top_groups: int = 1
    renormalized: bool = False
    """Weights of the chosen are divided by their sum."""
    scale: float = 1.0
    """Times the sum over the chosen, not the shared."""


def rotated(x: torch.Tensor, theta: float, pairs: bool) -> torch.Tensor:
    """[1, heads, n, width] turned by position: x[i] with x[i + width/2], or neighbours."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x.unflatten(-1, (half, 2) if pairs else (2, half)).unbind(-1 if pairs else -2)
    turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.stack(turned, dim=-1 if pairs else -2).flatten(-2)


def _root_alibi(heads: int, n: int) -> torch.Tensor:
    """[heads, n, n], with the slopes of ALiBi, also for heads that are no power of two."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    back = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0)
    return -torch.tensor(slopes)[:, None, None] * back.sqrt()


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [1, n, heads, width] and the weights [1, heads, n, n]; by the name by which
    `heads.recorded` finds it."""
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = query @ k.transpose(2, 3) * query.shape[-1] ** -0.5 + attention_mask
    weights = logits.softmax(-1)
    return (weights @ v).transpose(1, 2), weights


def linear(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


class Attention(nn.Module):
    """Grouped queries; keys and values of their own."""

    def __init__(self, config: LlamaConfig, plain: Plain, kv_heads: int) -> None:
        super().__init__()
        width, hidden = config.head_dim, config.hidden_size
        assert width is not None and config.rope_parameters is not None
        self.width, self.theta = width, float(config.rope_parameters["rope_theta"] or 0)
        queries = config.num_attention_heads * width
        self.q_proj = linear(hidden, plain.query_latent or queries)
        if plain.query_latent:
            self.inter_norm = nn.RMSNorm(plain.query_latent, config.rms_norm_eps)
            self.wq = linear(plain.query_latent, queries)
        self.k_proj = linear(hidden, kv_heads * width)
        self.v_proj = linear(hidden, kv_heads * width)
        self.o_proj = linear(queries, hidden)
        self.latent, self.root_alibi = bool(plain.query_latent), plain.root_alibi

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.latent:
            q = self.wq(self.inter_norm(q))
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (q, k, v))
        if self.root_alibi:
            mask = mask + _root_alibi(q.shape[1], q.shape[2])
        else:
            q, k = (rotated(y, self.theta, False) for y in (q, k))
        out, _ = eager_attention_forward(self, q, k, v, mask)
        return self.o_proj(out.flatten(2))


class LatentAttention(nn.Module):
    """Keys and values from a latent."""

    def __init__(self, config: LlamaConfig, plain: Plain) -> None:
        super().__init__()
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        assert config.rope_parameters is not None
        self.plain, self.theta = plain, float(config.rope_parameters["rope_theta"] or 0)
        width = plain.plain_width + plain.rotated_width
        self.q_a_proj = linear(hidden, plain.query_latent)
        self.q_a_layernorm = nn.RMSNorm(plain.query_latent, eps)
        self.q_b_proj = linear(plain.query_latent, heads * width)
        self.kv_a_proj_with_mqa = linear(hidden, plain.latent + plain.rotated_width)
        self.kv_a_layernorm = nn.RMSNorm(plain.latent, eps)
        self.kv_b_proj = linear(plain.latent, heads * (plain.plain_width + plain.value_width))
        self.o_proj: nn.Module = linear(heads * plain.value_width, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        plain = self.plain
        width = plain.plain_width + plain.rotated_width
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, width)).transpose(1, 2)
        c, one = self.kv_a_proj_with_mqa(x).split([plain.latent, plain.rotated_width], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c))
        kv = kv.unflatten(-1, (-1, plain.plain_width + plain.value_width)).transpose(1, 2)
        k, v = kv.split([plain.plain_width, plain.value_width], dim=-1)
        q, turned = q.split([plain.plain_width, plain.rotated_width], dim=-1)
        one = rotated(one[:, None], self.theta, True).expand(-1, k.shape[1], -1, -1)
        q = torch.cat([q, rotated(turned, self.theta, True)], dim=-1)
        out, _ = eager_attention_forward(self, q, torch.cat([k, one], dim=-1), v, mask)
        return self.o_proj(out.flatten(2))


class Mlp(nn.Module):
    """A gated one."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branch."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Linear):
    """What chooses experts."""

    def __init__(self, hidden: int, plain: Plain) -> None:
        super().__init__(hidden, plain.experts, bias=False)
        self.plain = plain
        if plain.corrected:
            self.register_buffer("e_score_correction_bias", torch.zeros(plain.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of each expert, [..., experts]; zero for those not chosen."""
        logits = super().forward(x)
        scores = logits.softmax(-1) if self.plain.score == "softmax" else logits.sigmoid()
        bias = self.get_buffer("e_score_correction_bias") if self.plain.corrected else 0.0
        apart = (scores + bias).unflatten(-1, (self.plain.groups, -1))
        if self.plain.groups > 1:
            best = apart.topk(2, dim=-1).values.sum(-1).topk(self.plain.top_groups, dim=-1).indices
            taken = torch.zeros_like(apart[..., 0], dtype=torch.bool).scatter(-1, best, True)
            apart = apart.masked_fill(~taken[..., None], -torch.inf)
        chosen = apart.flatten(-2).topk(self.plain.top, dim=-1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.plain.renormalized:
            kept = kept / kept.sum(-1, keepdim=True)
        return kept * self.plain.scale


class Experts(nn.Module):
    """All of them are run for every token."""

    def __init__(self, hidden: int, plain: Plain) -> None:
        super().__init__()
        self.gate = Router(hidden, plain)
        own = (Mlp(hidden, plain.expert_width) for _ in range(plain.experts))
        self.experts = nn.ModuleList(own)
        if plain.shared_width:
            self.shared_experts = Mlp(hidden, plain.shared_width)
        self.shared = bool(plain.shared_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branch."""
        weights = self.gate(x)
        out = self.shared_experts(x) if self.shared else torch.zeros_like(x)
        for expert, weight in zip(self.experts, weights.unbind(-1), strict=True):
            out = out + weight[..., None] * expert(x)
        return out


class Nothing(nn.Module):
    """The branch of a layer that lacks it."""

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig, plain: Plain, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        kv_heads = plain.kv_heads[layer] if plain.kv_heads else config.num_key_value_heads
        width = plain.widths[layer] if plain.widths else config.intermediate_size
        self.input_layernorm: nn.Module = nn.RMSNorm(hidden, eps) if kv_heads else Nothing()
        self.post_attention_layernorm: nn.Module = nn.RMSNorm(hidden, eps) if width else Nothing()
        if plain.out_norms:
            self.attention_out_norm = nn.RMSNorm(hidden, eps)
            self.mlp_out_norm = nn.RMSNorm(hidden, eps)
        self.out_norms = plain.out_norms
        self.self_attn: nn.Module = Nothing()
        if plain.latent:
            self.self_attn = LatentAttention(config, plain)
        elif kv_heads:
            self.self_attn = Attention(config, plain, kv_heads)
        self.mlp: nn.Module = Mlp(hidden, width) if width else Nothing()
        if plain.experts and layer >= plain.first_sparse:
            self.mlp = Experts(hidden, plain)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The stream after the layer."""
        branch = self.self_attn(self.input_layernorm(x), mask)
        x = x + (self.attention_out_norm(branch) if self.out_norms else branch)
        branch = self.mlp(self.post_attention_layernorm(x))
        return x + (self.mlp_out_norm(branch) if self.out_norms else branch)


class Body(nn.Module):
    """All but the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        plain, depth = Plain(**config.plain), config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, plain, layer) for layer in range(depth))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What goes to the head, [1, n, hidden]."""
        x, n = self.embed_tokens(token_ids), token_ids.shape[1]
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class PlainDecoder(PreTrainedModel):
    """The model, of a Llama's config with `plain`."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The logits of one sequence."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))
