# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA): keys and values from a compressed vector."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ..reference import Adapter
from ..tiny import COMMON, HALF_STD, LAYERS, Tensors, TinyModel, sizes
from .weights import experts_apart, renamed

MLA: dict[str, Any] = {
    # The only size of the CPU kernel, 512 + 64, is that of the real models; the others are the
    # least that FlashAttention has kernels for.
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_SMALL_MLA: dict[str, Any] = {name: 32 for name in MLA} | {"q_lora_rank": 48}
_SIZES = sizes(head_dim=None, num_key_value_heads=COMMON["num_attention_heads"])
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.6,
}

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_NO_AUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}

# What upstream's CPU path needs: its kernel's block size, and torch's rotary embedding, since the
# CPU kernel rotates queries [n, heads, width] wrongly. Where a CPU has AMX, upstream takes another
# backend, which is for bfloat16 alone.
MLA_ENGINE: dict[str, Any] = {
    "block_size": 16,
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "CPU_MLA"},
}
MLA_NOTE = "upstream's CPU kernel rotates queries [n, heads, width] wrongly: run with torch's"


def _norm_everywhere(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Checkpoints have this norm in dense layers too, where nothing applies it."""
    return {**tensors, "model.layers.0.post_mlp_layernorm.weight": torch.ones(config.hidden_size)}


def _padded(point: str, rows: torch.Tensor) -> torch.Tensor:
    width = _SMALL_MLA["qk_nope_head_dim"] + _SMALL_MLA["qk_rope_head_dim"]
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))


def _pairs_of_halves(point: str, rows: torch.Tensor) -> torch.Tensor:
    """Transformers orders what is rotated of queries by halves, and vLLM leaves it in pairs."""
    if point != "q":
        return rows
    plain, rotated = rows.split([MLA["qk_nope_head_dim"], MLA["qk_rope_head_dim"]], dim=-1)
    return torch.cat([plain, rotated.unflatten(-1, (2, -1)).mT.flatten(-2)], dim=-1)


def _mistral_large3(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        experts_apart(tensors),
        (r"^model\.", ""),
        (r"^lm_head", "output"),
        (r"embed_tokens", "tok_embeddings"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"self_attn\.(q|kv)_a_layernorm", r"attention.\1_a_norm"),
        (r"self_attn\.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
        (r"self_attn\.(q_a|q_b|kv_b|o)_proj", r"attention.w\1"),
        (r"gate_proj", "w1"),
        (r"down_proj", "w2"),
        (r"up_proj", "w3"),
        (r"mlp\.(gate|experts|shared_experts)\.", r"\1."),
        (r"mlp\.", "feed_forward."),
    )


HC_LANES = 3
_NO_SINK = -1e4
"""Of a sink's logit: nothing of the attention goes there."""


def _no_sinks(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.constant_(parameter, _NO_SINK)


def _dense_attention(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Without what only sparse attention has; by the names that upstream reads, some of which
    transformers turns round as it saves; and what is rotated in pairs, which upstream takes and
    transformers has in halves."""
    kept = {
        re.sub(r"(mlp.*)\.linear_gate", r"\1.gate_proj",
            re.sub(r"\.hc_pre\.(hc_(?:attn|mlp)_layer)", r".\1.hc_pre", k)
        ).replace(".hc_pre.hc_head.", ".hc_head."): v
        for k, v in tensors.items()
        if ".indexer." not in k and "sink" not in k
    }  # fmt: skip
    rope = config.qk_rope_head_dim
    order = torch.arange(rope).view(2, -1).T.flatten()
    for name, weight in kept.items():
        if ".q_b_proj." in name or ".kv_a_proj_with_mqa." in name:
            width = config.qk_head_dim if ".q_b_proj." in name else weight.shape[0]
            plain, rotated = weight.unflatten(0, (-1, width)).split([width - rope, rope], dim=1)
            kept[name] = torch.cat([plain, rotated[:, order]], dim=1).flatten(0, 1)
    return kept


_ORDER = "; q is in pairs there, in halves in transformers"

LATENT = (
    TinyModel(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        lambda: transformers.DeepseekV2Config(
            **_SIZES, **MLA, **ROUTED, first_k_dense_replace=1, topk_method="group_limited_greedy"
        ),
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        note=MLA_NOTE,
    ),
    TinyModel(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **_SIZES, **MLA, **ROUTED, first_k_dense_replace=1, num_mtp_layers=0
        ),
        config_json=_NO_AUX,
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=MLA_NOTE + _ORDER,
    ),
    TinyModel(
        "sarvam_mla",
        "SarvamMLAForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **_SIZES,
            **MLA | {"q_lora_rank": None},
            **ROUTED,
            first_k_dense_replace=1,
            num_mtp_layers=0,
        ),
        model="DeepseekV3ForCausalLM",
        config_json={
            "num_experts": ROUTED["n_routed_experts"],
            "num_shared_experts": ROUTED["n_shared_experts"],
        },
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=MLA_NOTE + _ORDER,
    ),
    TinyModel(
        "mistral_large3",
        "MistralLarge3ForCausalLM",
        lambda: transformers.Mistral4Config(
            **_SIZES,
            **MLA,
            **ROUTED | {"n_group": 1},
            first_k_dense_replace=1,
            rope_parameters=_YARN | {"llama_4_scaling_beta": 0.4, "partial_rotary_factor": 0.5},
        ),
        model="Mistral4ForCausalLM",
        checkpoint=_mistral_large3,
        # What upstream makes of Mistral's own config.
        config_json={
            "model_type": "deepseek_v3",
            "topk_method": None,
            "scoring_func": "softmax",
            "rope_parameters": _YARN,
            "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.4},
        },
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=MLA_NOTE + _ORDER,
    ),
    TinyModel(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        lambda: transformers.Glm4MoeLiteConfig(
            **_SIZES, **MLA, **ROUTED, mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1)
        ),
        config_json={**_NO_AUX, "first_k_dense_replace": 1},
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=MLA_NOTE + _ORDER,
    ),
    TinyModel(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        lambda: transformers.MiniCPM3Config(
            **_SIZES, **_SMALL_MLA, scale_emb=1.7, scale_depth=1.1, dim_model_base=48
        ),
        # The branch enters the sum times scale_depth / sqrt(layers).
        Adapter("model.layers", (), second_norm="post_attention_layernorm"),
        embedding_std=0.25,
        heads=_padded,
        note="upstream pads v to the width of q, and z has that of v",
    ),
    TinyModel(
        "axk1",
        "AXK1ForCausalLM",
        lambda: transformers.AXK1Config(**_SIZES, **MLA, **ROUTED, first_k_dense_replace=1),
        config_json=_NO_AUX,
        checkpoint=_norm_everywhere,
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=MLA_NOTE + _ORDER,
    ),
    TinyModel(
        "hy_v4",
        "HYV4ForCausalLM",
        lambda: transformers.HYV4Config(
            **_SIZES,
            **MLA,
            **ROUTED | {"n_group": 1},
            mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
            index_head_dim=64,
            index_n_heads=2,
            hc_mult=HC_LANES,
            hc_magnitude=1.6,
            hc_eps=0.01,
            rms_norm_eps=1e-6,
        ),
        # What mixes the lanes for the MLP reads the stream, and the skip adds it again.
        Adapter("model.layers", (), second_norm="ffn_hc", lanes=HC_LANES, lanes_second=True),
        adjust=_no_sinks,
        checkpoint=_dense_attention,
        config_json={
            "layer_types": ["full_attention"] * LAYERS,
            "learnable_sink": False,
            "gated_mla": True,
            "gating_type": "elementwise",
            "enable_ihc": True,
            "num_nextn_predict_layers": 0,
        },
        engine=MLA_ENGINE,
        heads=_pairs_of_halves,
        note=f"a stream of {HC_LANES} lanes (hyper-connections); without sparse attention "
        "and sinks, whose kernels are for GPUs alone; " + MLA_NOTE + _ORDER,
    ),
)
