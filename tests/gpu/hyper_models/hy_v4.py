# SPDX-License-Identifier: Apache-2.0
"""HY-V4, with dense attention: what sparse attention needs (DeepGEMM, FlashMLA) is not checked."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from .plain import LAYERS, VOCAB, Maker, Plain, Weights, rms

LANES, HIDDEN, HEADS = 4, 256, 4
NOPE, ROPE, VALUE, LATENT, QUERY, INNER = 64, 64, 128, 512, 96, 512
EPS, HC_EPS, MAGNITUDE, THETA = 1e-5, 0.01, 1.6, 10000.0


class HYV4(Plain):
    lanes, hidden, eps = LANES, HIDDEN, EPS
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 256, "rms_norm_eps": EPS, "hidden_act": "silu",
        "q_lora_rank": QUERY, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "tie_word_embeddings": False,
        "mlp_layer_types": ["dense"] * LAYERS, "layer_types": ["full_attention"] * LAYERS,
        "learnable_sink": False, "gated_mla": True, "gating_type": "elementwise",
        "enable_ihc": True, "hc_mult": LANES, "hc_magnitude": MAGNITUDE, "hc_eps": HC_EPS,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip

    @classmethod
    def others(cls, make: Maker) -> Weights:
        weights = {
            "model.norm.weight": make.around(1, HIDDEN).bfloat16(),
            "model.hc_head.hc_head_fn": make.matrix(LANES, LANES * HIDDEN).float(),
            "model.hc_head.hc_head_base": make.around(0, LANES),
            "model.hc_head.hc_head_scale": make.around(1, 1),
        }
        widths = {
            "self_attn.q_a_proj": (QUERY, HIDDEN),
            "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
            "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
            "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
            "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
            "self_attn.linear_gate": (HEADS * VALUE, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        norms = {
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
            "self_attn.q_a_layernorm": QUERY,
            "self_attn.kv_a_layernorm": LATENT,
        }
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            weights |= {f"{at}{name}.weight": make.matrix(*shape) for name, shape in widths.items()}
            weights |= {
                f"{at}{name}.weight": make.around(1, n).bfloat16() for name, n in norms.items()
            }
            for half in ("hc_attn_layer", "hc_mlp_layer"):
                weights[f"{at}{half}.hc_pre.hc_fn"] = make.matrix(2 * LANES, LANES * HIDDEN).float()
                weights[f"{at}{half}.hc_pre.hc_base"] = make.around(0, 2 * LANES)
                weights[f"{at}{half}.hc_pre.hc_scale"] = make.around(1, 2)
        return weights

    def gates(self, x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        """Of all lanes together: [n, lanes, hidden] -> [n, len(fn)]."""
        return rms(x.flatten(1), EPS) @ fn.T

    def mix(self, x: torch.Tensor, layer: int, half: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The one input of a sub-layer, and how much of its output each lane gets."""
        fn, base, scale = (self.w(layer, f"{half}.hc_pre.hc_{n}") for n in ("fn", "base", "scale"))
        raw = self.gates(x, fn)
        pre = torch.sigmoid(raw[:, :LANES] * scale[0] + base[:LANES]) + HC_EPS
        post = MAGNITUDE * torch.sigmoid(raw[:, LANES:] * scale[1] + base[LANES:]) + HC_EPS
        return (pre[..., None] * x).sum(1), post

    def attend(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return self.linear(layer, f"self_attn.{name}", x)

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return rms(x, EPS) * self.w(layer, f"{name}.weight")

        one, post = self.mix(x, layer, "hc_attn_layer")
        n, h = len(x), norm("input_layernorm", one)
        q = linear("q_b_proj", norm("self_attn.q_a_layernorm", linear("q_a_proj", h)))
        q = q.view(n, HEADS, -1)
        latent, k_rope = linear("kv_a_proj_with_mqa", h).split([LATENT, ROPE], -1)
        kv = linear("kv_b_proj", norm("self_attn.kv_a_layernorm", latent)).view(n, HEADS, -1)
        k, v = kv.split([NOPE, VALUE], -1)
        angles = torch.arange(n)[:, None] * THETA ** -(torch.arange(0, ROPE, 2) / ROPE)
        turn = torch.polar(torch.ones(()), angles)[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:  # neighbours are the pairs
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:])], -1)
        k = torch.cat([k, rotate(k_rope[:, None]).expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (NOPE + ROPE) ** -0.5
        seen = torch.ones(n, n).tril().bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        made = linear("o_proj", out.flatten(1) * torch.sigmoid(linear("linear_gate", h)))
        return x + post[..., None] * made[:, None]

    def feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        one, post = self.mix(x, layer, "hc_mlp_layer")
        h = rms(one, EPS) * self.w(layer, "post_attention_layernorm.weight")
        gate, up = (self.linear(layer, f"mlp.{name}_proj", h) for name in ("gate", "up"))
        return x + post[..., None] * self.linear(layer, "mlp.down_proj", F.silu(gate) * up)[:, None]

    def final(self, x: torch.Tensor) -> torch.Tensor:
        fn, base, scale = (
            self.weights[f"model.hc_head.hc_head_{n}"] for n in ("fn", "base", "scale")
        )
        pre = torch.sigmoid(self.gates(x, fn) * scale + base) + HC_EPS
        return rms((pre[..., None] * x).sum(1), EPS) * self.weights["model.norm.weight"]
