# SPDX-License-Identifier: Apache-2.0
"""Sequential blocks with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from ..headed import Step3p5
from ..reference import Adapter
from ..tiny import COMMON, LAYERS, NO_HEAD_DIM, WINDOW, Tensors, TinyModel, sizes
from .weights import renamed

_TOP2: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_TOP2: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
}
_WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
_STEP_ROPE: dict[str, Any] = {
    "rope_theta": [10000.0, 20000.0] * (LAYERS // 2),
    "partial_rotary_factors": [1.0, 0.5] * (LAYERS // 2),
}
_DENSE_FIRST = ["dense"] + ["sparse"] * (LAYERS - 1)
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.3,
}
_GRANITE = Adapter("model.layers", ("self_attn",), branch_multiplier="residual_multiplier")


@torch.no_grad()
def _no_correction(model: nn.Module) -> None:
    for name, value in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            value.zero_()


@torch.no_grad()
def _no_output_bias(model: nn.Module) -> None:
    model.get_parameter("lm_head.bias").zero_()


def halves_of_pairs(point: str, rows: torch.Tensor) -> torch.Tensor:
    """Upstream rotates halves of a head where transformers rotates neighbours."""
    return rows.unflatten(-1, (-1, 2)).mT.flatten(-2) if point in ("q", "k") else rows


def _routed_experts(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return {name.replace(".experts.", ".experts.routed_experts."): t for name, t in tensors.items()}


def _step3p5(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    result = dict(tensors)
    for name in tensors:
        stem, found, _ = name.partition(".experts.gate_up_proj")
        if found:
            gate, up = result.pop(name).chunk(2, dim=1)
            result |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
            result[f"{stem}.down_proj.weight"] = result.pop(f"{stem}.experts.down_proj")
            result[f"{stem}.router_bias"] = result.pop(f"{stem}.gate.e_score_correction_bias")
    sparse = r"mlp\.(gate\.|router_bias)", r"moe.\1"
    result = renamed(result, (r"mlp\.shared_experts", "share_expert"), sparse)
    # What a layer of experts calls as a dense layer does.
    first = ".layers.0."
    return {k if first in k else k.replace(".mlp.", ".moe."): v for k, v in result.items()}


@contextmanager
def one_group() -> Iterator[None]:
    """Upstream's router on CPUs knows sigmoids of experts in groups alone: all are in one."""
    import pytest

    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    begin = CPURouter.__init__
    groups = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPURouter, "__init__", lambda self, **given: begin(self, **given | groups))
        yield


MOE = (
    TinyModel(
        "mixtral",
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**COMMON, **_LOCAL_TOP2),
    ),
    TinyModel(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        lambda: transformers.Qwen2MoeConfig(
            **NO_HEAD_DIM,
            **_TOP2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=80,
            mlp_only_layers=[1],
        ),
    ),
    TinyModel(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(
            **COMMON, **_TOP2, moe_intermediate_size=64, mlp_only_layers=[1], norm_topk_prob=True
        ),
    ),
    TinyModel(
        "olmoe",
        "OlmoeForCausalLM",
        lambda: transformers.OlmoeConfig(**NO_HEAD_DIM, **_TOP2),
    ),
    TinyModel(
        "granitemoe",
        "GraniteMoeForCausalLM",
        lambda: transformers.GraniteMoeConfig(**NO_HEAD_DIM, **_LOCAL_TOP2, **_MULTIPLIERS),
        _GRANITE,
    ),
    TinyModel(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        lambda: transformers.GraniteMoeSharedConfig(
            **NO_HEAD_DIM, **_LOCAL_TOP2, **_MULTIPLIERS, shared_intermediate_size=80
        ),
        _GRANITE,
    ),
    TinyModel(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        lambda: transformers.GraniteMoeSWAConfig(
            **NO_HEAD_DIM, **_LOCAL_TOP2, **_MULTIPLIERS, **_WINDOWED, shared_intermediate_size=80
        ),
        _GRANITE,
    ),
    TinyModel(
        "phimoe",
        "PhiMoEForCausalLM",
        lambda: transformers.PhimoeConfig(
            **NO_HEAD_DIM,
            **_LOCAL_TOP2,
            sliding_window=WINDOW,
            lm_head_bias=True,
            attention_bias=True,
        ),
        model="PhimoeForCausalLM",
        adjust=_no_output_bias,
        note="upstream loads the bias of lm_head and does not add it",
    ),
    TinyModel(
        "gpt_oss",
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**COMMON, **_LOCAL_TOP2, **_WINDOWED),
    ),
    TinyModel(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        lambda: transformers.Ernie4_5_MoeConfig(
            **NO_HEAD_DIM,
            moe_intermediate_size=64,
            moe_k=2,
            moe_num_experts=4,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=LAYERS - 1,
            tie_word_embeddings=False,
        ),
        adjust=_no_correction,
        note="without the router's correction bias, which upstream leaves out on a CPU",
    ),
    TinyModel(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        lambda: transformers.Glm4MoeConfig(
            **COMMON,
            **_ROUTED,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.6,
            use_qk_norm=True,
            attention_bias=True,
            num_mtp_layers=0,
        ),
    ),
    TinyModel(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        lambda: transformers.ExaoneMoeConfig(
            **COMMON,
            **_TOP2,
            **_WINDOWED,
            mlp_layer_types=_DENSE_FIRST,
            moe_intermediate_size=64,
            num_shared_experts=1,
            routed_scaling_factor=1.6,
        ),
    ),
    TinyModel(
        "hy_v3",
        "HYV3ForCausalLM",
        lambda: transformers.HYV3Config(
            **COMMON,
            **_TOP2,
            num_shared_experts=1,
            moe_intermediate_size=64,
            router_scaling_factor=1.6,
            mlp_layer_types=_DENSE_FIRST,
        ),
        config_json={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    TinyModel(
        "laguna",
        "LagunaForCausalLM",
        lambda: transformers.LagunaConfig(
            **COMMON,
            **_TOP2,
            **_WINDOWED,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=80,
            moe_routed_scaling_factor=1.6,
            num_attention_heads_per_layer=[4, 4, 2, 4],
            mlp_layer_types=_DENSE_FIRST,
        ),
        adjust=_no_correction,
        note="without the router's correction bias, which upstream does not load",
    ),
    TinyModel(
        "llama4",
        "Llama4ForCausalLM",
        lambda: transformers.Llama4TextConfig(
            **COMMON,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=80,
            interleave_moe_layer_step=2,
            attention_chunk_size=32,
            floor_scale=16,
        ),
        # vLLM turns it off for contexts up to 32768 tokens.
        reference_config={"attn_temperature_tuning": False},
        heads=halves_of_pairs,
        note="upstream tunes attention's temperature only for long contexts, and has the rotary's "
        "columns of q and k in another order",
    ),
    TinyModel(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        lambda: transformers.MiniMaxM2Config(**COMMON, **_LOCAL_TOP2),
        config_json={
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    TinyModel(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        lambda: transformers.MiMoV2FlashConfig(
            **COMMON,
            **_ROUTED,
            **_WINDOWED,
            v_head_dim=32,
            mlp_layer_types=_DENSE_FIRST,
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 20000.0), ("sliding_attention", 10000.0))
            },
        ),
        config_json={
            "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
            "moe_layer_freq": [0] + [1] * (LAYERS - 1),
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "sliding_window_size": WINDOW,
            "add_swa_attention_sink_bias": True,
            "layernorm_epsilon": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        engine={"hf_overrides": {"rope_theta": 20000.0, "swa_rope_theta": 10000.0}},
    ),
    TinyModel(
        "step3p5",
        "Step3p5ForCausalLM",
        lambda: transformers.Step3p7TextConfig(
            **COMMON | {"pad_token_id": 0},
            **_ROUTED,
            **_WINDOWED,
            mlp_layer_types=_DENSE_FIRST,
            share_expert_dim=80,
            num_sliding_attention_heads=6,
            moe_router_scaling_factor=1.6,
            swiglu_limits_shared=[0.0, 0.5, 0.0, 0.0],
            **_STEP_ROPE,
        ),
        model=Step3p5,
        checkpoint=_step3p5,
        config_json={
            "per_layer_config": None,
            "rope_parameters": None,
            **_STEP_ROPE,
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_layers_enum": "1,2,3",
            "moe_router_activation": "sigmoid",
            "use_head_wise_attn_gate": True,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 6,
                "num_attention_groups": 2,
                "head_dim": 32,
            },
        },
        upstream=one_group,
        note="the text part of transformers' Step 3.7; upstream's router on CPUs knows sigmoids of "
        "experts in groups alone: run as one group",
    ),
    TinyModel(
        "dbrx",
        "DbrxForCausalLM",
        lambda: transformers.DbrxConfig(
            **sizes(
                hidden_size=None,
                intermediate_size=None,
                num_hidden_layers=None,
                num_attention_heads=None,
                num_key_value_heads=None,
                head_dim=None,
                max_position_embeddings=None,
            ),
            d_model=96,
            n_heads=3,
            n_layers=LAYERS,
            max_seq_len=128,
            attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        Adapter("transformer.blocks", ("norm_attn_norm.attn",)),
        checkpoint=_routed_experts,
        note="upstream does not find the experts of a DBRX checkpoint: loaded by its own names",
    ),
)
