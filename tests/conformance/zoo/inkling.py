# SPDX-License-Identifier: Apache-2.0
"""Inkling: convolutions behind keys, values and both branches, whose code is for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ..reference import Adapter
from ..tiny import HEADS, KV_HEADS, LAYERS, WINDOW, Tensors, TinyModel, sizes
from .weights import renamed

_HEAD = 128
"""The width of a head that upstream's kernel takes."""
_LOCAL = (0, 2)
_DIVISOR = 2.0
"""Of logits."""


def _config() -> PretrainedConfig:
    return transformers.InklingTextConfig(
        **sizes(head_dim=_HEAD),
        mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
        moe_intermediate_size=64,
        swa_num_attention_heads=HEADS,
        swa_num_key_value_heads=KV_HEADS,
        swa_head_dim=_HEAD,
        sliding_window_size=WINDOW,
        d_rel=16,
        rel_extent=24,
        log_scaling_n_floor=8,
        log_scaling_alpha=0.4,
        local_layer_ids=list(_LOCAL),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        route_scale=1.6,
        logits_mup_width_multiplier=1.0,
    )


def _checkpoint(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """By the names of checkpoints, with gates and their values in turn."""
    made = dict(tensors)
    for name in tensors:
        if name.endswith(("mlp.gate_proj.weight", "shared_experts.gate_proj")):
            gate, up = made.pop(name), made.pop(name.replace("gate_proj", "up_proj"))
            made[name.replace("gate_proj", "w13")] = torch.stack([gate, up], -2).flatten(-3, -2)
        elif name.endswith("experts.gate_up_proj"):
            gate, up = made.pop(name).chunk(2, dim=1)
            made[name.replace("gate_up_proj", "w13")] = torch.stack([gate, up], 2).flatten(1, 2)
    return renamed(
        made,
        (r"^lm_head", "model.llm.unembed"),
        (r"^model\.embed_tokens\.embed_norm", "model.llm.embed_norm"),
        (r"^model\.embed_tokens", "model.llm.embed"),
        (r"^model\.(layers|norm)", r"model.llm.\1"),
        (r"\.conv1d\.", "."),
        (r"self_attn\.o_proj", "attn.wo_ud"),
        (r"self_attn\.([qr])_proj", r"attn.w\1_du"),
        (r"self_attn\.([kv])_proj", r"attn.w\1_dv"),
        (r"self_attn\.", "attn."),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "mlp_norm"),
        (r"gate\.e_score_correction_bias", "gate.bias"),
        (r"mlp\.w13\.", "mlp.w13_dn."),
        (r"mlp\.down_proj\.", "mlp.w2_md."),
        (r"shared_experts\.w13", "shared_experts.shared_w13_weight"),
        (r"shared_experts\.down_proj", "shared_experts.shared_w2_weight"),
        (r"experts\.w13$", "experts.w13_weight"),
        (r"experts\.down_proj", "experts.w2_weight"),
    )


@contextmanager
def _interpreted() -> Iterator[None]:
    """Takes torch for what is neither Triton nor for CPUs."""
    import pytest
    import triton.language as tl

    from vllm.models.inkling.nvidia import attention, model, moe

    from .. import inkling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_INKLING_FA4_REL_ATTENTION_KERNEL", inkling.Attention())
        patch.setattr(attention, "FlashAttentionBackend", inkling.Backend)
        patch.setattr(model, "InklingConvState", inkling.ConvState)
        patch.setattr(moe, "_linear_with_fp32_out", inkling.multiplied)
        patch.setattr(attention, "fused_qkvr_prep", inkling.prepared)
        # The interpreter has Triton's functions, not those of CUDA's library.
        functions = SimpleNamespace(exp=lambda x: tl.exp(x), log1p=lambda x: tl.log(1 + x))
        patch.setattr(moe, "tldevice", functions)
        patch.setattr(torch.cuda, "Event", SimpleNamespace)
        one = SimpleNamespace(multi_processor_count=1)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: one)
        yield


class _Divided(torch.nn.Linear):
    """A head that divides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return super().forward(x / _DIVISOR)


def _divides(model: torch.nn.Module) -> None:
    """In the head, as upstream does, where transformers does it before."""
    assert isinstance(model.lm_head, torch.nn.Linear)
    model.lm_head.__class__ = _Divided


_JSON: dict[str, Any] = {
    "logits_mup_width_multiplier": _DIVISOR,
    "model_type": "inkling_model",
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "dense_mlp_idx": 1,
}

INKLING = (
    TinyModel(
        "inkling",
        "InklingForCausalLM",
        _config,
        Adapter("model.layers", ("attn_sconv",), ends_later=True),
        checkpoint=_checkpoint,
        adjust=_divides,
        config_json=_JSON,
        # A page of attention must not be larger than one of convolutions.
        engine={"block_size": 8, "kv_cache_memory_bytes": 64 << 20, "tokenizer_mode": "hf"},
        upstream=_interpreted,
        note="by upstream's Triton kernels under Triton's interpreter; attention is a kernel of "
        "GPUs alone, and what prepares it is one that the interpreter cannot run: run with "
        "torch's; what convolutions keep is in float32, where upstream's is in bfloat16; upstream "
        "divides logits, where transformers divides what the head reads",
    ),
)
