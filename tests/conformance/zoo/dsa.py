# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's sparse attention (DSA), whose code is upstream's for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from ..tiny import COMMON, HALF_STD, TinyModel, sizes
from .latent import MLA, MLA_ENGINE, ROUTED

_SIZES = sizes(head_dim=None, num_key_value_heads=COMMON["num_attention_heads"])
_JSON: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_INDEXER: dict[str, Any] = {
    "index_topk": 12,  # of prompts of 41 and 17 tokens
    "index_head_dim": 64,
    # As many that no two keys match none of them, which would be a tie.
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}


@contextmanager
def _in_torch() -> Iterator[None]:
    """Takes upstream's classes for CUDA, and torch for what only GPUs have."""
    import pytest

    import vllm.models.deepseek_v32 as models
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.models.deepseek_v32 import attention
    from vllm.models.deepseek_v32.nvidia import model
    from vllm.triton_utils import HAS_TRITON

    from .. import dsa

    with pytest.MonkeyPatch.context() as patch:
        for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
            patch.setattr(models, name, model.DeepseekV32ForCausalLM)
        patch.setattr(mla_attention, "get_attn_backend", lambda *_, **__: dsa.SparseBackend)
        patch.setattr(attention.DeepseekV32Indexer, "indexer_cache_cls", dsa.IndexerCache)
        patch.setattr(attention, "fused_norm_rope", dsa.normed_and_turned)
        patch.setattr(attention, "fused_q", dsa.turned_queries)
        patch.setattr(attention, "sparse_attn_indexer", dsa.choose)
        if not HAS_TRITON:
            patch.setattr(model, "fused_embed_norm", dsa.embedded)
        yield


_NOTE = (
    "upstream's classes for CUDA; the indexer, its choice and attention are kernels of GPUs alone: "
    "run with torch's, with a cache in float32 where upstream's indexer has FP8; 12 keys are "
    "chosen; V1 has no Triton: the embedding with the first norm in torch, too"
)

DSA = (
    TinyModel(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        lambda: transformers.DeepseekV32Config(**_SIZES, **MLA, **ROUTED, **_INDEXER),
        config_json=_JSON,
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        upstream=_in_torch,
        note=_NOTE,
    ),
    TinyModel(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        lambda: transformers.GlmMoeDsaConfig(
            **_SIZES,
            **MLA,
            **ROUTED | {"n_group": 1},
            **_INDEXER,
            indexer_types=["full", "full", "shared", "full"],
        ),
        config_json={
            **_JSON,
            "index_topk_pattern": "FFSF",
            "indexer_rope_interleave": True,
        },
        embedding_std=HALF_STD,
        engine=MLA_ENGINE,
        upstream=_in_torch,
        note=f"{_NOTE}; a layer takes what the one before it chose",
    ),
)
