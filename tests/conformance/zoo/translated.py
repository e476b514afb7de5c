# SPDX-License-Identifier: Apache-2.0
"""Architectures that transformers lacks, computed there by another one with other weight names.

The reference is that other model; what vLLM loads is its weights, renamed and packed the way this
architecture's checkpoints are (`translated_weights.py`), and its config with the fields this
architecture reads.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from ..reference import Adapter
from ..tiny import (
    COMMON,
    HEAD_DIM,
    HIDDEN,
    INNER,
    LAYERS,
    MAX_LENGTH,
    NO_HEAD_DIM,
    SANDWICH,
    TIED_STD,
    VOCAB,
    WINDOW,
    TinyModel,
    sizes,
)
from .translated_weights import bailing, chatglm, exaone, internlm2, plamo3, telechat2
from .weights import unchanged


@torch.no_grad()
def _no_input_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if re.search(r"(q|k|v|gate|up)_proj\.bias", name):
            parameter.zero_()


def _divided_before_the_head(model: nn.Module) -> None:
    """Granite divides logits, MiniCPM what its head reads."""
    model.get_submodule("model.norm").register_forward_hook(lambda *call: call[-1] * 64 / HIDDEN)


def _blended(model: nn.Module) -> None:
    """Solar's `bskcn`: what enters layer 3 is half what entered layer 1."""
    kept: dict[str, torch.Tensor] = {}

    def keep(_block: nn.Module, args: tuple[Any, ...]) -> None:
        kept["h"] = args[0]

    def blend(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (0.4 * kept["h"] + 0.6 * args[0], *args[1:])

    layers = list(model.get_submodule("model.layers").children())
    layers[1].register_forward_pre_hook(keep)
    layers[3].register_forward_pre_hook(blend)


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**NO_HEAD_DIM, tie_word_embeddings=False)


def _glm4_moe() -> PretrainedConfig:
    return transformers.Glm4MoeConfig(
        **COMMON,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.6,
        use_qk_norm=True,
        num_mtp_layers=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    )


def _sigmoid_experts(name: str, architecture: str) -> TinyModel:
    """The family of Ling 2: Glm4Moe's routing, with its own names."""
    return TinyModel(
        name,
        architecture,
        _glm4_moe,
        model="Glm4MoeForCausalLM",
        checkpoint=bailing,
        config_json={
            "num_experts": 4,
            "num_shared_experts": 1,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "router_dtype": "fp32",
            "embedding_dropout": 0.0,
            "use_bias": False,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "partial_rotary_factor": 1.0,
        },
        engine={"hf_overrides": {"rope_theta": 10000.0, "rope_scaling": None}},
    )


def _another_name(architecture: str, base: str, name: str = "") -> TinyModel:
    """One of vLLM's further names for the class of a model of transformers."""
    config = {"LlamaForCausalLM": _llama}[base]
    return TinyModel(name or architecture.lower(), architecture, config, model=base)


_GEMMA3: dict[str, Any] = {
    "query_pre_attn_scalar": 20,
    "layer_types": ["full_attention"] * LAYERS,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full_attention", "sliding_attention")
    },
}

TRANSLATED = (
    _another_name("LLaMAForCausalLM", "LlamaForCausalLM", "llama_first"),
    _another_name("InternLM3ForCausalLM", "LlamaForCausalLM", "internlm3"),
    _another_name("IQuestCoderForCausalLM", "LlamaForCausalLM", "iquest_coder"),
    _another_name("TeleChat3ForCausalLM", "LlamaForCausalLM", "telechat3"),
    TinyModel(
        "internlm2",
        "InternLM2ForCausalLM",
        _llama,
        model="LlamaForCausalLM",
        checkpoint=internlm2,
    ),
    TinyModel(
        "pangu_embedded",
        "PanguEmbeddedForCausalLM",
        lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, tie_word_embeddings=False),
        model="LlamaForCausalLM",
    ),
    TinyModel(
        "exaone",
        "ExaoneForCausalLM",
        _llama,
        model="LlamaForCausalLM",
        checkpoint=exaone,
        config_json={"activation_function": "silu", "layer_norm_epsilon": 1e-6},
    ),
    TinyModel(
        "solar",
        "SolarForCausalLM",
        _llama,
        model="LlamaForCausalLM",
        checkpoint=unchanged,
        adjust=_blended,
        config_json={
            "bskcn_1": [1],
            "bskcn_2": [],
            "bskcn_3": [3],
            "bskcn_4": [],
            "bskcn_tv": [0.9, 0.4],
        },
        note="the model blends layers between blocks: post_block[l] is not pre_attn[l+1] there",
    ),
    TinyModel(
        "orion",
        "OrionForCausalLM",
        lambda: transformers.StableLmConfig(
            **NO_HEAD_DIM,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        ),
        model="StableLmForCausalLM",
        checkpoint=unchanged,
        config_json={"rms_norm_eps": 1e-5},
    ),
    TinyModel(
        "teleflm",
        "TeleFLMForCausalLM",
        lambda: transformers.GraniteConfig(
            **NO_HEAD_DIM, attention_multiplier=HEAD_DIM**-0.5, logits_scaling=1.3
        ),
        model="GraniteForCausalLM",
        checkpoint=unchanged,
        config_json={"use_mup": True, "mup_scale_factor": 2.6, "output_mult": 2.0},
    ),
    TinyModel(
        "telechat2",
        "TeleChat2ForCausalLM",
        lambda: transformers.LlamaConfig(
            **{**NO_HEAD_DIM, "num_key_value_heads": 3},
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        model="LlamaForCausalLM",
        checkpoint=telechat2,
        adjust=_no_input_biases,
        config_json={
            "n_layer": LAYERS,
            "n_head": HIDDEN // HEAD_DIM,
            "ffn_hidden_size": INNER,
            "layer_norm_epsilon": 1e-6,
        },
    ),
    TinyModel(
        "minicpm",
        "MiniCPMForCausalLM",
        lambda: transformers.GraniteConfig(
            **NO_HEAD_DIM,
            embedding_multiplier=1.7,
            residual_multiplier=1.1 / LAYERS**0.5,
            attention_multiplier=HEAD_DIM**-0.5,
        ),
        Adapter("model.layers", ("self_attn",), branch_multiplier="residual_multiplier"),
        model="GraniteForCausalLM",
        checkpoint=unchanged,
        adjust=_divided_before_the_head,
        config_json={"scale_emb": 1.7, "scale_depth": 1.1, "dim_model_base": 64},
    ),
    *(
        TinyModel(
            name,
            architecture,
            lambda: transformers.GlmConfig(
                **{**COMMON, "num_attention_heads": 3, "num_key_value_heads": 1},
                attention_bias=True,
                tie_word_embeddings=False,
            ),
            model="GlmForCausalLM",
            checkpoint=chatglm,
            config_json={
                "model_type": "chatglm",
                "num_layers": LAYERS,
                "padded_vocab_size": VOCAB,
                "ffn_hidden_size": INNER,
                "kv_channels": HEAD_DIM,
                "seq_length": MAX_LENGTH,
                "rmsnorm": True,
                "layernorm_epsilon": 1.5625e-07,
                "multi_query_attention": True,
                "multi_query_group_num": 1,
                "add_bias_linear": False,
                "add_qkv_bias": True,
                "original_rope": True,
                "post_layer_norm": True,
                "apply_residual_connection_post_layernorm": False,
                "fp32_residual_connection": False,
                "hidden_dropout": 0.0,
            },
        )
        for name, architecture in (
            ("chatglm", "ChatGLMModel"),
            ("chatglm_conditional", "ChatGLMForConditionalGeneration"),
        )
    ),
    _sigmoid_experts("bailing_moe", "BailingMoeForCausalLM"),
    _sigmoid_experts("bailing_moe_v2", "BailingMoeV2ForCausalLM"),
    _sigmoid_experts("sarvam_moe", "SarvamMoEForCausalLM"),
    _sigmoid_experts("param2moe", "Param2MoEForCausalLM"),
    TinyModel(
        "rnj1",
        "Rnj1ForCausalLM",
        lambda: transformers.Gemma3TextConfig(**COMMON, **_GEMMA3),
        SANDWICH,
        model="Gemma3ForCausalLM",
        checkpoint=unchanged,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "plamo3",
        "Plamo3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(
            **sizes(),
            **{**_GEMMA3, "query_pre_attn_scalar": HEAD_DIM},
            hidden_activation="silu",
            tie_word_embeddings=False,
        ),
        SANDWICH,
        model="Gemma3ForCausalLM",
        checkpoint=plamo3,
        config_json={
            "interleaved_sliding_window": [None] * LAYERS,
            "window_size": WINDOW,
        },
    ),
    TinyModel(
        "mimo",
        "MiMoForCausalLM",
        lambda: transformers.Qwen2Config(**NO_HEAD_DIM),
        model="Qwen2ForCausalLM",
    ),
)
