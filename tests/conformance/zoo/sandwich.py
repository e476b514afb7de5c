# SPDX-License-Identifier: Apache-2.0
"""A norm on the output of each branch, before it enters the sum; with or without one before it."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig

from ..headed import MuseGlimmer
from ..reference import Adapter
from ..tiny import (
    COMMON,
    HIDDEN,
    LAYERS,
    NO_HEAD_DIM,
    NO_SPECIAL_TOKENS,
    SANDWICH,
    TIED_STD,
    VOCAB,
    WINDOW,
    Tensors,
    TinyModel,
)
from .weights import renamed

_WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}

_GLOBAL_HEADS: dict[str, Any] = {"global_head_dim": 64}

LANES = 3
"""Of Gemma 3n's stream; one fewer than it has, so that no square hides a transposed matrix."""


def _no_token_inputs(model: nn.Module) -> None:
    """Upstream passes `per_layer_inputs` in Gemma3nForConditionalGeneration alone."""
    model.model.get_per_layer_inputs = lambda input_ids: None  # type: ignore[union-attr]


def _within_a_model_of_images(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(tensors, (r"^model\.", "model.language_model."))


def _hcx(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        tensors,
        (r"^model\.language_model\.(?!lm_head)", "language_model.model."),
        (r"^model\.language_model\.lm_head", "language_model.lm_head"),
        (r"vision_projector", "mm_projector"),
    )


SANDWICH_ROWS = (
    TinyModel(
        "gemma2",
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(
            **COMMON,
            **_WINDOWED,
            attention_bias=True,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
        SANDWICH,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "gemma3",
        "Gemma3ForCausalLM",
        lambda: transformers.Gemma3TextConfig(**COMMON, **_WINDOWED, query_pre_attn_scalar=20),
        SANDWICH,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "gemma4",
        "Gemma4ForCausalLM",
        lambda: transformers.Gemma4TextConfig(
            **COMMON,
            **_WINDOWED,
            **_GLOBAL_HEADS,
            vocab_size_per_layer_input=COMMON["vocab_size"],
            hidden_size_per_layer_input=16,
        ),
        SANDWICH,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "gemma4_moe",
        "Gemma4ForCausalLM",
        lambda: transformers.Gemma4TextConfig(
            **COMMON,
            **_WINDOWED,
            **_GLOBAL_HEADS,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=64,
        ),
        SANDWICH,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "gemma3n",
        "Gemma3nForCausalLM",
        lambda: transformers.Gemma3nTextConfig(
            **COMMON,
            **_WINDOWED,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2,
            laurel_rank=8,
            altup_num_inputs=LANES,
            altup_active_idx=1,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        ),
        Adapter("model.layers", (), lanes=LANES),
        embedding_std=TIED_STD,
        adjust=_no_token_inputs,
        note=f"a stream of {LANES} lanes (AltUp); upstream's text-only class leaves out what each "
        "layer reads of the token's id, and so does the reference",
    ),
    TinyModel(
        "muse_glimmer",
        "MuseGlimmerForCausalLM",
        lambda: transformers.MuseGlimmerTextConfig(
            **COMMON, sliding_window=WINDOW, output_multiplier=0.6, final_logit_softcapping=4.0
        ),
        SANDWICH,
        model=MuseGlimmer,
        checkpoint=_within_a_model_of_images,
        note="the text part of a model that reads images, without the rest",
    ),
    TinyModel(
        "glm4",
        "Glm4ForCausalLM",
        lambda: transformers.Glm4Config(**COMMON, attention_bias=True),
        Adapter("model.layers", ("post_self_attn_layernorm",)),
    ),
    TinyModel(
        "exaone4",
        "Exaone4ForCausalLM",
        lambda: transformers.Exaone4Config(**COMMON, **_WINDOWED),
        SANDWICH,
    ),
    TinyModel(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        lambda: transformers.HyperCLOVAXConfig(
            **NO_HEAD_DIM,
            use_post_norm=True,
            embedding_multiplier=1.7,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=1.3,
        ),
        Adapter("model.layers", ("post_norm1",), branch_multiplier="residual_multiplier"),
    ),
    TinyModel(
        "hcx_vision_v2",
        "HCXVisionV2ForCausalLM",
        lambda: transformers.HyperCLOVAXVisionV2Config(
            **NO_SPECIAL_TOKENS,
            text_config=transformers.HyperCLOVAXConfig(
                **NO_HEAD_DIM,
                use_post_norm=True,
                embedding_multiplier=1.7,
                attention_multiplier=0.2,
                logits_scaling=1.3,
                tie_word_embeddings=False,
            ),
            vision_config={
                "depth": 1,
                "hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [0],
            },
            tie_word_embeddings=False,
        ),
        Adapter("model.language_model.layers", ("post_norm1",)),
        model="HyperCLOVAXVisionV2ForConditionalGeneration",
        checkpoint=_hcx,
        engine={"limit_mm_per_prompt": {"image": 0, "video": 0}},
        note="a model that reads images, without any",
    ),
    TinyModel(
        "afmoe",
        "AfmoeForCausalLM",
        lambda: transformers.AfmoeConfig(
            **COMMON,
            **_WINDOWED,
            moe_intermediate_size=64,
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            route_scale=1.6,
            mup_enabled=True,
        ),
        SANDWICH,
        config_json={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
)
