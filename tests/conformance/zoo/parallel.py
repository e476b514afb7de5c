# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP from the same input: no `post_attn`."""

from __future__ import annotations

from typing import Any

import transformers

from ..reference import Adapter
from ..tiny import (
    COMMON,
    HEAD_DIM,
    HIDDEN,
    INNER,
    LAYERS,
    MAX_LENGTH,
    NO_HEAD_DIM,
    NO_SPECIAL_TOKENS,
    PARALLEL,
    TIED_STD,
    VOCAB,
    WINDOW,
    TinyModel,
)

_TRANSFORMER_H = Adapter(blocks="transformer.h", branch=())
_WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
}

PARALLEL_ROWS = (
    TinyModel(
        "gptj",
        "GPTJForCausalLM",
        lambda: transformers.GPTJConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=INNER,
            n_layer=LAYERS,
            n_head=HIDDEN // HEAD_DIM,
            n_positions=MAX_LENGTH,
            rotary_dim=16,
            tie_word_embeddings=False,
        ),
        _TRANSFORMER_H,
    ),
    TinyModel(
        "falcon",
        "FalconForCausalLM",
        lambda: transformers.FalconConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // HEAD_DIM,
            max_position_embeddings=MAX_LENGTH,
            bias=True,
        ),
        _TRANSFORMER_H,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "falcon_new",
        "FalconForCausalLM",
        lambda: transformers.FalconConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_kv_heads=2,
            max_position_embeddings=MAX_LENGTH,
            new_decoder_architecture=True,
        ),
        _TRANSFORMER_H,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "cohere",
        "CohereForCausalLM",
        lambda: transformers.CohereConfig(**NO_HEAD_DIM, logit_scale=0.4, use_qk_norm=True),
        PARALLEL,
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "cohere2",
        "Cohere2ForCausalLM",
        lambda: transformers.Cohere2Config(**COMMON, **_WINDOWED, logit_scale=0.4),
        PARALLEL,
        embedding_std=TIED_STD,
        # vLLM 0.32.0 lets a Cohere2 window see one token more than transformers 5.19 does
        # (commandr.py says it follows the training convention).
        reference_config={"sliding_window": WINDOW + 1},
    ),
    TinyModel(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        lambda: transformers.Cohere2MoeConfig(
            **COMMON,
            **_WINDOWED,
            logit_scale=0.4,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            prefix_dense_intermediate_size=80,
            mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
        ),
        PARALLEL,
        embedding_std=TIED_STD,
        reference_config={"sliding_window": WINDOW + 1},
    ),
)
