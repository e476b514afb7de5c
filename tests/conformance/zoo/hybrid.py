# SPDX-License-Identifier: Apache-2.0
"""Blocks whose mixer is Mamba, a short convolution or a delta net in some or all layers."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from ..reference import Adapter
from ..tiny import (
    COMMON,
    HALF_STD,
    HIDDEN,
    LAYERS,
    NO_HEAD_DIM,
    NO_SPECIAL_TOKENS,
    TIED_STD,
    VOCAB,
    Tensors,
    TinyModel,
    sizes,
)
from .weights import packed, renamed

_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# On Hopper upstream otherwise takes FlashInfer's kernel, which is compiled where it runs. No kernel
# of CUDA for the delta rule takes float32.
_DELTA_ENGINE: dict[str, Any] = {"gdn_prefill_backend": "triton"}
_OLMO_ENGINE: dict[str, Any] = {
    "load_format": "sharded_state",
    "model_loader_extra_config": {"pattern": "model.safetensors"},
}
_DELTA_BRANCH = Adapter("model.layers", ("self_attn", "linear_attn"))
_SHORT_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}

# Upstream's CPU kernel returns the states at prefix boundaries in another shape than it reads.
_NO_PREFIXES: dict[str, Any] = {"enable_prefix_caching": False}
ROTARY_IN_TORCH = {"compilation_config": {"custom_ops": ["none"]}}
ROTARY_NOTE = "upstream's CPU kernel rotates queries [n, heads, width] wrongly: run with torch's"


@torch.no_grad()
def _small_products(model: nn.Module) -> None:
    """What makes a state's B and C, which are multiplied: a quarter as large, so that rounding is
    not magnified (`conformance/condition.py`). By a power of two, and done once however often."""
    for name, weight in model.named_parameters():
        if name.endswith(("mixer.x_proj.weight", "mamba.in_proj.weight")):
            wanted = 0.375 * weight.shape[1] ** -0.5
            weight.mul_(2.0 ** round(math.log2(wanted / float(weight.std()))))


def _nemotron_h(*layers: str) -> PretrainedConfig:
    return transformers.NemotronHConfig(
        **sizes(num_hidden_layers=None),
        layers_block_type=list(layers),
        ssm_state_size=16,
        mamba_num_heads=6,
        mamba_head_dim=32,
        n_groups=1,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=80,
        routed_scaling_factor=1.6,
    )


def _olmo_hybrid(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """vLLM's own state, for `_OLMO_ENGINE`."""
    result = renamed(
        tensors,
        # What transformers has in memory; it saves other names.
        (r"attention_layer_norm", "input_layernorm"),
        (r"feedforward_layer_norm", "post_attention_layernorm"),
    )
    for module, parts, whole in (
        ("linear_attn", ("q_proj", "k_proj", "v_proj", "g_proj"), "in_proj_qkvg"),
        ("linear_attn", ("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"),
        ("self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        ("mlp", ("gate_proj", "up_proj"), "gate_up_proj"),
    ):
        siblings = tuple(f"{module}.{part}" for part in parts)
        result = packed(result, siblings, f"{module}.{whole}")
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            for scale in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):  # of an fp8 cache
                result[f"model.layers.{layer}.self_attn.attn.{scale}"] = torch.tensor(1.0)
    return result


def _kimi_linear(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """transformers saves a dense layer's MLP by the name of the others' experts."""
    return renamed(tensors, (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"))


HYBRID = (
    TinyModel(
        "mamba",
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            state_size=16,
            tie_word_embeddings=False,
        ),
        Adapter("backbone.layers", ()),
        adjust=_small_products,
    ),
    TinyModel(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        lambda: transformers.FalconMambaConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            state_size=16,
            tie_word_embeddings=False,
        ),
        Adapter("backbone.layers", ()),
    ),
    TinyModel(
        "mamba2",
        "Mamba2ForCausalLM",
        lambda: transformers.Mamba2Config(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_heads=6,
            head_dim=32,
            n_groups=1,
            state_size=16,
            chunk_size=16,
        ),
        Adapter("backbone.layers", ()),
    ),
    TinyModel(
        "nemotron_h",
        "NemotronHForCausalLM",
        lambda: _nemotron_h("mamba", "mlp", "attention", "moe"),
        Adapter("model.layers", ()),
        engine=_NO_PREFIXES,
    ),
    TinyModel(
        "nemotron_h_dense",
        "NemotronHForCausalLM",
        lambda: _nemotron_h("mamba", "mlp", "attention", "mlp"),
        Adapter("model.layers", ()),
        note="without experts",
        engine=_NO_PREFIXES,
    ),
    TinyModel(
        "jamba",
        "JambaForCausalLM",
        lambda: transformers.JambaConfig(
            **NO_HEAD_DIM,
            num_experts=4,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=16,
            use_mamba_kernels=False,
        ),
        Adapter("model.layers", ("self_attn", "mamba")),
    ),
    TinyModel(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        lambda: transformers.GraniteMoeHybridConfig(
            **NO_HEAD_DIM,
            layer_types=["mamba", "attention"] * (LAYERS // 2),
            embedding_multiplier=1.7,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=1.3,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=80,
            mamba_n_heads=6,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=16,
        ),
        Adapter("model.layers", ("self_attn", "mamba"), branch_multiplier="residual_multiplier"),
    ),
    TinyModel(
        "falcon_h1",
        "FalconH1ForCausalLM",
        lambda: transformers.FalconH1Config(
            **COMMON,
            mamba_d_ssm=192,
            mamba_n_heads=6,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=16,
            embedding_multiplier=1.7,
            lm_head_multiplier=0.8,
            key_multiplier=0.9,
            attention_in_multiplier=1.1,
            attention_out_multiplier=0.7,
            ssm_in_multiplier=1.2,
            ssm_out_multiplier=0.6,
            ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
            mlp_multipliers=[0.8, 0.6],
        ),
        # Two mixers, each with its multiplier, make the branch.
        Adapter("model.layers", (), second_norm="pre_ff_layernorm"),
        engine=_NO_PREFIXES,
    ),
    TinyModel(
        "lfm2",
        "Lfm2ForCausalLM",
        lambda: transformers.Lfm2Config(**NO_HEAD_DIM, **_SHORT_CONV, block_multiple_of=32),
        Adapter("model.layers", ("self_attn", "conv")),
        embedding_std=TIED_STD,
        config_json={"conv_dim": HIDDEN, "block_dim": HIDDEN},
        engine=ROTARY_IN_TORCH,
        note=ROTARY_NOTE,
    ),
    TinyModel(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        lambda: transformers.Lfm2MoeConfig(
            **NO_HEAD_DIM,
            **_SHORT_CONV,
            **_EXPERTS,
            num_dense_layers=1,
            routed_scaling_factor=1.6,
        ),
        Adapter("model.layers", ("self_attn", "conv")),
        embedding_std=TIED_STD,
        engine=ROTARY_IN_TORCH,
        note=ROTARY_NOTE,
    ),
    TinyModel(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        lambda: transformers.Qwen3NextConfig(
            **COMMON, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=80
        ),
        _DELTA_BRANCH,
        embedding_std=HALF_STD,
        engine=_DELTA_ENGINE,
    ),
    TinyModel(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        lambda: transformers.Qwen3_5TextConfig(**COMMON, **_DELTA),
        _DELTA_BRANCH,
        embedding_std=HALF_STD,
        engine=_DELTA_ENGINE,
    ),
    TinyModel(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        lambda: transformers.Qwen3_5MoeTextConfig(
            **COMMON, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=80
        ),
        _DELTA_BRANCH,
        embedding_std=HALF_STD,
        engine=_DELTA_ENGINE,
    ),
    TinyModel(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        lambda: transformers.OlmoHybridConfig(**NO_HEAD_DIM, **_DELTA),
        Adapter("model.layers", ("linear_attn", "post_attention_layernorm")),
        embedding_std=HALF_STD,
        checkpoint=_olmo_hybrid,
        engine=_OLMO_ENGINE,
        note="upstream fails to load the convolutions of any checkpoint: loaded as its own state",
    ),
    TinyModel(
        "zamba2",
        "Zamba2ForCausalLM",
        lambda: transformers.Zamba2Config(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=160,
            num_hidden_layers=LAYERS,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            mamba_d_state=16,
            mamba_ngroups=1,
            n_mamba_heads=6,
            chunk_size=16,
            num_attention_heads=3,
            num_key_value_heads=3,
            num_mem_blocks=1,
            use_mem_rope=True,
            adapter_rank=8,
            max_position_embeddings=128,
            use_mamba_kernels=False,
        ),
        Adapter("model.layers", ()),
        embedding_std=TIED_STD,
        adjust=_small_products,
        engine=_NO_PREFIXES,
    ),
    TinyModel(
        "kimi_linear",
        "KimiLinearForCausalLM",
        lambda: transformers.KimiLinearConfig(
            **sizes(head_dim=None, num_key_value_heads=4),
            # The widths of heads that upstream's kernels are written for.
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            moe_intermediate_size=64,
            n_shared_experts=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.6,
            mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
            layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
            linear_head_dim=128,
            linear_num_heads=4,
        ),
        _DELTA_BRANCH,
        embedding_std=HALF_STD,
        checkpoint=_kimi_linear,
        config_json={
            "first_k_dense_replace": 1,
            "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "head_dim": 128,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        note="on CUDA with VLLM_KIMI_K3_GEMM_AR=0 where there is no CUTLASS for Python",
    ),
)
