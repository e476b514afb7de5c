# SPDX-License-Identifier: Apache-2.0
"""GLM-5-Next, with linear attention (KDA) in all layers and dense MLPs: its other attention is
sparse, and needs DeepGEMM and FlashMLA."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from .plain import LAYERS, VOCAB, Maker, Plain, Weights, convolved, delta_rule, rms

LANES, HIDDEN, INNER, HEADS, WIDTH = 4, 512, 512, 4, 64
EPS, HC_EPS, ROUNDS, LEAST, MOST = 1e-5, 0.01, 3, -5.0, 10.0
"""`LEAST`: logarithm of a decay. `MOST`: of what an MLP multiplies."""


class GLM5Next(Plain):
    lanes, hidden, eps = LANES, HIDDEN, EPS
    engine: ClassVar[dict[str, Any]] = {"additional_config": {"kda_prefill_backend": "triton"}}
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text",
        "torch_dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 256, "rms_norm_eps": EPS,
        "hidden_act": "silu", "swiglu_limit": MOST, "tie_word_embeddings": False,
        "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 0,
        "v_head_dim": 64, "mla_use_nope": True, "mlp_layer_types": ["dense"] * LAYERS,
        "layer_types": ["linear_attention"] * LAYERS, "linear_head_dim": WIDTH,
        "linear_num_heads": HEADS, "linear_conv_kernel_dim": 4, "linear_lower_bound": LEAST,
        "mhc": True, "hc_mult": LANES, "hc_eps": HC_EPS, "hc_sinkhorn_iters": ROUNDS,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip

    @classmethod
    def others(cls, make: Maker) -> Weights:
        weights = {"model.norm.weight": make.around(1, HIDDEN).bfloat16()}
        inner = HEADS * WIDTH
        widths = {
            **{f"self_attn.{name}_proj": (inner, HIDDEN) for name in "qkv"},
            "self_attn.b_proj": (HEADS, HIDDEN),
            "self_attn.f_a_proj": (WIDTH, HIDDEN),
            "self_attn.f_b_proj": (inner, WIDTH),
            "self_attn.g_a_proj": (WIDTH, HIDDEN),
            "self_attn.g_b_proj": (inner, WIDTH),
            "self_attn.o_proj": (HIDDEN, inner),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        norms = {
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
            "self_attn.o_norm": WIDTH,
        }
        factors = (2 + LANES) * LANES
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            weights |= {f"{at}{name}.weight": make.matrix(*shape) for name, shape in widths.items()}
            weights |= {f"{at}{n}.weight": make.around(1, w).bfloat16() for n, w in norms.items()}
            for name in "qkv":
                weights[f"{at}self_attn.{name}_conv1d.weight"] = make.around(0.3, inner, 1, 4)
            weights[f"{at}self_attn.A_log"] = make.around(0, HEADS)
            weights[f"{at}self_attn.dt_bias"] = make.around(-2, inner)
            for half in ("attn", "ffn"):
                weights[f"{at}hc_{half}_fn"] = make.matrix(factors, LANES * HIDDEN).float()
                weights[f"{at}hc_{half}_base"] = make.around(0, factors)
                weights[f"{at}hc_{half}_scale"] = make.around(1, 3)
        return weights

    def around(
        self, x: torch.Tensor, layer: int, half: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The one input of a sub-layer, how much of its output each lane gets, and the lanes as
        they are mixed meanwhile."""
        fn, base, scale = (self.w(layer, f"hc_{half}_{name}") for name in ("fn", "base", "scale"))
        of = (LANES, LANES, LANES * LANES)
        raw = (rms(x.flatten(1), EPS) @ fn.T).split(of, 1)
        pre, post, comb = (r * s + b for r, s, b in zip(raw, scale, base.split(of), strict=True))
        square = comb.unflatten(1, (LANES, LANES)).softmax(-1) + HC_EPS
        square = square / (square.sum(-2, keepdim=True) + HC_EPS)
        for _ in range(ROUNDS - 1):
            square = square / (square.sum(-1, keepdim=True) + HC_EPS)
            square = square / (square.sum(-2, keepdim=True) + HC_EPS)
        one = ((torch.sigmoid(pre) + HC_EPS)[..., None] * x).sum(1)
        return one, 2 * torch.sigmoid(post), torch.einsum("njk,njh->nkh", square, x)

    def attend(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return self.linear(layer, f"self_attn.{name}", x)

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (HEADS, WIDTH))

        one, post, mixed = self.around(x, layer, "attn")
        h = rms(one, EPS) * self.w(layer, "input_layernorm.weight")
        q, k, v = (
            heads(convolved(linear(f"{n}_proj", h), self.w(layer, f"self_attn.{n}_conv1d.weight")))
            for n in "qkv"
        )
        forget = heads(
            linear("f_b_proj", linear("f_a_proj", h)) + self.w(layer, "self_attn.dt_bias")
        )
        decay = LEAST * torch.sigmoid(self.w(layer, "self_attn.A_log").exp()[:, None] * forget)
        out = delta_rule(q, k, v, decay, torch.sigmoid(linear("b_proj", h)))
        out = rms(out, EPS) * self.w(layer, "self_attn.o_norm.weight")
        gate = torch.sigmoid(linear("g_b_proj", linear("g_a_proj", h)))
        return mixed + post[..., None] * linear("o_proj", out.flatten(1) * gate)[:, None]

    def feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        one, post, mixed = self.around(x, layer, "ffn")
        h = rms(one, EPS) * self.w(layer, "post_attention_layernorm.weight")
        gate = self.linear(layer, "mlp.gate_proj", h).clamp(max=MOST)
        up = self.linear(layer, "mlp.up_proj", h).clamp(-MOST, MOST)
        made = self.linear(layer, "mlp.down_proj", F.silu(gate) * up)
        return mixed + post[..., None] * made[:, None]

    def final(self, x: torch.Tensor) -> torch.Tensor:
        return rms(x.mean(1), EPS) * self.weights["model.norm.weight"]
