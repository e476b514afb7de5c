# SPDX-License-Identifier: Apache-2.0
"""Attention then MLP, both dense, one norm before each."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers.activations import XIELUActivation
from transformers.models.bloom.modeling_bloom import BloomMLP

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
    TIED_STD,
    VOCAB,
    WINDOW,
    TinyModel,
    sizes,
)


def _xielu_in_bfloat16(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, XIELUActivation):
            module.to(torch.bfloat16)


def _exact_gelu(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, BloomMLP):
            module.set_submodule("gelu_impl", nn.GELU())


def _unscaled(point: str, rows: torch.Tensor) -> torch.Tensor:
    return rows * HEAD_DIM**0.5 if point == "q" else rows


DENSE = (
    TinyModel(
        "llama",
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(
            **COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
        ),
    ),
    TinyModel(
        "qwen3",
        "Qwen3ForCausalLM",
        # vLLM gives Qwen3 a bias on q, k, v only, transformers on the output too; real checkpoints
        # have none. The norms on q and k are what this architecture adds.
        lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=False),
    ),
    TinyModel(
        "qwen2",
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**NO_HEAD_DIM, tie_word_embeddings=True),
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "mistral",
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    ),
    TinyModel(
        "ministral3",
        "Ministral3ForCausalLM",
        lambda: transformers.Ministral3Config(**COMMON),
    ),
    TinyModel(
        "gemma",
        "GemmaForCausalLM",
        lambda: transformers.GemmaConfig(**COMMON),
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "gpt2",
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=INNER,
            n_layer=LAYERS,
            n_head=HIDDEN // HEAD_DIM,
            n_positions=MAX_LENGTH,
        ),
        Adapter(blocks="transformer.h", branch=("attn",)),
        embedding_std=TIED_STD,
    ),
    TinyModel(
        "apertus",
        "ApertusForCausalLM",
        lambda: transformers.ApertusConfig(**NO_HEAD_DIM),
        adjust=_xielu_in_bfloat16,
        note="upstream holds xIELU's scalars in bfloat16; the reference does the same",
    ),
    TinyModel(
        "bloom",
        "BloomForCausalLM",
        lambda: transformers.BloomConfig(
            **NO_SPECIAL_TOKENS,
            vocab_size=VOCAB,
            hidden_size=128,
            n_layer=LAYERS,
            n_head=4,
        ),
        # The block's attention module adds its input: what it returns is the stream already.
        Adapter(blocks="transformer.h", branch=(), second_norm="post_attention_layernorm"),
        embedding_std=TIED_STD,
        adjust=_exact_gelu,
        note="upstream and the reference compute the exact GELU, transformers its tanh form",
    ),
    TinyModel(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        lambda: transformers.Ernie4_5Config(**COMMON, use_bias=False, tie_word_embeddings=False),
    ),
    TinyModel(
        "granite",
        "GraniteForCausalLM",
        lambda: transformers.GraniteConfig(
            **NO_HEAD_DIM,
            embedding_multiplier=1.7,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=1.3,
        ),
        Adapter("model.layers", ("self_attn",), branch_multiplier="residual_multiplier"),
    ),
    TinyModel(
        "granite_swa",
        "GraniteSWAForCausalLM",
        lambda: transformers.GraniteSWAConfig(
            **NO_HEAD_DIM,
            embedding_multiplier=1.7,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=1.3,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
            tie_word_embeddings=False,
        ),
        Adapter("model.layers", ("self_attn",), branch_multiplier="residual_multiplier"),
    ),
    TinyModel(
        "nemotron",
        "NemotronForCausalLM",
        lambda: transformers.NemotronConfig(**COMMON),
    ),
    TinyModel(
        "opt",
        "OPTForCausalLM",
        lambda: transformers.OPTConfig(
            **{**NO_SPECIAL_TOKENS, "pad_token_id": 1},
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // HEAD_DIM,
            max_position_embeddings=MAX_LENGTH,
        ),
        Adapter(blocks="model.decoder.layers", branch=("self_attn",)),
        embedding_std=TIED_STD,
        heads=_unscaled,
        note="transformers multiplies q by attention's scale, upstream its product with k",
    ),
    TinyModel(
        "phi3",
        "Phi3ForCausalLM",
        lambda: transformers.Phi3Config(
            **sizes(head_dim=None, num_attention_heads=3, num_key_value_heads=1),
            original_max_position_embeddings=MAX_LENGTH,
        ),
    ),
    TinyModel(
        "stablelm",
        "StableLmForCausalLM",
        lambda: transformers.StableLmConfig(
            **NO_HEAD_DIM, use_qkv_bias=True, qk_layernorm=False, use_parallel_residual=False
        ),
    ),
)
