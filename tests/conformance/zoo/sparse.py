# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4: hyper-connections, and attention to a window and to compressed tokens.

Upstream has CPU code of it, for CPUs with AMX and in bfloat16 alone, with a cache in FP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from ..reference import Adapter
from ..tiny import COMMON, LAYERS, NO_SPECIAL_TOKENS, Tensors, TinyModel

V4_LANES = 4
_EXPERTS, _CHOSEN = 64, 6
"""The least that upstream's kernels of routing know."""
RATES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_TYPES = [*RATES, "compressed_sparse_attention"]
_HASHED = 1
_WIDTH, _ROPE = 512, 64
"""Of a head, and of what is rotated of it: the only ones of upstream's kernels."""
_KEEP = (
    deepseek_v4.DeepseekV4Attention,
    deepseek_v4.DeepseekV4CSACompressor,
    deepseek_v4.DeepseekV4HCACompressor,
)


def without_amx() -> str:
    """Why upstream's code cannot run here; empty when it can."""
    return "" if torch.cpu._is_amx_tile_supported() else "upstream's CPU code needs AMX"


@contextmanager
def _mended() -> Iterator[None]:
    """With two keys that upstream's metadata for CPUs lacks: without them the first step ends in
    KeyError: 'c1a'.

    Raises:
        RuntimeError: the CPU has no AMX.
    """
    import pytest

    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder

    if why := without_amx():
        raise RuntimeError(why)
    lacking = Builder.build_tile_scheduler
    with pytest.MonkeyPatch.context() as patch:
        # Upstream turns it on for this model, in the environment: so for all later engines.
        patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
        patch.setattr(
            Builder,
            "build_tile_scheduler",
            lambda self, count: {"c1a": None, "c2a": None, **lacking(self, count)},
        )
        yield


def _cached(_norm: nn.Module, _args: Any, kept: torch.Tensor) -> torch.Tensor:
    """Keys, which are values, as upstream's cache has them: what is not rotated in FP8, 64 numbers
    to a scale, which is a power of two."""
    plain, rotated = kept.split([_WIDTH - _ROPE, _ROPE], dim=-1)
    blocks = plain.unflatten(-1, (-1, 64))
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = (blocks.abs().amax(-1, keepdim=True) / most).log2().ceil().exp2()
    held = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([held.flatten(-2), rotated], dim=-1)


@torch.no_grad()
def _as_upstream(model: nn.Module) -> None:
    """Weights that bfloat16 has, and a cache in FP8; and experts that no rounding chooses: in
    hashed layers by the token, in others by a correction far above the scores."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    for module in model.modules():
        if isinstance(module, _KEEP):
            module.kv_norm.register_forward_hook(_cached)
        elif isinstance(module, deepseek_v4.DeepseekV4HashRouter):
            rows = torch.rand(len(module.tid2eid), _EXPERTS, generator=generator)
            module.tid2eid.copy_(rows.argsort(1)[:, :_CHOSEN])
        elif isinstance(module, deepseek_v4.DeepseekV4TopKRouter):
            order = torch.randperm(_EXPERTS, generator=generator)
            module.e_score_correction_bias.copy_(10.0 * order)


def native(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """By the names of DeepSeek's checkpoints, of which transformers turns some back wrongly."""
    return {
        re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name.removeprefix("model."))
        .replace("hc_head.hc_", "hc_head_")
        .replace("embed_tokens", "embed"): tensor
        for name, tensor in tensors.items()
    }


def config(**changes: Any) -> PretrainedConfig:
    """Of a tiny model, with some fields changed."""
    sizes: dict[str, Any] = {
        "vocab_size": COMMON["vocab_size"],
        "hidden_size": COMMON["hidden_size"],
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": _WIDTH,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "layer_types": _TYPES,
        "sliding_window": 24,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 512,
        "mlp_layer_types": ["hash_moe"] * _HASHED + ["moe"] * (LAYERS - _HASHED),
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": _CHOSEN,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.6,
        "num_nextn_predict_layers": 0,
        "hc_mult": V4_LANES,
        "hc_eps": 0.01,
        "hc_sinkhorn_iters": 3,
    }
    return transformers.DeepseekV4Config(**{**NO_SPECIAL_TOKENS, **sizes, **changes})


V4_ADAPTER = Adapter("model.layers", (), second_norm="ffn_hc", lanes=V4_LANES, lanes_second=True)


def config_json(rates: Mapping[str, int] = RATES) -> dict[str, Any]:
    """What upstream reads, and transformers has not.

    Args:
        rates: how many tokens are compressed to one, by the kind of layer.
    """
    return {**_CONFIG_JSON, "compress_ratios": [rates[kind] for kind in _TYPES]}


_CONFIG_JSON: dict[str, Any] = {
    "mlp_layer_types": None,
    "num_hash_layers": _HASHED,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "qk_rope_head_dim": _ROPE,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

SPARSE = (
    TinyModel(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        config,
        V4_ADAPTER,
        embedding_std=6.0,  # the wider the stream, the less is what branches round off
        adjust=_as_upstream,
        checkpoint=native,
        config_json=config_json(),
        engine={"block_size": 256, "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20},
        upstream=_mended,
        note=f"a stream of {V4_LANES} lanes (hyper-connections); on CPUs with AMX, with two keys "
        "that upstream's metadata lacks; the reference has upstream's cache in FP8",
    ),
)
