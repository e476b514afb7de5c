# SPDX-License-Identifier: Apache-2.0
"""Architectures that read images: a tiny encoder of images before a tiny decoder.

Rows are those of the decoder, at the positions of text and of images. The encoders are upstream's
own code against that of transformers; what they get wrong shows in the plain error.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

from ..pictures import Pictures
from ..reference import Adapter
from ..tiny import COMMON, HIDDEN, NO_HEAD_DIM, TIED_STD, WINDOW, Tensors, TinyModel
from .moe import halves_of_pairs

_LANGUAGE = Adapter(blocks="model.language_model.layers", branch=("self_attn",))
_SANDWICH = Adapter(blocks="model.language_model.layers", branch=("post_attention_layernorm",))
_ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "skip_mm_profiling": True}
_ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def _nested_tower(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """Upstream has the modules of CLIP and SigLIP in a vision_model, as transformers had."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    return {k if new in k else k.replace(old, new): v for k, v in tensors.items()}


def _experts_turned(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """Published checkpoints, and upstream, have matrices of experts the other way round."""
    return {k: v.transpose(1, 2) if ".experts." in k else v for k, v in tensors.items()}


def _llava_processor(tokenizer: Any) -> Any:
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


_LLAVA = Pictures(_llava_processor, "<image>", ("<image>",))


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


def _gemma3_processor(tokenizer: Any) -> Any:
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer,
        image_seq_length=4,
    )


_GEMMA3_NOTE = (
    "upstream's CPU attention has no two-way attention among an image's tokens; the reference is "
    "without it, too"
)
_GEMMA3 = Pictures(
    _gemma3_processor,
    "<boi>",
    ("<boi>", "<img>", "<eoi>"),
    named={"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"},
    causal=True,
)


def _pixtral_processor(tokenizer: Any) -> Any:
    return transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(
            size={"longest_edge": 96}, patch_size={"height": 16, "width": 16}
        ),
        tokenizer,
        patch_size=16,
        spatial_merge_size=2,
    )


_PIXTRAL = Pictures(_pixtral_processor, "[IMG]", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))


def _llama4_processor(tokenizer: Any) -> Any:
    return transformers.Llama4Processor(
        transformers.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=2),
        tokenizer,
        patch_size=14,
        pixel_shuffle_ratio=0.5,
    )


_LLAMA4 = Pictures(
    _llama4_processor,
    "<|image|>",
    (
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ),
)


def _internvl_processor(tokenizer: Any) -> Any:
    return transformers.InternVLProcessor(
        transformers.GotOcr2ImageProcessor(
            size={"height": 56, "width": 56}, min_patches=1, max_patches=1
        ),
        tokenizer,
        transformers.InternVLVideoProcessor(size={"height": 56, "width": 56}),
        image_seq_length=4,
    )


_INTERNVL = Pictures(
    _internvl_processor,
    "<IMG_CONTEXT>",
    ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)


def _gemma4_processor(tokenizer: Any) -> Any:
    tokenizer.pad_token = "w0"  # it pads a batch of one
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(patch_size=16, max_soft_tokens=70, pooling_kernel_size=3),
        tokenizer,
        transformers.Gemma4VideoProcessor(),
        image_seq_length=70,
    )


_GEMMA4 = Pictures(
    _gemma4_processor,
    "<|image|>",
    ("<|image|>", "<|boi|>", "<|eoi|>", "<|audio|>", "<|boa|>", "<|eoa|>", "<|video|>"),
    named={
        "image_token": "<|image|>",
        "boi_token": "<|boi|>",
        "eoi_token": "<|eoi|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|boa|>",
        "eoa_token": "<|eoa|>",
    },
    causal=True,
)

PICTURE_ROWS = (
    TinyModel(
        "llava",
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**COMMON),
            vision_config=transformers.CLIPVisionConfig(
                **_ENCODER, image_size=56, patch_size=14, projection_dim=32
            ),
            image_token_index=_LLAVA.id_of("<image>"),
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            image_seq_length=16,
        ),
        _LANGUAGE,
        checkpoint=_nested_tower,
        engine=_ENGINE,
        pictures=_LLAVA,
    ),
    TinyModel(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        lambda: transformers.Qwen3VLConfig(text_config=_QWEN3_VL_TEXT, **_QWEN3_VL_CONFIG),
        _LANGUAGE,
        engine={**_ENGINE, "limit_mm_per_prompt": {"image": 2, "video": 0}},
        pictures=_QWEN3_VL,
        note="the model adds features of images after the first layers: post_block[l] is not "
        "pre_attn[l+1] there",
    ),
    TinyModel(
        "gemma3_mm",
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(
                **COMMON,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            vision_config={
                **_ENCODER,
                "model_type": "siglip_vision_model",
                "image_size": 56,
                "patch_size": 14,
                "vision_use_head": False,
            },
            mm_tokens_per_image=4,
            boi_token_index=_GEMMA3.id_of("<boi>"),
            eoi_token_index=_GEMMA3.id_of("<eoi>"),
            image_token_index=_GEMMA3.id_of("<img>"),
        ),
        _SANDWICH,
        embedding_std=TIED_STD,
        checkpoint=_nested_tower,
        engine=_ENGINE,
        pictures=_GEMMA3,
        note=_GEMMA3_NOTE,
    ),
    TinyModel(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**COMMON),
            vision_config={
                **_ENCODER,
                "model_type": "pixtral",
                "image_size": 96,
                "patch_size": 16,
                "head_dim": 32,
            },
            image_token_index=_PIXTRAL.id_of("[IMG]"),
            spatial_merge_size=2,
        ),
        _LANGUAGE,
        engine=_ENGINE,
        pictures=_PIXTRAL,
    ),
    TinyModel(
        "gemma4_mm",
        "Gemma4ForConditionalGeneration",
        lambda: transformers.Gemma4Config(
            text_config={
                **COMMON,
                "pad_token_id": 0,  # what transformers embeds in place of an image's token
                "max_position_embeddings": 256,  # its images have 64 tokens each
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "hidden_size_per_layer_input": 0,
            },
            vision_config={
                **_ENCODER,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "position_embedding_size": 64,
                "default_output_length": 70,
            },
            audio_config=None,
            image_token_id=_GEMMA4.id_of("<|image|>"),
            video_token_id=_GEMMA4.id_of("<|video|>"),
            audio_token_id=_GEMMA4.id_of("<|audio|>"),
            boi_token_id=_GEMMA4.id_of("<|boi|>"),
            eoi_token_id=_GEMMA4.id_of("<|eoi|>"),
            boa_token_id=_GEMMA4.id_of("<|boa|>"),
            eoa_token_index=_GEMMA4.id_of("<|eoa|>"),
        ),
        _SANDWICH,
        embedding_std=TIED_STD,
        engine={
            **_ENGINE,
            "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0},
            "max_model_len": 192,
        },
        pictures=_GEMMA4,
        note=_GEMMA3_NOTE
        + ". The first difference is in the image's features, before the first block: given the "
        "engine's own, the reference agreed (tried by hand, no test)",
    ),
    TinyModel(
        "llama4_mm",
        "Llama4ForConditionalGeneration",
        lambda: transformers.Llama4Config(
            text_config={
                **COMMON,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 80,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 32,
                "floor_scale": 16,
                "attn_temperature_tuning": False,
            },
            vision_config={
                **_ENCODER,
                "intermediate_size": 256,
                "image_size": 56,
                "patch_size": 14,
                "pixel_shuffle_ratio": 0.5,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "vision_output_dim": 64,
            },
            image_token_index=_LLAMA4.id_of("<|patch|>"),
            boi_token_index=_LLAMA4.id_of("<|image_start|>"),
            eoi_token_index=_LLAMA4.id_of("<|image_end|>"),
        ),
        Adapter(blocks="language_model.model.layers", branch=("self_attn",)),
        heads=halves_of_pairs,
        engine=_ENGINE,
        pictures=_LLAMA4,
        note="upstream has the rotary's columns of q and k in another order",
    ),
    TinyModel(
        "internvl",
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**NO_HEAD_DIM, "model_type": "qwen2"},
            vision_config={
                **_ENCODER,
                "image_size": [56, 56],
                "patch_size": [14, 14],
            },
            image_token_id=_INTERNVL.id_of("<IMG_CONTEXT>"),
            image_seq_length=4,
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        ),
        _LANGUAGE,
        engine={**_ENGINE, "limit_mm_per_prompt": {"image": 2, "video": 0}},
        pictures=_INTERNVL,
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
        _LANGUAGE,
        checkpoint=_experts_turned,
        engine={**_ENGINE, "limit_mm_per_prompt": {"image": 2, "video": 0}},
        pictures=_QWEN3_VL,
    ),
)
