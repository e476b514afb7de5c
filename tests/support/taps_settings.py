# SPDX-License-Identifier: Apache-2.0
"""What the oracle of the taps (`taps_oracle.py`) sets on the stubs of each class: every value of
what its forward() tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from patches.taps.rows import Row
from tests.support import taps_lanes as lanes
from tests.support.taps_lanes import LANES, TOKENS, WIDTH, reduced, scattered, sconv, weight


def settings_of(row: Row) -> list[dict[str, Any]]:
    """The configurations to try for a class: every value of what its forward() tests."""
    return SETTINGS.get(row.key) or SETTINGS.get(row.cls, [{}])


_SCALE = torch.full((1, WIDTH), 0.3, dtype=torch.float64)
_LAYER_TYPES = [
    {
        "layer_type": kind,
        "layer_scale": scale,
        "attn_layer_scale": _SCALE,
        "ffn_layer_scale": _SCALE,
        "use_attn_reduce_scatter_for_moe": False,
        "layer_idx": 1,
        "num_blocks": 2,
    }
    for kind in ("linear_attention", "full_attention")
    for scale in (False, True)
]
_MULTIPLIER: dict[str, Any] = {"residual_multiplier": 0.4}
_HYBRID = [
    _MULTIPLIER,
    _MULTIPLIER | {"shared_mlp": None},
    _MULTIPLIER | {"block_sparse_moe": None},
]
_SKIPS = [{"apply_residual_connection_post_layernorm": value} for value in (False, True)]
_FALCON = [
    {
        "config.parallel_attn": parallel,
        "config.new_decoder_architecture": new,
        "config.num_ln_in_parallel_attn": norms,
        "reduce_row_parallel_results": not (new or parallel),
    }
    for parallel, new, norms in (
        (True, False, None),
        (True, True, 2),
        (True, True, 1),
        (False, False, None),
    )
]

# `later_only`: upstream's own forward() cannot be the first block. By class, or file and class.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Gemma3nDecoderLayer": [
        {
            "altup_active_idx": 1,
            "altup.predict": lanes.predict,
            "altup.correct": lanes.correct,
            "altup.scale_corrected_output": lambda x: 0.7 * x,
            "laurel": lambda x: torch.tanh(x @ weight("laurel")),
            "per_layer_input_gate": lambda x: x @ weight("gate"),
            "act_fn": torch.tanh,
            "per_layer_input": weight("per_layer_input")[:TOKENS],
            "per_layer_projection": lambda x: x @ weight("projection"),
        }
    ],
    "AXK1DecoderLayer": [
        {"use_mha": mha, "is_layer_sparse": sparse}
        for mha in (False, True)
        for sparse in (False, True)
    ],
    "BailingMoeV25DecoderLayer": [{"attention_type": 0}, {"attention_type": 1}],
    "BailingMoeV3DecoderLayer": [{"is_kda_layer": value} for value in (False, True)],
    "BloomBlock": _SKIPS,
    "CohereDecoderLayer": [{"tp_size": 1}, {"tp_size": 2}],
    "DeciLMDecoderLayer": [
        {"_is_no_op_attention": attention, "_is_no_op_ffn": ffn, "later_only": attention}
        for attention in (False, True)
        for ffn in (False, True)
    ],
    "DeepseekV2DecoderLayer": [
        {"use_mha": value, "use_sequence_parallel_moe": False} for value in (False, True)
    ],
    "DeepseekV4DecoderLayer": [
        {
            "hc_pre": lambda x, *_: (*reduced(x)[:2], weight("comb")[:LANES, :LANES]),
            "hc_post": lambda out, lanes, gates, comb: scattered(
                out, torch.einsum("tlw,lm->tmw", lanes, comb), gates
            ),
            **{f"hc_{a}_{b}": None for a in ("attn", "ffn") for b in ("fn", "scale", "base")},
        }
    ],
    "FalconDecoderLayer": _FALCON,
    "FalconH1ParallelHybrid": [
        {
            "attention_in_multiplier": 0.5,
            "ssm_in_multiplier": 0.6,
            "attn_out_multiplier": 0.7,
            "ssm_out_multiplier": 0.8,
        }
    ],
    "GLMBlock": _SKIPS,
    "Gemma4DecoderLayer": [
        {"layer_scalar": 0.5, "enable_moe_block": moe, "per_layer_input": extra}
        for moe in (False, True)
        for extra in (None, _SCALE)
    ],
    "Glm5NextDecoderLayer": lanes.GLM_5_NEXT,
    "vllm/models/deepseek_v4/nvidia/model.py:DeepseekV4DecoderLayer": lanes.DEEPSEEK_V4,
    "GraniteDecoderLayer": [_MULTIPLIER],
    "GraniteMoeDecoderLayer": [_MULTIPLIER],
    "GraniteMoeHybridAttentionDecoderLayer": _HYBRID,
    "GraniteMoeHybridMambaDecoderLayer": _HYBRID,
    "GraniteMoeSharedDecoderLayer": [_MULTIPLIER, _MULTIPLIER | {"shared_mlp": None}],
    "HYV4DecoderLayer": [
        {
            f"{half}.{name}": do
            for half in ("hc_attn_layer", "hc_mlp_layer")
            for name, do in (
                ("prepare_input", lambda x: x),
                ("pre", reduced),
                ("post", scattered),
            )
        }
    ],
    "HyperCLOVAXDecoderLayer": [_MULTIPLIER | {"use_post_norm": v} for v in (False, True)],
    "DeepseekV32DecoderLayer": [{"use_sequence_parallel": False}],
    "InklingDecoderLayer": [{"attn_sconv": sconv, "mlp_sconv": sconv}],
    "InternS2MobiusDecoderLayer": _LAYER_TYPES,
    "KimiDecoderLayer": [
        {"use_attn_residuals": False, "use_attn_res": False, "use_sequence_parallel": False}
    ],
    "MiniCPMDecoderLayer": [{"config.scale_depth": 1.4, "config.num_hidden_layers": 4}],
    "MiniMaxM3DecoderLayer": [
        {"fuse_input_allreduce": fuse, "ffn_all_reduce_deferred": True, "is_moe_layer": moe}
        for fuse in (False, True)
        for moe in (False, True)
    ],
    "MistralDecoderLayer": [
        {"ada_rms_norm_t_cond": None},
        {"ada_rms_norm_t_cond": lambda t: t, "t_cond": _SCALE},
    ],
    "OPTDecoderLayer": [{"do_layer_norm_before": value} for value in (False, True)],
    "OlmoHybridDecoderLayer": _LAYER_TYPES,
    "OpenPanguDecoderLayer": [
        {"sandwich_norm": value, "routed_scaling_factor": 2.5} for value in (False, True)
    ],
    "Qwen3NextDecoderLayer": _LAYER_TYPES,
    "Qwen4ExpDecoderLayer": [
        {
            "layer_type": kind,
            "use_hc_sequence_parallel": False,
            "use_sequence_parallel": False,
            "ple": None if ple is None else lambda lanes, *_: lanes + torch.tanh(lanes.flip(1)),
            "attn_hyper_connection": lanes.Grouped(),
            "mlp_hyper_connection": lanes.Grouped(),
            "given": partial(lanes.grouped, deferred=deferred),
            "whole": lambda *parts: lanes.Grouped().combine(*parts).unflatten(1, (LANES, WIDTH)),
        }
        for kind in ("linear_attention", "indexed_attention")
        for ple in (None, True)
        for deferred in (False, True)
    ],
    "Step3TextDecoderLayer": [{"use_moe": value} for value in (False, True)],
    "Step3p5DecoderLayer": [{"use_moe": value} for value in (False, True)],
    "Zamba2HybridLayer": [
        {
            "block_idx": 0,
            "shared_transformer": lambda x, **_: torch.tanh(x),
            "linear": lambda x: (x @ weight("linear"), None),
        }
    ],
}
