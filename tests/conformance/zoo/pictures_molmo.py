# SPDX-License-Identifier: Apache-2.0
"""Molmo 2, whose checkpoints bring their config and processor as code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..molmo2 import Molmo2
from ..molmo2_checkpoint import SPECIALS, Molmo2Config, Molmo2Processor
from ..pictures import Pictures
from ..reference import Adapter
from ..tiny import COMMON, HIDDEN, Tensors, TinyModel
from .pictures import IMAGES_ALONE, ONE_WAY


def _processor(tokenizer: Any) -> Any:
    tokenizer.bos_token = "<bos>"
    return Molmo2Processor(tokenizer)


_MOLMO2 = Pictures(_processor, "<|image|>", SPECIALS)
_NEW = 5
"""Rows of the embedding beyond the vocabulary, which checkpoints keep apart."""


def _embedding_in_two(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    whole = tensors.pop("model.transformer.wte.weight")
    vocabulary: int = config.text_config.vocab_size
    wte = "model.transformer.wte."
    parts = {f"{wte}embedding": whole[:vocabulary], f"{wte}new_embedding": whole[vocabulary:]}
    return tensors | parts


@torch.no_grad()
def _smaller_features(model: nn.Module) -> None:
    """The encoder ends without a norm; what comes of random weights would be a hundred times the
    text's rows, and hide what layers add to it."""
    weight = model.get_submodule("model.vision_backbone.image_projector.w2").weight
    assert isinstance(weight, torch.Tensor)
    weight.mul_(0.25 / weight.norm())


def _config(**text: Any) -> Molmo2Config:
    return Molmo2Config(
        text_config={
            **COMMON,
            "additional_vocab_size": _NEW,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "use_qk_norm": True,
            **text,
        },
        adapter_config={"text_hidden_size": HIDDEN},
        image_patch_id=_MOLMO2.id_of("<im_patch>"),
        image_col_id=_MOLMO2.id_of("<im_col>"),
        image_start_token_id=_MOLMO2.id_of("<im_start>"),
        low_res_image_start_token_id=_MOLMO2.id_of("<low_res_im_start>"),
        image_end_token_id=_MOLMO2.id_of("<im_end>"),
        image_low_res_id=_MOLMO2.id_of("<|image|>"),
        frame_start_token_id=_MOLMO2.id_of("<im_start>"),
        frame_end_token_id=_MOLMO2.id_of("<im_end>"),
    )


_BEFORE = TinyModel(
    "molmo2",
    "Molmo2ForConditionalGeneration",
    lambda: _config(qk_norm_type="qwen3"),
    Adapter(blocks="model.transformer.blocks", branch=("self_attn",)),
    model=Molmo2,
    checkpoint=_embedding_in_two,
    adjust=_smaller_features,
    engine={**IMAGES_ALONE, "trust_remote_code": True},
    pictures=_MOLMO2,
    note="transformers lacks it: the reference is plain PyTorch, conformance/molmo2.py, and the "
    f"processor ours; {ONE_WAY}",
)

MOLMO_ROWS = (
    _BEFORE,
    replace(
        _BEFORE,
        name="molmo2_after",
        config=lambda: _config(qk_norm_type="olmo", qkv_bias=False, norm_after=True),
        adapter=Adapter(blocks="model.transformer.blocks", branch=("attn_norm",)),
    ),
)
