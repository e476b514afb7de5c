# SPDX-License-Identifier: Apache-2.0
"""A K2 Horizon in plain PyTorch, for transformers has none: what it has beside `plain.py`.

Norms are of groups, x / rms(x over each group) * weight: of queries and keys, a group is a head.
Of a head's pairs (x[i], x[i + width/2]) the first few are rotated. What attention gives is
multiplied by log2(1 + 2^(W x)). In layers with experts, values are the sum over those chosen of
weight * silu(W_e x) (MoVA).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from .plain import Block, Plain, PlainDecoder, Router, eager_attention_forward


class GroupNorm(nn.Module):
    """Without a mean taken off."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(width)), groups, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] as `x`."""
        parts = x.unflatten(-1, (self.groups, -1))
        mean = parts.square().mean(-1, keepdim=True)
        return (parts * (mean + self.eps).rsqrt()).flatten(-2) * self.weight


class Values(nn.Module):
    """Values by experts."""

    def __init__(self, hidden: int, width: int, plain: Plain) -> None:
        super().__init__()
        self.router = Router(hidden, plain)
        self.experts = nn.ModuleList(
            nn.Linear(hidden, width, bias=False) for _ in range(plain.experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width]."""
        each = torch.stack([nn.functional.silu(expert(x)) for expert in self.experts], dim=-1)
        return (each * self.router(x)[..., None, :]).sum(-1)


class Attention(nn.Module):
    """One layer's."""

    def __init__(self, config: LlamaConfig, plain: Plain, sparse: bool) -> None:
        super().__init__()
        hidden, width, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        assert width is not None and kv_heads is not None and config.rope_parameters is not None
        self.width, self.theta = width, float(config.rope_parameters["rope_theta"] or 0)
        self.turned = config.rope_head_dim
        self.q_proj = nn.Linear(hidden, heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * width, bias=False)
        self.v_proj: nn.Module = nn.Linear(hidden, kv_heads * width, bias=False)
        if sparse:
            self.v_proj = Values(hidden, kv_heads * width, plain)
        self.q_norm = GroupNorm(heads * width, heads, eps)
        self.k_norm = GroupNorm(kv_heads * width, kv_heads, eps)
        self.gate_proj = nn.Linear(hidden, heads * width, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        made = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in made)
        q, k = self._rotated(q), self._rotated(k)
        out, _ = eager_attention_forward(self, q, k, v, mask)
        return self.o_proj(out.flatten(2) * torch.log2(1 + 2 ** self.gate_proj(x)))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, n, width], of which `turned` are rotated."""
        pairs = self.turned // 2
        speeds = self.theta ** (-torch.arange(self.width // 2) / pairs)
        speeds[pairs:] = 0
        angles = torch.arange(x.shape[2])[:, None] * speeds
        a, b = x.chunk(2, dim=-1)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat(turned, dim=-1)


class K2Horizon(PlainDecoder):
    """The model, of a Llama's config with `plain`, `rope_head_dim` and `layernorm_num_groups`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        plain, groups = Plain(**config.plain), config.layernorm_num_groups
        size: tuple[Any, ...] = (config.hidden_size, groups, config.rms_norm_eps)
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, Block)
            layer.self_attn = Attention(config, plain, sparse=i >= plain.first_sparse)
            layer.input_layernorm, layer.post_attention_layernorm = (
                GroupNorm(*size),
                GroupNorm(*size),
            )
        self.model.norm = GroupNorm(*size)
