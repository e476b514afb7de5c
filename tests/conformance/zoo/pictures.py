# SPDX-License-Identifier: Apache-2.0
"""Architectures that read images: a tiny encoder of images before a tiny decoder.

Rows are those of the decoder, at the positions of text and of images. The encoders are upstream's
own code against that of transformers; what they get wrong shows in the plain error.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from ..pictures import Pictures
from ..reference import Adapter
from ..tiny import COMMON, NO_HEAD_DIM, TIED_STD, WINDOW, Tensors, TinyModel
from .moe import halves_of_pairs

LANGUAGE = Adapter(blocks="model.language_model.layers", branch=("self_attn",))
_SANDWICH = Adapter(blocks="model.language_model.layers", branch=("post_attention_layernorm",))
ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "skip_mm_profiling": True}
IMAGES_ALONE: dict[str, Any] = {**ENGINE, "limit_mm_per_prompt": {"image": 2, "video": 0}}
"""Of architectures that read videos, too."""
ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def nested_tower(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """Upstream has the modules of CLIP and SigLIP in a vision_model, as transformers had."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    return {k if new in k else k.replace(old, new): v for k, v in tensors.items()}


@torch.no_grad()
def _milder_attention(model: nn.Module) -> None:
    """Attention here multiplies queries and keys as their norms leave them, and by no scale: with
    norms of about one its weights are so sharp that rounding shows."""
    generator = torch.Generator().manual_seed(3)
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            weight: torch.Tensor = module.weight
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.shape[0] ** -0.25 * (1.0 + 0.3 * noise))


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


def _gemma3_processor(tokenizer: Any) -> Any:
    return transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer,
        image_seq_length=4,
    )


ONE_WAY = (
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
                **ENCODER, image_size=56, patch_size=14, projection_dim=32
            ),
            image_token_index=_LLAVA.id_of("<image>"),
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            image_seq_length=16,
        ),
        LANGUAGE,
        checkpoint=nested_tower,
        engine=ENGINE,
        pictures=_LLAVA,
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
                **ENCODER,
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
        checkpoint=nested_tower,
        engine=ENGINE,
        pictures=_GEMMA3,
        note=ONE_WAY,
    ),
    TinyModel(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        lambda: transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**COMMON),
            vision_config={
                **ENCODER,
                "model_type": "pixtral",
                "image_size": 96,
                "patch_size": 16,
                "head_dim": 32,
            },
            image_token_index=_PIXTRAL.id_of("[IMG]"),
            spatial_merge_size=2,
        ),
        LANGUAGE,
        engine=ENGINE,
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
                **ENCODER,
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
            **ENGINE,
            "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0},
            "max_model_len": 192,
        },
        pictures=_GEMMA4,
        adjust=_milder_attention,
        note=ONE_WAY,
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
                **ENCODER,
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
        engine=ENGINE,
        pictures=_LLAMA4,
        note="upstream has the rotary's columns of q and k in another order",
    ),
    TinyModel(
        "internvl",
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**NO_HEAD_DIM, "model_type": "qwen2"},
            vision_config={
                **ENCODER,
                "image_size": [56, 56],
                "patch_size": [14, 14],
            },
            image_token_id=_INTERNVL.id_of("<IMG_CONTEXT>"),
            image_seq_length=4,
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        ),
        LANGUAGE,
        engine=IMAGES_ALONE,
        pictures=_INTERNVL,
    ),
)
