# SPDX-License-Identifier: Apache-2.0
"""Which modules of a loaded model are its layers' attention, and what heads they have."""

from collections.abc import Mapping
from typing import NamedTuple

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
