# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3: sparse attention by blocks of keys, whose code is upstream's for GPUs."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ..tiny import COMMON, HEAD_DIM, KV_HEADS, LAYERS, Tensors, TinyModel
from .moe import one_group
from .weights import experts_apart, renamed

_SPARSE = [0] + [1] * (LAYERS - 1)
"""Layers with sparse attention and experts."""
_SHARED: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 64,
    "dense_intermediate_size": 160,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.6,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 1.5,
    "rotary_dim": HEAD_DIM // 2,
}
_BLOCK, _BLOCKS, _LOCAL = 4, 4, 2
"""Keys of a block, and blocks: taken in all, and of those the last; of prompts of 41 and 17."""


def _config() -> PretrainedConfig:
    return transformers.MiniMaxM3VLTextConfig(
        **_SHARED,
        shared_intermediate_size=_SHARED["intermediate_size"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        layer_types=[["full_attention", "minimax_m3_sparse"][sparse] for sparse in _SPARSE],
        mlp_layer_types=[["dense", "sparse"][sparse] for sparse in _SPARSE],
        index_n_heads=KV_HEADS,
        index_head_dim=HEAD_DIM,
        index_block_size=_BLOCK,
        index_topk_blocks=_BLOCKS,
        index_local_blocks=_LOCAL,
    )


_UPSTREAM: dict[str, Any] = {
    **_SHARED,
    "model_type": "minimax_m3_text",
    "rope_theta": 10000.0,
    "moe_layer_freq": _SPARSE,
    "sparse_attention_config": {
        "sparse_num_index_heads": KV_HEADS,
        "sparse_index_dim": HEAD_DIM,
        "sparse_block_size": _BLOCK,
        "sparse_topk_blocks": _BLOCKS,
        "sparse_local_block": _LOCAL,
        "sparse_attention_freq": _SPARSE,
    },
}


def _checkpoint(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """By the names of checkpoints."""
    apart: Tensors = {}
    for name, tensor in experts_apart(tensors).items():
        if ".gate_up_proj." in name:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                apart[name.replace("gate_up", part)] = half
        else:
            apart[name] = tensor
    sparse = "|".join(str(layer) for layer, found in enumerate(_SPARSE) if found)
    return renamed(
        apart,
        (rf"layers\.({sparse})\.mlp\.", r"layers.\1.block_sparse_moe."),
        (r"gate\.e_score", "e_score"),
        (r"(experts\.\d+)\.gate_proj", r"\1.w1"),
        (r"(experts\.\d+)\.down_proj", r"\1.w2"),
        (r"(experts\.\d+)\.up_proj", r"\1.w3"),
        (r"indexer\.([qk])_", r"index_\1_"),
    )


def _unseen(model: torch.nn.Module) -> None:
    """In sparse layers attention by torch's function, which shows no heads: nor does upstream's."""
    for name, module in model.named_modules():
        if re.search(r"\d+\.self_attn$", name) and module.indexer is not None:
            module.config = copy.deepcopy(module.config)
            module.config._attn_implementation = "sdpa"


@contextmanager
def _in_torch() -> Iterator[None]:
    """Takes torch for what only GPUs have."""
    import pytest

    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.models.minimax_m3.common import indexer
    from vllm.models.minimax_m3.nvidia import model

    from .. import minimax_m3

    norms = SimpleNamespace(
        gemma_rmsnorm=minimax_m3.normed, gemma_fused_add_rmsnorm=minimax_m3.added_and_normed
    )
    sparse = minimax_m3.SparseBackend, minimax_m3.Attention
    with one_group(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer.norm", norms)
        patch.setattr(model, "select_main_backend_and_impl_cls", lambda **_: sparse)
        patch.setattr(indexer, "select_indexer_impl_cls", lambda **_: minimax_m3.Indexer)
        patch.setattr(model.ops, "fused_minimax_m3_qknorm_rope_kv_insert", minimax_m3.prepared)
        patch.setattr(unquantized, "backend_to_kernel_cls", lambda _: [minimax_m3.Experts])
        yield


MINIMAX_M3 = (
    TinyModel(
        "minimax_m3",
        "MiniMaxM3SparseForCausalLM",
        _config,
        model="MiniMaxM3VLForCausalLM",
        checkpoint=_checkpoint,
        adjust=_unseen,
        config_json={"model_type": "minimax_m3_vl", "text_config": _UPSTREAM},
        upstream=_in_torch,
        note="norms, the indexer, its choice of blocks, sparse attention and experts are kernels "
        "of GPUs alone: run with torch's, with blocks of 4 keys, where upstream's have 128; no "
        "heads of sparse layers; upstream's router on CPUs knows sigmoids of experts in groups "
        "alone: run as one group",
    ),
)
