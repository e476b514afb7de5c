# SPDX-License-Identifier: Apache-2.0
"""What `taps_oracle` and its settings give to forwards, those whose stream has lanes above all, and
the sizes and random weights of all that it runs."""

from __future__ import annotations

from typing import Any

import torch

TOKENS, WIDTH, LANES = 3, 8, 4


def weight(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) % 10_007)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2


def predict(h: torch.Tensor) -> torch.Tensor:
    """AltUp, without a router: each lane gets something of all."""
    return h + torch.einsum("ltw,lm->mtw", h, weight("predict")[:LANES, :LANES])


def correct(predictions: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
    innovation = activated - predictions[1]
    return predictions + innovation * weight("correct")[0, :LANES, None, None]


def reduced(lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hyper-connections' `pre`, without what its gates depend on: [tokens, lanes, width] in."""
    gates = weight("gates")[0, :LANES]
    return torch.einsum("tlw,l->tw", lanes, gates), 1 + gates, lanes


def scattered(out: torch.Tensor, lanes: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return lanes + gates[:, None] * out[:, None]


def written(out: torch.Tensor, lanes: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor) -> Any:
    """As `scattered`, of lanes that are mixed meanwhile by `comb`, [tokens, lanes, lanes]."""
    return scattered(out, torch.einsum("tlw,tlm->tmw", lanes, comb), gates)


def factored(lanes: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    mixed, gates = reduced(lanes)[:2]
    return gates, weight("comb")[:LANES, :LANES].expand(TOKENS, -1, -1), mixed


def deferred(lanes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts that `written` makes these lanes of."""
    gates, mix, _ = factored(lanes)
    out = torch.tanh(weight("branch")[:TOKENS])
    rest = torch.einsum("tlw,tlm->tmw", lanes - gates[:, None] * out[:, None], mix.inverse())
    return {"hidden_states": out, "residual": rest, "post": gates, "comb": mix}


def rewritten(*parts: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    """One kernel of both: the lanes as `written`, and what is `factored` of them."""
    lanes = written(*parts[:4])
    return lanes, *factored(lanes)


def _by_all(
    lanes: torch.Tensor, *sizes: float, norm_weight: torch.Tensor, norm_eps: float, **_: Any
) -> tuple[torch.Tensor, ...]:
    """As `factored`, of all that DeepSeek-V4's kernels are given: none may be another's."""
    gates, comb, mixed = factored(lanes)
    by = sum(n * size for n, size in enumerate(sizes, 1))
    return gates, comb, by * norm_weight * mixed + norm_eps


def _rewritten_by_all(*parts: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    lanes = written(*parts[:4])
    return lanes, *_by_all(lanes, *parts[4:], **options)


def _spread(rows: torch.Tensor, *sizes: float, **options: Any) -> tuple[torch.Tensor, ...]:
    """The kernel of a first block, here of lanes in one dimension: its input has two."""
    lanes = rows.unflatten(1, (LANES, WIDTH))
    return lanes, *_by_all(lanes, *sizes, **options)


KERNELS = {
    "mhc_pre_tilelang": _by_all,
    "mhc_pre_broadcast_tilelang": _spread,
    "mhc_post_tilelang": written,
    "mhc_fused_post_pre_tilelang": _rewritten_by_all,
}
"""Functions of modules, by name."""

GLM_5_NEXT: list[dict[str, Any]] = [
    {
        "mhc": True,
        "is_mtp_layer": False,
        "is_sequence_parallel": False,
        "layer_idx": 1,
        "num_hidden_layers": 3,
        "_mlp_is_moe": moe,
        "hc_pre": factored,
        "hc_post": written,
        "hc_fused_post_pre": rewritten,
        **{f"hc_{a}_{b}": None for a in ("attn", "ffn") for b in ("fn", "scale", "base")},
        "given": given,
        "whole": written,
    }
    for moe in (False, True)
    for given in (None, deferred)
]


_SIZES = [f"hc_{a}_{b}" for a in ("attn", "ffn") for b in ("fn", "scale", "base")]
_SIZES += ["rms_norm_eps", "hc_eps", "hc_post_alpha", "hc_sinkhorn_iters"]


def _v4_deferred(lanes: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("x", "residual", "post_mix", "res_mix")
    return dict(zip(names, deferred(lanes).values(), strict=True))


DEEPSEEK_V4: list[dict[str, Any]] = [
    {
        "use_sequence_parallel": False,
        "hc_attn_fn_broadcast": True,
        **{name: 0.1 + 0.01 * n * n for n, name in enumerate(_SIZES)},
        "given": given,
        "whole": written,
    }
    for given in (
        lambda lanes: {"x": lanes.flatten(1), "residual": None},
        lambda lanes: {"x": lanes, "residual": None},
        _v4_deferred,
    )
]


class Grouped:
    """Qwen4-Exp's hyper-connection: lanes in one dimension, [tokens, lanes * width]."""

    hc_count = LANES

    def combine(self, lanes: torch.Tensor, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return scattered(out, lanes.unflatten(1, (LANES, WIDTH)), gates).flatten(1)

    def mix(self, lanes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed, gates, _ = reduced(lanes.unflatten(1, (LANES, WIDTH)))
        return lanes, mixed, gates

    def combine_and_mix(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.mix(self.combine(*parts))


def grouped(lanes: torch.Tensor, deferred: bool) -> dict[str, torch.Tensor]:
    """What a block of Qwen4-Exp gets when these are the lanes."""
    given = {name: torch.ones(1) for name in ("input_ids", "query_start_loc", "ngram_context")}
    if not deferred:
        return given | {"hidden_states": lanes.flatten(1)}
    out, gates = torch.tanh(weight("branch")[:TOKENS]), reduced(lanes)[1]
    rest = (lanes - gates[:, None] * out[:, None]).flatten(1)
    return given | {"hidden_states": rest, "prev_block_output": out, "prev_injection": gates}


def sconv(delta: torch.Tensor) -> torch.Tensor:
    """Inkling's convolution of a branch's output, here without neighbours."""
    return 0.7 * delta
