# SPDX-License-Identifier: Apache-2.0
"""Architectures whose reference is a block in plain PyTorch, `conformance/plain.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig

from ..k2_horizon import K2Horizon
from ..plain import PlainDecoder
from ..reference import Adapter
from ..tiny import COMMON, HEAD_DIM, HEADS, MAX_LENGTH, NO_HEAD_DIM, Tensors, TinyModel
from .latent import MLA, MLA_ENGINE, MLA_NOTE
from .moe import one_group
from .weights import renamed, unchanged

_NOTE = "transformers lacks it: the reference is plain PyTorch, conformance/plain.py"
_EXPERTS = 4
_WIDTH = 64
"""Of an expert."""
_ROUTED: dict[str, Any] = {
    "experts": _EXPERTS,
    "expert_width": _WIDTH,
    "shared_width": _WIDTH,
    "score": "sigmoid",
    "corrected": True,
    "renormalized": True,
    "scale": 1.6,
}
_PANGU: dict[str, Any] = {
    "sandwich_norm": True,
    "router_enable_expert_bias": True,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": _WIDTH,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
}
"""`_ROUTED` by the names of their configs, and norms behind both branches."""


def _model(
    name: str,
    architecture: str,
    plain: Mapping[str, Any],
    sizes: Mapping[str, Any] = COMMON,
    **fields: Any,
) -> TinyModel:
    def config() -> PretrainedConfig:
        fields: dict[str, Any] = {**sizes, "tie_word_embeddings": False, "plain": dict(plain)}
        return LlamaConfig(**fields)

    fields = {"checkpoint": unchanged, "note": _NOTE, "model": PlainDecoder, **fields}
    return TinyModel(name, architecture, config, **fields)


def _step3(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    result: Tensors = {}
    for name, tensor in tensors.items():
        if found := re.match(r"(.*)\.mlp\.experts\.0\.(.*)", name):
            stem, kind = found.groups()
            each = [tensors[f"{stem}.mlp.experts.{i}.{kind}"] for i in range(_EXPERTS)]
            result[f"{stem}.moe.{kind}"] = torch.stack(each)
        elif ".mlp.experts." not in name:
            result[name] = tensor
    rules = (r"mlp\.shared_experts", "share_expert"), (r"mlp\.gate\.", "moe.gate.")
    return renamed(result, *rules)


def _pangu(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        tensors,
        (r"post_attention_layernorm", "pre_mlp_layernorm"),
        (r"attention_out_norm", "post_attention_layernorm"),
        (r"mlp_out_norm", "post_mlp_layernorm"),
        (r"gate\.e_score_correction_bias", "e_score_correction_bias"),
    )


def _k2_horizon(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(
        tensors,
        (r"self_attn\.v_proj\.experts", "self_attn.v_experts"),
        (r"self_attn\.v_proj\.router", "self_attn.v_router"),
        (r"e_score_correction_bias", "bias"),
    )


_TURNED = 8
"""Of the width of a K2 Horizon's head, what is rotated."""


def _turned_first(point: str, rows: torch.Tensor) -> torch.Tensor:
    """vLLM has what is rotated of queries and keys in front."""
    if point not in ("q", "k"):
        return rows
    pairs = (
        torch.arange(HEAD_DIM)
        .view(2, -1)
        .split([_TURNED // 2, HEAD_DIM // 2 - _TURNED // 2], dim=1)
    )
    return rows[..., torch.cat([part.flatten() for part in pairs])]


def _values_by_experts(attention: Any, x: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.models.k2_horizon import calc_router_weights

    weights, chosen = calc_router_weights(
        attention.v_router(x)[0],
        attention.v_router.bias,
        attention.router_score_func,
        attention.num_experts_per_tok,
        attention.router_scaling_factor,
    )
    every = x.new_zeros(len(x), attention.num_experts).scatter(1, chosen, weights)
    each = [torch.nn.functional.silu(expert(x)[0]) for expert in attention.v_experts]
    return (torch.stack(each, dim=2) * every[:, None]).sum(2)


@contextmanager
def _values_by_torch() -> Iterator[None]:
    """Upstream has kernels of GPUs alone for values by experts."""
    import pytest

    from vllm.model_executor.models.k2_horizon import K2HorizonMoVAAttention
    from vllm.platforms import current_platform

    with one_group(), pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            patch.setattr(K2HorizonMoVAAttention, "compute_mova_v_sparse", _values_by_experts)
        yield


_KV_HEADS = (2, 0, 1, 4)
_WIDTHS = (256, 256, 0, 512)


def _deci(config: PretrainedConfig) -> PretrainedConfig:
    """What the code of its checkpoints makes of the config."""
    config.__class__ = type("DeciConfig", (type(config),), {"model_type": "nemotron-nas"})
    config.block_configs = [
        SimpleNamespace(
            attention=SimpleNamespace(no_op=not kv, n_heads_in_group=HEADS // kv if kv else None),
            ffn=SimpleNamespace(no_op=not width, intermediate_size=width),
        )
        for kv, width in zip(_KV_HEADS, _WIDTHS, strict=True)
    ]
    return config


@contextmanager
def _triton_attention() -> Iterator[None]:
    """Upstream adds such a bias in its Triton kernel alone: on a CPU under the interpreter, which
    V2 has (`--runner v2`)."""
    import pytest

    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            path = AttentionBackendEnum.TRITON_ATTN.get_path()
            patch.setattr(type(current_platform), "get_attn_backend_cls", lambda *_, **__: path)
            # It asks which instructions it may take.
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        yield


PLAIN = (
    _model(
        "deepseek",
        "DeepseekForCausalLM",
        {"experts": _EXPERTS, "expert_width": _WIDTH, "shared_width": 2 * _WIDTH},
        sizes=NO_HEAD_DIM,
        config_json={
            "n_routed_experts": _EXPERTS,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": _WIDTH,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
        },
    ),
    _model(
        "deci_lm",
        "DeciLMForCausalLM",
        {"kv_heads": _KV_HEADS, "widths": _WIDTHS},
        engine={"hf_overrides": _deci},
        note=f"{_NOTE}; a layer without attention and one without an MLP",
    ),
    _model(
        "step1",
        "Step1ForCausalLM",
        {"root_alibi": True},
        sizes=NO_HEAD_DIM,
        upstream=_triton_attention,
        note=f"{_NOTE}; upstream's CPU attention lacks its bias: run with upstream's "
        "Triton kernel, under Triton's interpreter",
    ),
    _model(
        "step3_text",
        "Step3TextForCausalLM",
        {
            "query_latent": 64,
            "experts": _EXPERTS,
            "expert_width": _WIDTH,
            "shared_width": 80,
            "first_sparse": 2,
        },
        sizes=COMMON | {"num_key_value_heads": 1},
        checkpoint=_step3,
        config_json={
            "model_type": "step3_text",
            "num_attention_groups": 1,
            "max_position_embedding": MAX_LENGTH,
            "share_q_dim": 64,
            "moe_num_experts": _EXPERTS,
            "moe_top_k": 2,
            "moe_intermediate_size": _WIDTH,
            "share_expert_dim": 80,
            "moe_layers_enum": "2,3",
        },
    ),
    _model(
        "pangu_ultra_moe",
        "PanguUltraMoEForCausalLM",
        {
            "latent": MLA["kv_lora_rank"],
            "query_latent": MLA["q_lora_rank"],
            "plain_width": MLA["qk_nope_head_dim"],
            "rotated_width": MLA["qk_rope_head_dim"],
            "value_width": MLA["v_head_dim"],
            "out_norms": True,
            **_ROUTED,
        },
        adapter=Adapter("model.layers", ("attention_out_norm",)),
        checkpoint=_pangu,
        config_json={"model_type": "deepseek_v3", **_PANGU, **MLA},
        engine=MLA_ENGINE,
        note=f"{_NOTE}; {MLA_NOTE}",
    ),
    _model(
        "pangu_pro_moe_v2",
        "PanguProMoEV2ForCausalLM",
        {"out_norms": True, **_ROUTED},
        adapter=Adapter("model.layers", ("attention_out_norm",)),
        checkpoint=_pangu,
        config_json=_PANGU,
        note=f"{_NOTE}; without sinks, whose attention has kernels for GPUs alone",
    ),
    _model(
        "k2_horizon",
        "K2HorizonForCausalLM",
        _ROUTED,
        sizes={**COMMON, "rope_head_dim": _TURNED, "layernorm_num_groups": 3},
        model=K2Horizon,
        checkpoint=_k2_horizon,
        config_json={
            "query_key_norm": True,
            "attention_gate_func": "softplus",
            "num_experts": _EXPERTS,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": _WIDTH,
            "moe_gate_bias": True,
            "norm_topk_prob": True,
            "router_score_func": "sigmoid",
            "router_scaling_factor": 1.6,
            "mova_num_experts": _EXPERTS,
            "mova_num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        },
        heads=_turned_first,
        upstream=_values_by_torch,
        note="transformers lacks it: the reference is plain PyTorch, conformance/k2_horizon.py; "
        "upstream has values by experts on GPUs alone: run with torch's; its router on CPUs knows "
        "sigmoids of experts in groups alone: run as one group",
    ),
)
