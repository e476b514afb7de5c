# SPDX-License-Identifier: Apache-2.0
"""Bailing's hybrids: latent attention in some layers, a recurrence in the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig

from ..bailing import Bailing3, Bailing25
from ..tiny import COMMON, HEADS, Tensors, TinyModel
from .latent import MLA, MLA_ENGINE, MLA_NOTE
from .weights import renamed

_RUN = (
    "transformers lacks it: the reference is plain PyTorch, conformance/bailing.py; by upstream's "
    "Triton kernels under Triton's interpreter; upstream refuses blocks for states beside a latent "
    f"cache on CPUs: let them be; {MLA_NOTE}"
)
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
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_SIZES: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": HEADS,
    "head_dim": _STATE_WIDTH,
    "tie_word_embeddings": False,
    "layer_group_size": 2,
    "group_norm_size": 2,  # two heads each, or the norm would undo a factor of a head
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
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


_DELTA: dict[str, Any] = {"short_conv_kernel_size": 4, "kda_lower_bound": -3.0}


def _config(**more: Any) -> PretrainedConfig:
    return LlamaConfig(**{**_SIZES, "plain": _PLAIN, **more})


def _names(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(tensors, (r"embed_tokens", "word_embeddings"))


def _names_of_3(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    return renamed(_names(tensors, config), (r"e_score_correction_bias", "expert_bias"))


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


def _by_tokens(*, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda_fwd

    # A token's state goes where it says, and number 0 says nowhere.
    states = torch.cat([torch.zeros_like(initial_state[:1]), initial_state])
    own = torch.arange(1, len(states), dtype=torch.int32)[:, None]
    places = own.expand(-1, int(cu_seqlens.diff().max())).contiguous()
    out, states = fused_recurrent_kda_fwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g.contiguous(),
        beta.contiguous(),
        scale=q.shape[-1] ** -0.5,
        initial_state=states,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=places,
        use_qk_l2norm_in_kernel=True,
    )
    return out, states[1:]


@contextmanager
def _interpreted() -> Iterator[None]:
    """Upstream's kernels of the delta rule have Triton's functions by names of their own, where the
    interpreter does not replace them; and the kernel of whole prompts does what it cannot: prompts
    go token by token, by that of decoding."""
    import pytest
    import triton.language as tl

    from vllm.model_executor.models import bailing_moe_v3
    from vllm.third_party.flash_linear_attention.ops import kda, op

    ops = kda.__name__.rpartition(".")[0]
    with _split_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bailing_moe_v3, "chunk_kda", _by_tokens)
        for name in ("exp", "exp2", "log"):
            own = getattr(op, name)
            for module in [m for n, m in sys.modules.items() if n.startswith(ops)]:
                if vars(module).get(name) is own:
                    patch.setattr(module, name, partial(_call, tl, name))
        yield


def _call(functions: Any, name: str, x: Any) -> Any:
    return getattr(functions, name)(x)


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
        note=_RUN,
    ),
    TinyModel(
        "bailing_moe_v3",
        "BailingMoeV3ForCausalLM",
        lambda: _config(**_DELTA, rope_parameters=_ROPE),
        model=Bailing3,
        checkpoint=_names_of_3,
        config_json={
            **_CONFIG_JSON,
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
        },
        engine=_ENGINE,
        upstream=_interpreted,
        note=f"{_RUN}; prompts by the kernel of decoding",
    ),
)
