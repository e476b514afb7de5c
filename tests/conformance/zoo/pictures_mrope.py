# SPDX-License-Identifier: Apache-2.0
"""Architectures that read images and rotate queries and keys by three positions (mrope): a token's
time, row and column."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from ..pictures import Pictures
from ..reference import Adapter
from ..tiny import (
    COMMON,
    HIDDEN,
    NO_HEAD_DIM,
    TIED_STD,
    WINDOW,
    Tensors,
    TinyModel,
)
from .pictures import IMAGES_ALONE, LANGUAGE

_DEEPSTACK = (
    "the model adds features of images after the first layers: post_block[l] is not "
    "pre_attn[l+1] there"
)


def _experts_turned(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """Published checkpoints, and upstream, have matrices of experts the other way round."""
    return {k: v.transpose(1, 2) if ".experts." in k else v for k, v in tensors.items()}


_SIZE = {"shortest_edge": 28**2, "longest_edge": 112**2}


def _qwen2_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=_SIZE),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(patch_size=14),
    )


def _qwen2_5_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=_SIZE),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(patch_size=14),
    )


_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_QWEN2_VL = Pictures(
    _qwen2_vl_processor, "<|vision_start|><|image_pad|><|vision_end|>", _QWEN_TOKENS
)
_QWEN2_5_VL = Pictures(_qwen2_5_vl_processor, _QWEN2_VL.written, _QWEN_TOKENS)
_QWEN_CONFIG: dict[str, Any] = {
    "text_config": {
        **NO_HEAD_DIM,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
        },
    },
    "image_token_id": _QWEN2_VL.id_of("<|image_pad|>"),
    "video_token_id": _QWEN2_VL.id_of("<|video_pad|>"),
    "vision_start_token_id": _QWEN2_VL.id_of("<|vision_start|>"),
    "vision_end_token_id": _QWEN2_VL.id_of("<|vision_end|>"),
    "tie_word_embeddings": False,
}


def _qwen3_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, size={"shortest_edge": 32**2, "longest_edge": 128**2}
        ),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(patch_size=16),
    )


_QWEN3_VL = Pictures(
    _qwen3_vl_processor,
    "<|vision_start|><|image_pad|><|vision_end|>",
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
_QWEN3_VL_CONFIG: dict[str, Any] = {
    "image_token_id": _QWEN3_VL.id_of("<|image_pad|>"),
    "video_token_id": _QWEN3_VL.id_of("<|video_pad|>"),
    "vision_start_token_id": _QWEN3_VL.id_of("<|vision_start|>"),
    "vision_end_token_id": _QWEN3_VL.id_of("<|vision_end|>"),
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
_QWEN3_VL_TEXT: dict[str, Any] = {
    **COMMON,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}


def _glm4v_processor(tokenizer: Any) -> Any:
    return transformers.Glm4vProcessor(
        transformers.Glm4vImageProcessor(patch_size=14, merge_size=2, size=_SIZE),
        tokenizer,
        transformers.Glm4vVideoProcessor(patch_size=14),
    )


_GLM4V = Pictures(
    _glm4v_processor,
    "<|begin_of_image|><|image|><|end_of_image|>",
    (
        "<|begin_of_image|>",
        "<|image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|video|>",
        "<|end_of_video|>",
    ),
)


def _compass_processor(tokenizer: Any) -> Any:
    return transformers.CohereCompassProcessor(
        transformers.CohereCompassImageProcessor(patch_size=14, merge_size=2, size=_SIZE),
        tokenizer,
        transformers.CohereCompassVideoProcessor(patch_size=14),
    )


_ROTATED, _THETA = "sliding_attention", 10000.0
_COMPASS = Pictures(
    _compass_processor,
    "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    ("<|VISION_START|>", "<|IMAGE_PAD|>", "<|VISION_END|>", "<|VIDEO_PAD|>"),
)


@torch.no_grad()
def _upstream_rotary(model: nn.Module) -> None:
    """Time, rows and columns have a share each of the frequencies, from the highest."""
    rotary: Any = model.get_submodule("model.language_model.rotary_emb")
    shares = rotary.mrope_section[_ROTATED]
    steps = torch.arange(sum(shares), dtype=torch.float32)
    rotary.get_buffer(f"{_ROTATED}_inv_freq").copy_(_THETA ** (-steps / sum(shares)))

    def recompose(angles: torch.Tensor, layer_type: str) -> torch.Tensor:
        axes = enumerate(angles.split(rotary.mrope_section[layer_type], dim=-1))
        return torch.cat([own[axis] for axis, own in axes] * 2, dim=-1)

    rotary.recomposition_frequencies = recompose


MROPE_ROWS = (
    TinyModel(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        lambda: transformers.Qwen2VLConfig(
            vision_config={
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": HIDDEN,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 14,
            },
            **_QWEN_CONFIG,
        ),
        LANGUAGE,
        engine=IMAGES_ALONE,
        pictures=_QWEN2_VL,
    ),
    TinyModel(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        lambda: transformers.Qwen2_5_VLConfig(
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "out_hidden_size": HIDDEN,
            },
            **_QWEN_CONFIG,
        ),
        LANGUAGE,
        engine=IMAGES_ALONE,
        pictures=_QWEN2_5_VL,
    ),
    TinyModel(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        lambda: transformers.Qwen3VLConfig(text_config=_QWEN3_VL_TEXT, **_QWEN3_VL_CONFIG),
        LANGUAGE,
        engine=IMAGES_ALONE,
        pictures=_QWEN3_VL,
        note=_DEEPSTACK,
    ),
    TinyModel(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        lambda: transformers.Qwen3VLMoeConfig(
            text_config={
                **_QWEN3_VL_TEXT,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
            },
            **_QWEN3_VL_CONFIG,
        ),
        LANGUAGE,
        checkpoint=_experts_turned,
        engine=IMAGES_ALONE,
        pictures=_QWEN3_VL,
    ),
    TinyModel(
        "glm4v",
        "Glm4vForConditionalGeneration",
        lambda: transformers.Glm4vConfig(
            text_config={
                **NO_HEAD_DIM,
                "attention_bias": True,  # which transformers does not ask for
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                    "partial_rotary_factor": 0.5,
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "out_hidden_size": HIDDEN,
            },
            image_token_id=_GLM4V.id_of("<|image|>"),
            video_token_id=_GLM4V.id_of("<|video|>"),
            image_start_token_id=_GLM4V.id_of("<|begin_of_image|>"),
            image_end_token_id=_GLM4V.id_of("<|end_of_image|>"),
            video_start_token_id=_GLM4V.id_of("<|begin_of_video|>"),
            video_end_token_id=_GLM4V.id_of("<|end_of_video|>"),
            tie_word_embeddings=False,
        ),
        Adapter(blocks="model.language_model.layers", branch=("post_self_attn_layernorm",)),
        engine=IMAGES_ALONE,
        pictures=_GLM4V,
    ),
    TinyModel(
        "cohere_compass",
        "CohereCompassForConditionalGeneration",
        lambda: transformers.CohereCompassConfig(
            text_config={
                **NO_HEAD_DIM,
                "logit_scale": 0.4,
                "tie_word_embeddings": True,
                "sliding_window": WINDOW,
                "layer_types": [_ROTATED, "full_attention"] * 2,
                "rope_parameters": {
                    _ROTATED: {
                        "rope_type": "default",
                        "rope_theta": _THETA,
                        "mrope_section": [6, 6, 4],
                    },
                    "full_attention": None,
                },
            },
            vision_config={
                "depth": 3,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "patch_size": 14,
                "out_hidden_size": HIDDEN,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            image_token_id=_COMPASS.id_of("<|IMAGE_PAD|>"),
            video_token_id=_COMPASS.id_of("<|VIDEO_PAD|>"),
            vision_start_token_id=_COMPASS.id_of("<|VISION_START|>"),
            vision_end_token_id=_COMPASS.id_of("<|VISION_END|>"),
            tie_word_embeddings=True,
        ),
        Adapter(blocks="model.language_model.layers", branch=()),
        embedding_std=TIED_STD,
        engine=IMAGES_ALONE,
        pictures=_COMPASS,
        adjust=_upstream_rotary,
        note=f"{_DEEPSTACK}; upstream gives time, rows and columns the rotary's frequencies in "
        "another order than transformers does; the reference does the same",
    ),
)
