# SPDX-License-Identifier: Apache-2.0
"""A LoopCoder in plain PyTorch, for transformers has none: a Llama that runs `loop_num` times.

From the second time on, each head's output is g * global + (1 - g) * local, where *local* attends
to keys of this time, the last `loop_window_size` of them, and *global* to all keys of the first;
g = sigmoid(w . q + b), with w and b of the layer and head, and q the rotated query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Pair = tuple[torch.Tensor, torch.Tensor]


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Queries or keys [heads, n, width] with each half-width pair turned by its position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend(q: torch.Tensor, kept: Pair, window: int | None) -> torch.Tensor:
    """Causal attention of q [heads, n, width] to keys and values [key heads, n, width]."""
    groups = q.shape[0] // kept[0].shape[0]
    k, v = (x.repeat_interleave(groups, dim=0) for x in kept)
    ages = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Attention(nn.Module):
    """One layer's attention; it keeps the keys and values of the first time."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.hidden_size // config.num_attention_heads
        heads, rope = config.num_key_value_heads, config.rope_parameters
        assert heads is not None and rope is not None
        keys, self.theta = heads * self.width, float(rope["rope_theta"] or 0)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.first: Pair | None = None

    def forward(self, x: torch.Tensor, gate: nn.Linear | None) -> torch.Tensor:
        """The branch [1, n, hidden]; without `gate` it is the first time."""
        config, theta = self.config, self.theta
        heads = (p(x[0]).unflatten(-1, (-1, self.width)) for p in (self.q_proj, self.k_proj))
        q, k = (rotated(h.transpose(0, 1), theta) for h in heads)
        v = self.v_proj(x[0]).unflatten(-1, (-1, self.width)).transpose(0, 1)
        if gate is None:
            self.first = k, v
            out = attend(q, (k, v), None)
        else:
            assert self.first is not None
            scores = (q * gate.weight[:, None]).sum(-1, keepdim=True) + gate.bias[:, None, None]
            g, local = scores.sigmoid(), attend(q, (k, v), config.loop_window_size)
            out = g * attend(q, self.first, None) + (1 - g) * local
        return self.o_proj(out.transpose(0, 1).flatten(1))[None]


class Mlp(nn.Module):
    """Llama's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The branch."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer, for one time."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, gate: nn.Linear | None) -> torch.Tensor:
        """The stream after the layer."""
        x = x + self.self_attn(self.input_layernorm(x), gate)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """All but the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, depth = config, config.num_hidden_layers
        width = config.hidden_size // config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(depth))
        gates = (nn.Linear(width, config.num_attention_heads) for _ in range(depth))
        self.gate_projections = nn.ModuleList(gates)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What goes to the head, [1, n, hidden]."""
        x = self.embed_tokens(token_ids)
        for loop in range(self.config.loop_num):
            for layer, gate in zip(self.layers, self.gate_projections, strict=True):
                x = layer(x, gate if loop else None)
        return self.norm(x)


class LoopCoder(PreTrainedModel):
    """The model, of a Llama's config with `loop_num` and `loop_window_size`."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The logits of one sequence."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))
