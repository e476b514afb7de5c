# SPDX-License-Identifier: Apache-2.0
"""Architectures that cut images into tiles, which an encoder reads one by one."""

from __future__ import annotations

from typing import Any

import transformers

from ..pictures import Pictures
from ..reference import Adapter
from ..tiny import COMMON, HIDDEN, NO_HEAD_DIM, TIED_STD, WINDOW, TinyModel
from .hybrid import ROTARY_IN_TORCH, ROTARY_NOTE
from .pictures import ENCODER, ENGINE, IMAGES_ALONE, LANGUAGE, nested_tower

_GRID = [[56, 56], [56, 112], [112, 56]]
_SIGLIP: dict[str, Any] = {
    **ENCODER,
    "model_type": "siglip_vision_model",
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}


def _idefics3_processor(tokenizer: Any) -> Any:
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer,
        image_seq_len=4,
    )


_IDEFICS3 = Pictures(
    _idefics3_processor,
    "<image>",
    (
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
)


def _llava_next_processor(tokenizer: Any) -> Any:
    return transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=_GRID,
        ),
        tokenizer,
        patch_size=28,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


_LLAVA_NEXT = Pictures(_llava_next_processor, "<image>", ("<image>",))


def _llava_onevision_processor(tokenizer: Any) -> Any:
    size = {"height": 56, "width": 56}
    return transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=_GRID),
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


_LLAVA_ONEVISION = Pictures(_llava_onevision_processor, "<image>", ("<image>", "<video>"))


def _cohere2_vision_processor(tokenizer: Any) -> Any:
    tokenizer.pad_token = "w0"  # it pads a batch of one
    return transformers.Cohere2VisionProcessor(
        transformers.Cohere2VisionImageProcessor(
            size={"height": 56, "width": 56}, patch_size=2, max_patches=2
        ),
        tokenizer,
    )


_COHERE2_VISION = Pictures(
    _cohere2_vision_processor,
    "<|IMG_PATCH|>",
    ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    named={
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
)


def _aria_processor(tokenizer: Any) -> Any:
    return transformers.AriaProcessor(
        transformers.AriaImageProcessor(),
        tokenizer,
        size_conversion={980: 4},
    )


_ARIA = Pictures(
    _aria_processor,
    "<|img|>",
    ("<|img|>",),
    named={"image_token": "<|img|>"},
    sizes=((64, 64), (96, 96)),
)


def _lfm2_vl_processor(tokenizer: Any) -> Any:
    return transformers.Lfm2VlProcessor(
        transformers.Lfm2VlImageProcessor(
            do_image_splitting=False, min_image_tokens=4, max_image_tokens=16, tile_size=64
        ),
        tokenizer,
    )


_LFM2_FIELDS: dict[str, Any] = {"conv_dim": HIDDEN, "block_dim": HIDDEN}
"""What checkpoints say beside the fields of transformers' config."""
_LFM2_VL = Pictures(
    _lfm2_vl_processor,
    "<image>",
    ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    named={
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
)

TILE_ROWS = (
    TinyModel(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        lambda: transformers.Idefics3Config(
            text_config=transformers.LlamaConfig(**COMMON),
            vision_config={**ENCODER, "image_size": 56, "patch_size": 14},
            image_token_id=_IDEFICS3.id_of("<image>"),
            scale_factor=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        ),
        Adapter(blocks="model.text_model.layers", branch=("self_attn",)),
        engine={**ENGINE, "max_model_len": 128},
        pictures=_IDEFICS3,
    ),
    TinyModel(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        lambda: transformers.LlavaNextConfig(
            text_config=transformers.MistralConfig(**COMMON),
            vision_config=transformers.CLIPVisionConfig(
                **ENCODER, image_size=56, patch_size=28, projection_dim=32
            ),
            image_token_index=_LLAVA_NEXT.id_of("<image>"),
            image_grid_pinpoints=_GRID,
            image_seq_length=4,
        ),
        LANGUAGE,
        checkpoint=nested_tower,
        engine=ENGINE,
        pictures=_LLAVA_NEXT,
    ),
    TinyModel(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        lambda: transformers.LlavaOnevisionConfig(
            text_config={**NO_HEAD_DIM, "model_type": "qwen2"},
            vision_config=_SIGLIP,
            image_token_index=_LLAVA_ONEVISION.id_of("<image>"),
            video_token_index=_LLAVA_ONEVISION.id_of("<video>"),
            image_grid_pinpoints=_GRID,
        ),
        LANGUAGE,
        checkpoint=nested_tower,
        engine={**IMAGES_ALONE, "max_model_len": 128},
        pictures=_LLAVA_ONEVISION,
    ),
    TinyModel(
        "cohere2_vision",
        "Cohere2VisionForConditionalGeneration",
        lambda: transformers.Cohere2VisionConfig(
            text_config=transformers.Cohere2Config(
                **COMMON,
                logit_scale=1.0,  # transformers' class of the whole model leaves it out
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            vision_config=_SIGLIP,
            image_token_id=_COHERE2_VISION.id_of("<|IMG_PATCH|>"),
            downsample_factor=2,
            alignment_intermediate_size=128,
        ),
        Adapter(blocks="model.language_model.layers", branch=()),
        embedding_std=TIED_STD,
        checkpoint=nested_tower,
        # As of the text model: tests/conformance/zoo/parallel.py.
        reference_config={"text_config": {"sliding_window": WINDOW + 1}},
        engine=ENGINE,
        pictures=_COHERE2_VISION,
    ),
    TinyModel(
        "aria",
        "AriaForConditionalGeneration",
        lambda: transformers.AriaConfig(
            text_config={
                **COMMON,
                "model_type": "aria_text",
                "moe_num_experts": 4,
                "moe_topk": 2,
                "moe_num_shared_experts": 1,
                "intermediate_size": 64,
            },
            vision_config={
                **ENCODER,
                "model_type": "idefics3_vision",
                "image_size": 980,
                "patch_size": 140,
            },
            image_token_index=_ARIA.id_of("<|img|>"),
            projector_patch_to_query_dict={49: 4},
            vision_feature_layer=-1,
        ),
        LANGUAGE,
        engine=ENGINE,
        pictures=_ARIA,
        note="square images: in upstream's encoder others see their padding, in transformers' not",
    ),
    TinyModel(
        "lfm2_vl",
        "Lfm2VlForConditionalGeneration",
        lambda: transformers.Lfm2VlConfig(
            text_config=transformers.Lfm2Config(
                **NO_HEAD_DIM,
                layer_types=["conv", "full_attention"] * 2,
                block_multiple_of=32,
                **_LFM2_FIELDS,
            ),
            vision_config={
                **ENCODER,
                "model_type": "siglip2_vision_model",
                "num_patches": 16,
                "patch_size": 16,
                "vision_use_head": False,
            },
            image_token_id=_LFM2_VL.id_of("<image>"),
            projector_hidden_size=128,
        ),
        Adapter(blocks="model.language_model.layers", branch=("self_attn", "conv")),
        embedding_std=TIED_STD,
        checkpoint=nested_tower,
        engine={**ENGINE, **ROTARY_IN_TORCH},
        pictures=_LFM2_VL,
        note=ROTARY_NOTE,
    ),
)
