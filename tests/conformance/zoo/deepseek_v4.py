# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 by upstream's classes for CUDA. Those for CPUs are in `sparse.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from ..tiny import TinyModel
from .sparse import RATES, V4_ADAPTER, V4_LANES, config, config_json, native

_EXPERTS, _CHOSEN = 8, 2
_RATES = {**RATES, "heavily_compressed_attention": 8}
"""Tokens that are compressed to one: of prompts of 41 and 17."""


@torch.no_grad()
def _routes(model: nn.Module) -> None:
    """Buffers that transformers leaves at zero: a table of tokens' experts, and corrections."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, deepseek_v4.DeepseekV4HashRouter):
            rows = torch.rand(len(module.tid2eid), _EXPERTS, generator=generator)
            module.tid2eid.copy_(rows.argsort(1)[:, :_CHOSEN])
        elif isinstance(module, deepseek_v4.DeepseekV4TopKRouter):
            module.e_score_correction_bias.copy_(torch.randn(_EXPERTS, generator=generator) / 3)


@contextmanager
def _in_torch() -> Iterator[None]:
    """Takes upstream's classes for CUDA, and torch for what only GPUs have."""
    import pytest

    import vllm.models.deepseek_v4 as models
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.models.deepseek_v4 import attention, compressor
    from vllm.models.deepseek_v4.nvidia import model

    from .. import deepseek_v4 as ours

    with pytest.MonkeyPatch.context() as patch:
        # Upstream turns it on for this model, in the environment: so for all later engines.
        patch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
        for name in ("Event", "Stream"):
            patch.setattr(torch.cuda, name, SimpleNamespace)
        patch.setattr(models, "DeepseekV4ForCausalLM", model.DeepseekV4ForCausalLM)
        patch.setattr(model, "_select_dsv4_attn_cls", lambda _: ours.Attention)
        for name, kernel in {
            "mhc_pre_tilelang": ours.mixed,
            "mhc_pre_broadcast_tilelang": ours.spread,
            "mhc_post_tilelang": ours.written,
            "mhc_fused_post_pre_tilelang": ours.written_and_mixed,
            "hc_head_fused_kernel_tilelang": ours.joined,
        }.items():
            patch.setattr(model, name, kernel)
        patch.setattr(compressor, "CompressorStateCache", ours.Without)
        for name in ("DeepseekV4SWACache", "DeepseekV4IndexerCache", "SparseAttnIndexer"):
            patch.setattr(attention, name, ours.Without)
        patch.setattr(cpu_router, "_sqrtsoftplus_bias_topk", ours.routed)
        patch.setattr(unquantized, "backend_to_kernel_cls", lambda _: [ours.Experts])
        yield


DEEPSEEK_V4 = (
    TinyModel(
        "deepseek_v4_cuda",
        "DeepseekV4ForCausalLM",
        lambda: config(
            sliding_window=12,
            compress_rates={kind: rate for kind, rate in _RATES.items() if rate},
            index_n_heads=16,  # as many that no two keys match none of them, which would be a tie
            index_topk=4,
            n_routed_experts=_EXPERTS,
            num_experts_per_tok=_CHOSEN,
            swiglu_limit=1.5,
        ),
        V4_ADAPTER,
        checkpoint=native,
        adjust=_routes,
        config_json=config_json(_RATES),
        engine={"block_size": 16, "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20},
        upstream=_in_torch,
        note=f"a stream of {V4_LANES} lanes (hyper-connections); upstream's classes for CUDA; the "
        "kernels of hyper-connections and attention with its indexer, compressors and cache in FP8 "
        "are for GPUs alone: run with torch's in float32, as are routing and experts; 8 tokens are "
        "compressed to one, where upstream has 128; 4 compressed tokens are chosen",
    ),
)
