# SPDX-License-Identifier: Apache-2.0
"""Bailing's decoders in plain PyTorch: `plain.py`'s, but for most layers' attention.

Of each `layer_group_size` layers the last has latent attention. In Bailing 2.5 the others have
linear attention: what a head reads of a position is q . k times the decay since, with no softmax.
In Bailing 3 they have Kimi's delta rule: a state decays by channel, and a value enters it less what
the state would have answered to its key; and latent attention has a gate a head.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig

from .plain import LatentAttention, Plain, PlainDecoder, linear, rotated


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
        self.query_key_value = linear(hidden, 3 * self.heads * width)
        self.query_layernorm = nn.RMSNorm(width, eps)
        self.key_layernorm = nn.RMSNorm(width, eps)
        self.g_proj = linear(hidden, self.heads * width)
        self.g_norm = nn.RMSNorm(self.heads * width, eps)
        self.dense = linear(self.heads * width, hidden)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        turned = rotated(x[None, ..., : self.turned], self.theta, False)[0]
        return torch.cat([turned, x[..., self.turned :]], dim=-1)

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


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """What q reads, [heads, n, width]: S = diag(decay) S; S += beta k (v - k S)^T; out = q S.

    Args:
        decay: of each channel of keys, [heads, n, width].
        beta: [heads, n].
    """
    state, out = q.new_zeros(q.shape[0], q.shape[2], q.shape[2]), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None]
        news = v[:, t] - torch.einsum("hd,hde->he", k[:, t], state)
        state = state + torch.einsum("h,hd,he->hde", beta[:, t], k[:, t], news)
        out.append(torch.einsum("hd,hde->he", q[:, t], state))
    return torch.stack(out, dim=1)


class Convolution(nn.Conv1d):
    """Each channel over its last positions, this one the last; then SiLU."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__(width, width, length, groups=width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width] as `x`."""
        padded = nn.functional.pad(x.T, (self.kernel_size[0] - 1, 0))
        return nn.functional.silu(super().forward(padded[None])[0].T)


class DeltaAttention(nn.Module):
    """Of Bailing 3."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, hidden, self.heads = config.head_dim, config.hidden_size, config.num_attention_heads
        assert width is not None
        inner, length = self.heads * width, config.short_conv_kernel_size
        self.least = config.kda_lower_bound
        self.q_proj, self.k_proj = linear(hidden, inner), linear(hidden, inner)
        self.v_proj, self.b_proj = linear(hidden, inner), linear(hidden, self.heads)
        self.f_proj, self.g_proj = linear(hidden, inner), linear(hidden, inner)
        self.q_conv1d, self.k_conv1d = Convolution(inner, length), Convolution(inner, length)
        self.v_conv1d = Convolution(inner, length)
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.o_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.o_proj = linear(inner, hidden)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def forward(self, x: torch.Tensor, _mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        [x] = x
        q = nn.functional.normalize(self._of_heads(self.q_conv1d(self.q_proj(x))), dim=-1)
        k = nn.functional.normalize(self._of_heads(self.k_conv1d(self.k_proj(x))), dim=-1)
        v = self._of_heads(self.v_conv1d(self.v_proj(x)))
        speed = self.A_log.exp()[:, None, None] * self._of_heads(self.f_proj(x) + self.dt_bias)
        decay = (self.least * speed.sigmoid()).exp()
        beta = self.b_proj(x).sigmoid().T
        out = delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, beta)
        out = self.o_norm(out) * self._of_heads(self.g_proj(x)).sigmoid()
        return self.o_proj(out.transpose(0, 1).flatten(1))[None]


class GatedLatent(LatentAttention):
    """Latent attention with a gate a head."""

    def __init__(self, config: LlamaConfig, plain: Plain) -> None:
        super().__init__(config, plain)
        self.dense = self.o_proj
        self.o_proj = nn.Identity()
        self.g_proj = linear(config.hidden_size, config.num_attention_heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The branch."""
        gate = self.g_proj(x).sigmoid()[..., None]
        out = super().forward(x, mask).unflatten(-1, (gate.shape[-2], -1))
        return self.dense((out * gate).flatten(-2))


class Bailing3(PlainDecoder):
    """The model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        plain = Plain(**config.plain)
        for layer, block in enumerate(self.model.layers):
            last = (layer + 1) % config.layer_group_size == 0
            block.self_attn = GatedLatent(config, plain) if last else DeltaAttention(config)
        self.post_init()
