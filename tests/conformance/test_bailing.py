# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decay is transformers' of MiniMax, and the delta rule of Kimi Linear, which
go by blocks."""

from __future__ import annotations

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from tests.conformance.bailing import decayed, delta_rule, rates

pytestmark = pytest.mark.quick


@torch.inference_mode()
def test_decay_is_minimaxs() -> None:
    """Over several blocks; and not with another layer's rates, or without a position's decay."""
    generator = torch.Generator().manual_seed(1)
    heads, width, layer, layers = 4, 32, 1, 4
    config = MiniMaxConfig(
        hidden_size=96,
        num_attention_heads=heads,
        head_dim=width,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers,
        block_size=8,
    )
    module = MiniMaxLightningAttention(config, layer)
    x = torch.randn(1, 41, 96, generator=generator)
    cos = sin = torch.zeros(0)
    want = module(x, (cos, sin), None)[0][0]
    q, k, v = (
        torch.nn.functional.silu(module.qkv_proj(x[0]))
        .unflatten(-1, (heads, 3, width))
        .permute(2, 1, 0, 3)
    )

    def error(rate: torch.Tensor, twin: float = 0.0) -> float:
        out = decayed(q, k, v, rate) * torch.exp(-twin * rate)[:, None, None]
        out = module.norm(out.transpose(0, 1).flatten(1))
        got = module.out_proj(module.output_gate(x[0]).sigmoid() * out)
        return float((got - want).norm() / want.norm())

    assert error(rates(heads, layer, layers)) < 1e-4
    assert error(rates(heads, 0, layers)) > 1e-2
    assert error(rates(heads, layer, layers), 1.0) > 1e-2


@torch.inference_mode()
def test_delta_rule_is_kimis() -> None:
    """Over several blocks; and not with the decay of a whole head, or a state that all enters."""
    generator = torch.Generator().manual_seed(1)
    shape = 4, 41, 16
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    logs = -torch.rand(shape, generator=generator)
    beta = torch.rand(shape[:2], generator=generator)
    given = (x.transpose(0, 1)[None] for x in (q, k, v, logs, beta))
    want = chunk_kimi_delta_attention(*given, chunk_size=8)[0][0].transpose(0, 1)

    def error(decay: torch.Tensor, beta: torch.Tensor) -> float:
        got = delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, beta)
        return float((got - want).norm() / want.norm())

    assert error(logs.exp(), beta) < 1e-4
    assert error(logs.mean(-1, keepdim=True).exp().expand(shape), beta) > 1e-2
    assert error(logs.exp(), torch.ones_like(beta)) > 1e-2
