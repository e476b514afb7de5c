# SPDX-License-Identifier: Apache-2.0
"""Keys as attention layers of this worker see them, and where the pages of their KV cache have
them.

A backend, a cache or a kind of attention that is not listed here is refused by its name; what is
listed has to pass the start-up proof (check/attention.py).
"""

import math
from typing import Any, NamedTuple, cast

import torch

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.interventions.makings import AttentionRule

SPLIT_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""Backends whose pages are [blocks, heads, block, D + E], keys before values, as strided views."""

LATENT_BACKENDS = (
    "CPU_MLA",
    "CUTLASS_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "TRITON_MLA",
)
"""Backends of MLA with plain pages, [blocks, block, latent and rotated key], and with the matrices
that absorb queries."""

_CPU_ORDERS = ("vec", "vec16", "amx")
"""CPU_ATTN's orders in a block. The first two: keys [D, N], values [N, E]. AMX has tiles whose
last two numbers are of one key or of two tokens: keys [N / 16, D / 2, 16, 2], values
[E / 16, N / 2, 16, 2]."""


class Pages(NamedTuple):
    """The KV cache of a layer, views of it."""

    keys: torch.Tensor
    """[blocks, key heads, tokens of a block, D]; where a block has tiles, tokens are two dimensions
    and so is D."""
    values: torch.Tensor
    """[blocks, key heads, tokens of a block, E], likewise."""

    @property
    def tokens(self) -> int:
        """Number of tokens in a block."""
        return math.prod(self.keys.shape[2 : self.keys.dim() // 2 + 1])


class Sight(NamedTuple):
    """Rules by which a layer makes attention weights of a query's products with keys."""

    scale: float
    cap: float
    """The soft-cap of scaled products; 0 for none."""
    window: int
    """Number of keys that a query sees, its own the last; 0 for all."""
    chunk: int
    """A query sees keys of its own chunk of so many positions; 0 for all."""
    slopes: torch.Tensor | None
    """ALiBi, float32 [heads]."""
    sinks: torch.Tensor | None
    """Logits that join each head's denominator, [heads]: the layer's own, which may be loaded
    anew."""


def unreadable(module: Attention | MLAAttention) -> str:
    """Return why the attention weights of a layer cannot be read; "" if they can, as far as the
    layer's form tells."""
    if isinstance(module, MLAAttention):
        latent = module.attn_backend.get_name()
        quantised = is_quantized_kv_cache(module.kv_cache_dtype)
        cache = f"a latent cache (MLA) in {module.kv_cache_dtype} on backend {latent}"
        return "" if latent in LATENT_BACKENDS and not quantised else cache
    if type(module) not in (Attention, ChunkedLocalAttention):
        return type(module).__name__
    backend = module.backend.name
    if module.attn_type != AttentionType.DECODER:
        return f"attention of type {module.attn_type}"
    if is_quantized_kv_cache(module.kv_cache_dtype):
        return f"a KV cache in {module.kv_cache_dtype}"
    if module.use_mm_prefix:
        return "attention to later tokens of an image"
    if module.use_alibi_sqrt:
        return "ALiBi of square roots"
    impl: Any = module.impl  # what follows are attributes of the backend that was named
    if backend == "TRITON_ATTN" and impl.chunk_lookback > -1:
        return "local chunks that look back"
    if backend == "CPU_ATTN":
        # The builder of the layer's metadata sets it, before the first step.
        return "" if module.isa in _CPU_ORDERS else f"CPU_ATTN with pages in order {module.isa}"
    return "" if backend in SPLIT_BACKENDS else f"backend {backend}"


def sight_of(module: Attention | MLAAttention) -> Sight:
    """Sight of a layer that is not `unreadable`."""
    impl: Any = module.impl
    if isinstance(module, MLAAttention):
        return Sight(impl.scale, 0.0, module.sliding_window or 0, 0, None, None)
    chunk = module.attention_chunk_size if isinstance(module, ChunkedLocalAttention) else 0
    slopes, sinks = impl.alibi_slopes, impl.sinks if module.has_sink else None
    device = module.kv_cache.device
    return Sight(
        impl.scale,
        impl.logits_soft_cap or 0.0,
        module.sliding_window or 0,
        chunk,
        None if slopes is None else slopes.to(device, torch.float32),
        None if sinks is None else sinks.to(device),
    )


def rule_of(module: Attention, group: int) -> AttentionRule:
    """`sight_of` as it is reported, of this rank's heads."""
    said = sight_of(module)._asdict()
    made = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in said.items()}
    return cast(AttentionRule, {k: v for k, v in made.items() if v} | {"group": group})


def pages_of(module: Attention | MLAAttention) -> Pages:
    """The pages of a layer that is not `unreadable`, once it has a cache; a latent one is one key
    head, whose values are its keys but for the rotated part."""
    if isinstance(module, MLAAttention):
        latent = module.kv_cache.unsqueeze(1)
        return Pages(latent, latent[..., : module.kv_lora_rank])
    cache, width = module.kv_cache, module.head_size
    if module.backend.name != "CPU_ATTN":
        keys, values = cache.split([width, cache.shape[-1] - width], dim=-1)
        return Pages(keys, values)
    blocks, heads, tokens, _ = cache.shape
    both = cache.view(blocks, heads, 2 * tokens * width)
    keys, values = both.split(tokens * width, dim=-1)
    if module.isa == "amx":
        return Pages(
            keys.unflatten(-1, (tokens // 16, width // 2, 16, 2)).transpose(3, 4),
            values.unflatten(-1, (width // 16, tokens // 2, 16, 2)).permute(0, 1, 3, 5, 2, 4),
        )
    shape = (tokens, width)
    return Pages(keys.unflatten(-1, shape[::-1]).transpose(-1, -2), values.unflatten(-1, shape))
