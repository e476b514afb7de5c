# SPDX-License-Identifier: Apache-2.0
"""Weights of models of transformers as checkpoints of architectures that it lacks: each its names,
and what one of its tensors packs.
"""

from __future__ import annotations

import re

import torch
from transformers import PretrainedConfig

from ..tiny import HIDDEN, LAYERS, Tensors
from .weights import packed, renamed

_QKV = ("q_proj", "k_proj", "v_proj")


def internlm2(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    result = dict(tensors)
    groups = config.num_key_value_heads
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.self_attn."
        # Per key-value head: its queries, its key, its value.
        by_group = [result.pop(f"{stem}{part}.weight").chunk(groups) for part in _QKV]
        rows = [part for group in zip(*by_group, strict=True) for part in group]
        result[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(rows)
    return renamed(
        result,
        (r"self_attn\.o_proj", "attention.wo"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"embed_tokens", "tok_embeddings"),
        (r"^lm_head", "output"),
    )


def exaone(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        tensors,
        (r"^model\.layers", "transformer.h"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"gate_proj", "c_fc_0"),
        (r"up_proj", "c_fc_1"),
        (r"down_proj", "c_proj"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
    )


def telechat2(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    kept = {k: v for k, v in tensors.items() if not re.search(r"(q|k|v|gate|up)_proj\.bias", k)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.self_attn."
        heads = [
            kept.pop(f"{stem}{part}_proj.weight").chunk(config.num_attention_heads)
            for part in ("k", "v")
        ]
        pairs = [part for head in zip(*heads, strict=True) for part in head]
        kept[f"{stem}key_value.weight"] = torch.cat(pairs)
    return renamed(
        kept,
        (r"^model\.layers", "transformer.h"),
        (r"^model\.embed_tokens", "transformer.word_embeddings"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"self_attn\.q_proj", "self_attention.query"),
        (r"self_attn\.o_proj", "self_attention.dense"),
        (r"self_attn", "self_attention"),
    )


def chatglm(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        packed(tensors, _QKV, "query_key_value"),
        (r"^model\.layers", "transformer.encoder.layers"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"),
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^lm_head", "transformer.output_layer"),
        (r"self_attn\.o_proj", "self_attention.dense"),
        (r"self_attn", "self_attention"),
        (r"gate_up_proj", "dense_h_to_4h"),
        (r"down_proj", "dense_4h_to_h"),
    )


def bailing(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        packed(tensors, _QKV, "query_key_value"),
        (r"embed_tokens", "word_embeddings"),
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.q_norm", "attention.query_layernorm"),
        (r"self_attn\.k_norm", "attention.key_layernorm"),
        (r"self_attn", "attention"),
        (r"e_score_correction_bias", "expert_bias"),
    )


def plamo3(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    result = packed(tensors, ("gate_proj", "up_proj"), "gate_up_proj")
    result = renamed(
        packed(result, _QKV, "qkv_proj"),
        (r"model\.layers", "model.layers.layers"),
        (r"self_attn", "mixer"),
        (r"input_layernorm", "pre_mixer_norm"),
        (r"post_attention_layernorm", "post_mixer_norm"),
        (r"pre_feedforward_layernorm", "pre_mlp_norm"),
        (r"post_feedforward_layernorm", "post_mlp_norm"),
    )
    for name, tensor in result.items():
        # Both add an offset to a norm's weight; Gemma always one.
        if "post_mixer_norm" in name:
            result[name] = tensor + 1 - 1 / 5
        elif "post_mlp_norm" in name:
            result[name] = tensor + 1 - 5**-1.5
        elif "embed_tokens" in name:
            result[name] = tensor * HIDDEN**0.5
    return result
