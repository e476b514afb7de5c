# SPDX-License-Identifier: Apache-2.0
"""Qwen4-Exp, with linear and full attention in turn, and every expert for every token, so that no
rounding chooses them: no indexer, and no embeddings of n-grams."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch.nn import functional as F

from .plain import LAYERS, VOCAB, Maker, Plain, Weights, convolved, delta_rule, rms

LANES, HIDDEN, RANK, HEADS, GROUPS, WIDTH = 4, 256, 32, 4, 2, 128
KEYS, VALUES, STATE = 2, 4, 128
EXPERTS, INNER, SHARED = 4, 128, 128
EPS, THETA, TURNED = 1e-6, 10000.0, 0.5
"""`TURNED`: how much of a head is rotated."""
RENAMED = Version(version("transformers")) >= Version("5.18")
"""What transformers calls the other attention; each version refuses the other's name."""
KINDS = ["linear_attention", "indexed_attention" if RENAMED else "qwen_sparse_attention"] * (
    LAYERS // 2
)


class Qwen4Exp(Plain):
    lanes, hidden, eps = LANES, HIDDEN, EPS
    engine: ClassVar[dict[str, Any]] = {"gdn_prefill_backend": "triton"}
    config: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text",
        "torch_dtype": "bfloat16", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "head_dim": WIDTH, "max_position_embeddings": 256, "rms_norm_eps": EPS,
        "hidden_act": "silu", "tie_word_embeddings": False, "layer_types": KINDS,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": STATE, "linear_value_head_dim": STATE,
        "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES,
        "num_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "norm_topk_prob": True,
        "moe_intermediate_size": INNER, "shared_expert_intermediate_size": SHARED,
        "hc_count": LANES, "hc_lowrank": RANK, "output_gate_type": "silu",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": TURNED,
        },
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip

    @classmethod
    def others(cls, make: Maker) -> Weights:
        wide, mixed = LANES * HIDDEN, (2 * KEYS + VALUES) * STATE
        linear = {
            "linear_attn.in_proj_qkv": (mixed, HIDDEN),
            "linear_attn.in_proj_z": (VALUES * STATE, HIDDEN),
            "linear_attn.in_proj_b": (VALUES, HIDDEN),
            "linear_attn.in_proj_a": (VALUES, HIDDEN),
            "linear_attn.out_proj": (HIDDEN, VALUES * STATE),
        }
        full = {
            "self_attn.q_proj": (2 * HEADS * WIDTH, HIDDEN),
            "self_attn.k_proj": (GROUPS * WIDTH, HIDDEN),
            "self_attn.v_proj": (GROUPS * WIDTH, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
        }
        rest = {"mlp.gate": (EXPERTS, HIDDEN), "mlp.shared_expert_gate": (1, HIDDEN)}
        for mlp, width in (
            *((f"mlp.experts.{i}", INNER) for i in range(EXPERTS)),
            ("mlp.shared_expert", SHARED),
        ):
            rest |= {f"{mlp}.{name}_proj": (width, HIDDEN) for name in ("gate", "up")}
            rest[f"{mlp}.down_proj"] = (HIDDEN, width)
        mix = {"input_mix_weight_down": (RANK, wide), "input_mix_weight_up": (wide, RANK)}
        for half in ("attn", "mlp"):
            rest |= {f"{half}_hyper_connection.{name}": shape for name, shape in mix.items()}
            rest[f"{half}_hyper_connection.block_inject_weight"] = (LANES, wide)

        weights = {
            f"model.hyper_connection_mixer.{n}.weight": make.matrix(*s) for n, s in mix.items()
        }
        weights["model.hyper_connection_mixer.hc_norm.weight"] = make.around(0, wide).bfloat16()
        for layer, kind in enumerate(KINDS):
            at = f"model.layers.{layer}."
            matrices = rest | (linear if kind == "linear_attention" else full)
            weights |= {f"{at}{n}.weight": make.matrix(*shape) for n, shape in matrices.items()}
            norms = {f"{half}_hyper_connection.hc_norm": wide for half in ("attn", "mlp")}
            if kind == "linear_attention":
                weights[f"{at}linear_attn.conv1d.weight"] = make.around(0.3, mixed, 1, 4).bfloat16()
                weights[f"{at}linear_attn.A_log"] = make.around(0, VALUES)
                weights[f"{at}linear_attn.dt_bias"] = make.around(-2, VALUES)
                weights[f"{at}linear_attn.norm.weight"] = make.around(1, STATE)
            else:
                norms |= {"self_attn.q_norm": WIDTH, "self_attn.k_norm": WIDTH}
            weights |= {f"{at}{n}.weight": make.around(0, w).bfloat16() for n, w in norms.items()}
        return weights

    def mix(self, x: torch.Tensor, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The one input of a sub-layer, and the normed lanes [n, lanes * hidden]."""

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weights[f"{at}.{name}.weight"].T

        normed = rms(x, EPS).flatten(1) * (1 + self.weights[f"{at}.hc_norm.weight"])
        gate = linear(
            "input_mix_weight_up", F.silu(linear("input_mix_weight_down", normed) / LANES)
        )
        return (torch.sigmoid(gate) * normed).unflatten(1, (LANES, HIDDEN)).mean(1), normed

    def around(self, x: torch.Tensor, layer: int, half: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The one input of a sub-layer, and how much of its output each lane gets."""
        at = f"{half}_hyper_connection"
        one, normed = self.mix(x, f"model.layers.{layer}.{at}")
        factors = self.linear(layer, f"{at}.block_inject_weight", normed)
        return one, 2 * torch.sigmoid(factors / LANES)

    def attend(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        h, factors = self.around(x, layer, "attn")
        made = (self.recur if KINDS[layer] == "linear_attention" else self.look)(layer, h)
        return x + factors[..., None] * made[:, None]

    def recur(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        def linear(name: str) -> torch.Tensor:
            return self.linear(layer, f"linear_attn.{name}", h)

        weight = self.w(layer, "linear_attn.conv1d.weight")
        parts = convolved(linear("in_proj_qkv"), weight).unflatten(1, (-1, STATE))
        q, k, v = parts.split([KEYS, KEYS, VALUES], 1)
        q, k = (part.repeat_interleave(VALUES // KEYS, 1) for part in (q, k))
        rate = F.softplus(linear("in_proj_a") + self.w(layer, "linear_attn.dt_bias"))
        decay = -self.w(layer, "linear_attn.A_log").exp() * rate
        out = delta_rule(q, k, v, decay[..., None], torch.sigmoid(linear("in_proj_b")))
        out = rms(out, EPS) * self.w(layer, "linear_attn.norm.weight")
        return self.linear(
            layer, "linear_attn.out_proj", out.flatten(1) * F.silu(linear("in_proj_z"))
        )

    def look(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        def heads(name: str, width: int = WIDTH) -> torch.Tensor:
            return self.linear(layer, f"self_attn.{name}_proj", h).unflatten(1, (-1, width))

        n, turned = len(h), int(TURNED * WIDTH)
        q, gate = heads("q", 2 * WIDTH).chunk(2, -1)
        angles = torch.arange(n)[:, None] * THETA ** -(torch.arange(0, turned, 2) / turned)
        cos, sin = (f(torch.cat([angles, angles], 1))[:, None] for f in (torch.cos, torch.sin))

        def rotated(name: str, x: torch.Tensor) -> torch.Tensor:  # halves are the pairs
            x = rms(x, EPS) * (1 + self.w(layer, f"self_attn.{name}_norm.weight"))
            pairs, rest = x.split([turned, WIDTH - turned], -1)
            first, second = pairs.chunk(2, -1)
            return torch.cat([pairs * cos + torch.cat([-second, first], -1) * sin, rest], -1)

        q = rotated("q", q)
        k, v = (
            x.repeat_interleave(HEADS // GROUPS, 1) for x in (rotated("k", heads("k")), heads("v"))
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
        seen = torch.ones(n, n).tril().bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return self.linear(layer, "self_attn.o_proj", (out * torch.sigmoid(gate)).flatten(1))

    def feed(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        h, factors = self.around(x, layer, "mlp")

        def expert(name: str) -> torch.Tensor:
            gate, up = (self.linear(layer, f"mlp.{name}.{n}_proj", h) for n in ("gate", "up"))
            return self.linear(layer, f"mlp.{name}.down_proj", F.silu(gate) * up)

        shares = self.linear(layer, "mlp.gate", h).softmax(-1)
        made = torch.sigmoid(self.linear(layer, "mlp.shared_expert_gate", h)) * expert(
            "shared_expert"
        )
        for i in range(EXPERTS):
            made = made + shares[:, i : i + 1] * expert(f"experts.{i}")
        return x + factors[..., None] * made[:, None]

    def final(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x, "model.hyper_connection_mixer")[0]
