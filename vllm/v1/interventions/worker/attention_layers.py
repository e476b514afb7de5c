# SPDX-License-Identifier: Apache-2.0
"""Which modules of a loaded model are its layers' attention, and what heads they have."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear


class AttentionHeads(NamedTuple):
    """The attention of a decoder layer."""

    module: Attention | MLAAttention
    points: dict[str, tuple[int, int]]
    """Point -> (heads of all tensor-parallel ranks, width of one)."""
    replicas: int
    """How many ranks in a row have the same heads of keys and values."""


def attention_of(layers: Mapping[int, nn.Module]) -> dict[int, AttentionHeads]:
    """The attention of each decoder layer that has one, and not several.

    A subclass with a `forward` of its own does not call the taps, so its layer has no such points.
    """
    found = {}
    for index, layer in layers.items():
        inside = [m for m in layer.modules() if isinstance(m, Attention | MLAAttention)]
        if len(inside) != 1:
            continue
        [module] = inside
        if isinstance(module, Attention) and type(module).forward is Attention.forward:
            found[index] = _heads_of(module, layer)
        elif isinstance(module, MLAAttention) and type(module).forward is MLAAttention.forward:
            found[index] = _latent_heads_of(module)
    return found


def _heads_of(module: Attention, layer: nn.Module) -> AttentionHeads:
    ranks = get_tensor_model_parallel_world_size()
    made = [m.num_kv_head_replicas for m in layer.modules() if isinstance(m, QKVParallelLinear)]
    replicas = max(made, default=1)
    heads, keys = module.num_heads * ranks, module.num_kv_heads * ranks // replicas
    points = {"q": (heads, module.head_size)}
    # A layer that uses the keys of another is given none, or some that nothing reads.
    if module.kv_sharing_target_layer_name is None:
        points |= {"k": (keys, module.head_size), "v": (keys, module.head_size_v)}
    points["z"] = (heads, module.head_size_v)
    return AttentionHeads(module, points, replicas)


def _latent_heads_of(module: MLAAttention) -> AttentionHeads:
    # The cache holds one latent for all heads, which is neither their keys nor their values.
    heads = module.num_heads * get_tensor_model_parallel_world_size()
    query = module.qk_nope_head_dim + module.qk_rope_head_dim
    return AttentionHeads(module, {"q": (heads, query), "z": (heads, module.v_head_dim)}, 1)


def block_tables(runner: Any) -> list[torch.Tensor]:
    """Which blocks have the keys of each request of the batch, in batch order: int32 [requests,
    blocks] on the device of each KV group, tensors that a runner keeps."""
    if runner.vllm_config.use_v2_model_runner:
        return list(runner.block_tables.input_block_tables)
    return [table.block_table.gpu for table in runner.input_batch.block_table.block_tables]


def group_of(module: Attention | MLAAttention, groups: Sequence[Sequence[str]]) -> int:
    """In which of the KV groups, given by their layers' names, a layer's keys are."""
    # A layer that has the pages of another may be in no group.
    shared = module.kv_sharing_target_layer_name if isinstance(module, Attention) else None
    names = (module.layer_name, shared)
    return next((i for name in names for i, own in enumerate(groups) if name in own), 0)


def block_tables_of(
    runner: Any, modules: Mapping[int, Attention | MLAAttention]
) -> dict[int, torch.Tensor]:
    """The block table of each layer that has keys of heads."""
    tables = block_tables(runner)
    groups = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
    return {
        layer: tables[group_of(module, groups)]
        for layer, module in modules.items()
        if isinstance(module, Attention)
    }
