# SPDX-License-Identifier: Apache-2.0
"""Attention modules of the layers of a loaded model, and the heads of each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup


class AttentionHeads(NamedTuple):
    """The attention of a decoder layer."""

    module: Attention | MLAAttention
    points: dict[str, tuple[int, int]]
    """Point -> (heads of all tensor-parallel ranks, width of one)."""
    replicas: int
    """Number of ranks in a row that have the same heads of keys and values."""


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


def reads_masked(model: nn.Module) -> bool:
    """Return True if some attention of a model may multiply values that it masks.

    TRITON_ATTN loads zeros in their place, and FlashAttention 2 and 3 put zeros there;
    `python -m tests.gpu.stale` shows it. Nothing is known of the others, and a CPU's multiplies.
    """
    layers = [m for m in model.modules() if isinstance(m, Attention | MLAAttention)]
    return any(
        layer.attn_backend.get_name() != "TRITON_ATTN"
        and not (
            isinstance(layer.impl, FlashAttentionImpl)
            and layer.impl.vllm_flash_attn_version in (2, 3)
        )
        for layer in layers
    )


class KeyTable(NamedTuple):
    """Table of the pages that have the keys of a layer."""

    pages: torch.Tensor
    """int32 [requests, pages] on the device, in batch order: what the layer's backend reads, a
    tensor that a runner keeps."""
    group: int
    """Index of the layer's KV group; all layers of a group have one table of blocks."""
    splits: "AttentionGroup | None" = None
    """Writes `pages` in each step, where a backend takes smaller ones than the group's blocks."""

    @property
    def pages_a_block(self) -> int:
        """Number of pages in a block."""
        offsets = None if self.splits is None else self.splits.kernel_block_offsets
        return 1 if offsets is None else len(offsets)

    @property
    def apart(self) -> int:
        """Number of page numbers that lie between the first of a block and of the next: more than
        it has where those of other layers are between."""
        return (self.splits and self.splits.kernel_block_stride) or self.pages_a_block

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of the pages of blocks: int32 [blocks] -> [pages]."""
        if self.splits is None:
            return blocks
        return self.splits.map_to_kernel_block_table(blocks[None])[0].clone()


def key_tables(runner: Any, modules: Mapping[int, Attention | MLAAttention]) -> dict[int, KeyTable]:
    """The table of each layer's keys."""
    if runner.vllm_config.use_v2_model_runner:
        tables = list(runner.block_tables.input_block_tables)
    else:
        tables = [table.block_table.gpu for table in runner.input_batch.block_table.block_tables]
    groups = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
    every = [attending for of_cache in runner.attn_groups for attending in of_cache]
    split = [attending for attending in every if attending.kernel_block_table is not None]
    found = {}
    for layer, module in modules.items():
        group, splits = group_of(module, groups) or 0, None
        pages = tables[group]
        own = group_of(module, [attending.layer_names for attending in split])
        if own is not None:
            splits = split[own]
            pages = splits.kernel_block_table[0]
        found[layer] = KeyTable(pages, group, splits)
    return found


def group_of(module: Attention | MLAAttention, groups: Sequence[Sequence[str]]) -> int | None:
    """Return the index of the group that has a layer's keys, None if none has; groups are given by
    the names of their layers."""
    # A layer that has the pages of another may be in no group.
    shared = module.kv_sharing_target_layer_name if isinstance(module, Attention) else None
    names = (module.layer_name, shared)
    return next((i for name in names for i, own in enumerate(groups) if name in own), None)
