# SPDX-License-Identifier: Apache-2.0
"""Bailing's decoders in plain PyTorch: `plain.py`'s, but for most layers' attention.

Of each `layer_group_size` layers the last has latent attention. In Bailing 2.5 the others have
linear attention: what a head reads of a position is q . k times the decay since, with no softmax.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig

from .plain import PlainDecoder, _linear, _rotated


def rates(heads: int, layer: int, layers: int) -> torch.Tensor:
    """By which a head of this layer decays a position, [heads], of as many as a power of two."""
    slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
    return slopes * (1 - layer / (layers - 1) + 1e-5)


def decayed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """The sum over earlier positions s of (q_t . k_s) v_s exp(-rate (t - s)); [heads, n, width]."""
    back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    decay = torch.exp(-rates[:, None, None] * back).tril()
    return (q @ k.transpose(1, 2) * decay) @ v


class LinearAttention(nn.Module):
    """That of Bailing 2.5."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        width, hidden, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
        assert width is not None and config.rope_parameters is not None
        self.theta = float(config.rope_parameters["rope_theta"] or 0)
        self.turned = int(width * float(config.rope_parameters["partial_rotary_factor"] or 1))
        self.heads, self.groups, self.eps = config.num_attention_heads, config.group_norm_size, eps
        self.layer, self.layers = layer, config.num_hidden_layers
        self.query_key_value = _linear(hidden, 3 * self.heads * width)
        self.query_layernorm = nn.RMSNorm(width, eps)
        self.key_layernorm = nn.RMSNorm(width, eps)
        self.g_proj = _linear(hidden, self.heads * width)
        self.g_norm = nn.RMSNorm(self.heads * width, eps)
        self.dense = _linear(self.heads * width, hidden)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        rotated = _rotated(x[None, ..., : self.turned], self.theta, False)[0]
        return torch.cat([rotated, x[..., self.turned :]], dim=-1)

    def forward(self, x: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        qkv = self.query_key_value(x[0]).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3)
        q, k = self._turn(self.query_layernorm(q)), self._turn(self.key_layernorm(k))
        decay = rates(self.heads, self.layer, self.layers)
        out = decayed(q * q.shape[-1] ** -0.5, k, v, decay).transpose(0, 1).flatten(1)
        # The norm is of each group of channels, with weights of their own.
        parts = out.unflatten(-1, (self.groups, -1))
        normed = nn.functional.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(1)
        return self.dense(self.g_norm.weight * normed * self.g_proj(x[0]).sigmoid())[None]


class Bailing25(PlainDecoder):
    """The model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer, block in enumerate(self.model.layers):
            if (layer + 1) % config.layer_group_size:
                block.self_attn = LinearAttention(config, layer)
        self.post_init()
