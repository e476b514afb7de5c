# SPDX-License-Identifier: Apache-2.0
"""Bailing's hybrids: latent attention in some layers, a recurrence in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from ..bailing import Bailing25
from ..tiny import COMMON, HEADS, Tensors, TinyModel
from .latent import MLA, MLA_ENGINE, MLA_NOTE
from .weights import renamed

_NOTE = "transformers lacks it: the reference is plain PyTorch, conformance/bailing.py"
_EXPERTS = 8
_WIDTH = 64
"""Of an expert."""
_SHARED_WIDTH = 80
_STATE_WIDTH = 64
"""Of a head of linear attention: the least that upstream's kernel takes."""

_PLAIN: dict[str, Any] = {
    "latent": MLA["kv_lora_rank"],
    "query_latent": MLA["q_lora_rank"],
    "plain_width": MLA["qk_nope_head_dim"],
    "rotated_width": MLA["qk_rope_head_dim"],
    "value_width": MLA["v_head_dim"],
    "experts": _EXPERTS,
    "expert_width": _WIDTH,
    "shared_width": _SHARED_WIDTH,
    "score": "sigmoid",
    "corrected": True,
    "groups": 4,
    "top_groups": 2,
    "renormalized": True,
    "scale": 1.6,
}
_SIZES: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": HEADS,
    "head_dim": _STATE_WIDTH,
    "tie_word_embeddings": False,
    "layer_group_size": 2,
    "group_norm_size": 2,  # two heads each, or the norm would undo a factor of a head
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
# Upstream turns it off for MLA on a CPU, and trips over what it has set for it by then.
_ENGINE: dict[str, Any] = {**MLA_ENGINE, "enable_prefix_caching": False}
_CONFIG_JSON: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": _WIDTH,
    "moe_shared_expert_intermediate_size": _SHARED_WIDTH,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
    **MLA,
}


def _config() -> PretrainedConfig:
    return LlamaConfig(**{**_SIZES, "plain": _PLAIN})


def _names(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(tensors, (r"embed_tokens", "word_embeddings"))


@contextmanager
def _split_blocks() -> Iterator[None]:
    """Upstream gives latent caches beside states blocks of 128 tokens, which it splits for kernels
    that take fewer, but refuses for that of CPUs, which takes 16."""
    import pytest

    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    def takes(_size: int | None) -> bool:
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUMLABackend, "supports_block_size", takes)
        yield


BAILING = (
    TinyModel(
        "bailing_moe_v2_5",
        "BailingMoeV2_5ForCausalLM",
        _config,
        model=Bailing25,
        checkpoint=_names,
        config_json=_CONFIG_JSON,
        engine=_ENGINE,
        upstream=_split_blocks,
        note=f"{_NOTE}; by upstream's Triton kernels under Triton's interpreter; upstream refuses "
        f"blocks for states beside a latent cache on CPUs: let them be; {MLA_NOTE}",
    ),
)
