# SPDX-License-Identifier: Apache-2.0
"""Architectures that vLLM runs through its Transformers backend: what a layer takes and returns."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..tiny import COMMON, LAYERS, NO_HEAD_DIM, PARALLEL, TIED_STD, WINDOW, TinyModel

_WINDOWED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}


def _not_compiled(model: nn.Module) -> None:
    """The backend decorates the class, which the reference shares, for torch.compile."""
    assert isinstance(model, PreTrainedModel)
    vars(model.base_model)["do_not_compile"] = True


def _row(name: str, architecture: str, config: PretrainedConfig) -> TinyModel:
    return TinyModel(
        name,
        architecture,
        lambda: config,
        PARALLEL,
        embedding_std=TIED_STD if config.tie_word_embeddings else 0.7,
        adjust=_not_compiled,
    )


BACKEND = (
    _row("arcee", "ArceeForCausalLM", transformers.ArceeConfig(**COMMON)),
    _row(
        "cwm",
        "CwmForCausalLM",
        transformers.CwmConfig(**{**COMMON, **_WINDOWED, "bos_token_id": 1, "eos_token_id": 2}),
    ),
    _row("glm", "GlmForCausalLM", transformers.GlmConfig(**COMMON)),
    _row("hunyuan_dense", "HunYuanDenseV1ForCausalLM", transformers.HunYuanDenseV1Config(**COMMON)),
    _row("jais2", "Jais2ForCausalLM", transformers.Jais2Config(**COMMON)),
    _row("olmo", "OlmoForCausalLM", transformers.OlmoConfig(**NO_HEAD_DIM)),
    _row("olmo2", "Olmo2ForCausalLM", transformers.Olmo2Config(**NO_HEAD_DIM)),
    _row("olmo3", "Olmo3ForCausalLM", transformers.Olmo3Config(**NO_HEAD_DIM, **_WINDOWED)),
    _row("phi", "PhiForCausalLM", transformers.PhiConfig(**NO_HEAD_DIM)),
    _row("seed_oss", "SeedOssForCausalLM", transformers.SeedOssConfig(**COMMON)),
    _row("smollm3", "SmolLM3ForCausalLM", transformers.SmolLM3Config(**NO_HEAD_DIM)),
    _row(
        "starcoder2",
        "Starcoder2ForCausalLM",
        transformers.Starcoder2Config(**NO_HEAD_DIM, sliding_window=WINDOW),
    ),
    _row(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        transformers.FlexOlmoConfig(**NO_HEAD_DIM, num_experts=4, num_experts_per_tok=2),
    ),
    _row(
        "vaultgemma", "VaultGemmaForCausalLM", transformers.VaultGemmaConfig(**COMMON, **_WINDOWED)
    ),
)
