# SPDX-License-Identifier: Apache-2.0
"""The decoder in plain PyTorch is transformers' where transformers has one like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.conformance import models
from tests.conformance.plain import PlainDecoder
from tests.conformance.runner import prompts, worst_row
from tests.conformance.tiny import NO_HEAD_DIM, TinyModel
from tests.conformance.zoo.latent import MLA, ROUTED
from tests.conformance.zoo.weights import experts_apart

pytestmark = pytest.mark.quick

LATENT_PLAIN: dict[str, Any] = {
    "latent": MLA["kv_lora_rank"],
    "query_latent": MLA["q_lora_rank"],
    "plain_width": MLA["qk_nope_head_dim"],
    "rotated_width": MLA["qk_rope_head_dim"],
    "value_width": MLA["v_head_dim"],
    "experts": ROUTED["n_routed_experts"],
    "shared_width": ROUTED["moe_intermediate_size"],
    "score": "sigmoid",
    "corrected": True,
    "groups": ROUTED["n_group"],
    "top_groups": ROUTED["topk_group"],
    "renormalized": True,
    "scale": ROUTED["routed_scaling_factor"],
}


def _beside(model: PreTrainedModel, plain: dict[str, Any]) -> PlainDecoder:
    config: Any = model.config
    fields: dict[str, Any] = {
        **NO_HEAD_DIM,
        "num_attention_heads": config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "plain": plain,
    }
    made = PlainDecoder(LlamaConfig(**fields))
    made.load_state_dict(experts_apart(model.state_dict()))
    return made


@pytest.mark.parametrize(
    ("row", "plain", "changed"),
    [
        (models.MODELS["internlm3"], {}, {"root_alibi": True}),
        (models.MODELS["deepseek_v3"], LATENT_PLAIN, {"scale": 1.0}),
        (models.MODELS["deepseek_v3"], LATENT_PLAIN, {"renormalized": False}),
        (models.MODELS["deepseek_v3"], LATENT_PLAIN, {"score": "softmax"}),
        (models.MODELS["deepseek_v3"], LATENT_PLAIN, {"groups": 1}),
    ],
    ids=("llama", "deepseek scale", "deepseek sum", "deepseek score", "deepseek groups"),
)
@torch.inference_mode()
def test_plain_is_transformers(
    row: TinyModel, plain: dict[str, Any], changed: dict[str, Any]
) -> None:
    """With the same weights; and not with a field changed."""
    model = models.build(row)
    tokens = torch.tensor([prompts()[0]])
    want = model(input_ids=tokens).logits[0].log_softmax(-1)

    def error(plain: dict[str, Any]) -> float:
        made = _beside(model, plain)
        return worst_row(made(tokens).logits[0].log_softmax(-1), want)

    assert error(plain) < 1e-5
    assert error(plain | changed) > 1e-2
