# SPDX-License-Identifier: Apache-2.0
"""As `tests/peers/calls.py`, of hotwire and interp-engine: requests in their own words, taken by
`--compat`."""

from __future__ import annotations

import json
from typing import Any

import torch

from tests.peers.call import (
    AFTER,
    LAYER,
    LAYERS,
    Call,
    Edit,
    U,
    V,
    W,
    add,
    along,
    at,
    norms,
    only,
    op,
    to,
    without_v,
)

CAR = "tesla_car"
MODULES: dict[str, Any] = {
    f"{CAR}.{LAYER}": at(LAYER),
    f"{CAR}.2": {"post_block": {2: W}},
    f"{CAR}.{LAYER}.decode": {"decode_vectors": at(LAYER)},
}
"""Vectors of hotwire's operator, as modules."""
_T = W / W.norm()
_HEADS = torch.cat([V, W])[:128]
"""As wide as the four heads of the tiny Llama are together."""


def _hotwire(*specs: dict[str, Any]) -> dict[str, Any]:
    """A request of hotwire's, in JSON text."""
    said = specs[0] if len(specs) == 1 else [*specs]
    return {"extra_args": {"hotwire": json.dumps(said)}}


def _car(layer: int, scale: float, **more: Any) -> dict[str, Any]:
    return {"id": CAR, "layer": layer, "scale": scale, **more}


def _sent(*ops: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A request as interp-engine's server gets it."""
    listed = [{**each, "vector": each["vector"].tolist()} for each in ops]
    return {"steering": [{"layers": {str(LAYER): listed}, **more}]}


def _given(*ops: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `asdict` makes of a `SteeringSpec`."""
    return {"steering": {"layers": {LAYER: {"operations": [*ops]}}, "stream": None, **more}}


def _both(edit: Edit, method: str, **keys: Any) -> list[Call]:
    """An operation of interp-engine's, in both forms."""
    one = {"vector": V, **keys}
    return [
        Call(_sent({"method": method, **one}), {LAYER: edit}),
        Call(_given(one, point="resid_post"), {LAYER: edit}),
    ]


def _scaled_by_norm(share: float) -> Edit:
    return lambda rows: rows + share * norms(rows) * U.double()


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    return rows + along(rows, U) * (_T - U).double()


def _kept(rows: torch.Tensor) -> torch.Tensor:
    return 0.25 * rows + 0.75 * without_v(rows)


_HOTWIRE: dict[str, list[Call]] = {
    '`{"id": "tesla_car", "layer": 20, "scale": 1.5}`': [
        Call(_hotwire(_car(LAYER, 1.5)), {LAYER: add(1.5)}),
        Call({"steering_modules": [[f"{CAR}.{LAYER}", 1.5]]}, {LAYER: add(1.5)}),
        Call({"extra_args": {"hotwire": _car(LAYER, -0.5)}}, {LAYER: add(-0.5)}),
    ],
    "a list of these": [
        Call(
            _hotwire(_car(LAYER, 1.5), _car(2, -0.7)),
            {LAYER: add(1.5), 2: lambda rows: rows - 0.7 * W.double()},
        )
    ],
    '`"decode_only": true`': [
        Call(
            _hotwire(_car(LAYER, 1.5, decode_only=True)),
            {LAYER: lambda rows: only(rows, AFTER, add(1.5))},
        )
    ],
}
_INTERP: dict[str, list[Call]] = {
    '`AddSpec`, `"additive"`: `vector`, `scale`, `normalize`': [
        Call({"steering": [op("add", vector=V, scale=0.7)]}, {LAYER: add(0.7)}),
        *_both(add(0.7), "additive", scale=0.7),
        *_both(add(9.0 / float(V.norm())), "additive", scale=9.0, normalize=True),
    ],
    '`AblateSpec`, `"ablate"`': _both(without_v, "ablate"),
    '`OrthogonalDecompSpec`, `"orthogonal"`: `coeff`': _both(_kept, "orthogonal", coeff=0.25),
    '`ProjectionCapSpec`, `"projection_cap"`: `min`, `max`': [
        *_both(to(lambda p: p.clamp(3.0, 9.0)), "projection_cap", min=3.0, max=9.0),
        *_both(to(lambda p: p.clamp(max=-5.0)), "projection_cap", min=None, max=-5.0),
    ],
    '`NormScaledAddSpec`, `"norm_scaled_add"`: `strength`, `max_fraction`, `normalize`': [
        *_both(_scaled_by_norm(0.02 * float(V.norm())), "norm_scaled_add", strength=0.02),
        *_both(_scaled_by_norm(-0.6), "norm_scaled_add", strength=-0.1, max_fraction=0.6),
        *_both(_scaled_by_norm(0.4), "norm_scaled_add", strength=0.4, normalize=True),
    ],
    '`SwapSpec`, `"swap"`: `target`': [
        *_both(_swapped, "swap", target=W.tolist()),
        Call(
            _given({"vector": V, "target": W}, {"vector": V, "scale": 0.7}),
            {LAYER: lambda rows: add(0.7)(_swapped(rows))},
        ),
    ],
    "`point`: `resid_pre`, `mlp_in`": [
        Call(
            _sent({"method": "ablate", "vector": V}, point="resid_pre"),
            inside={("pre_attn", LAYER): without_v},
        ),
        Call(
            _given({"vector": V, "target": W}, point="mlp_in"), inside={("mlp_in", LAYER): _swapped}
        ),
    ],
    "`point`: `attn_out_post`, `mlp_out_post`, `z`": [
        Call(
            _given({"vector": V, "scale": 1.0}, point="attn_out_post"),
            inside={("attn_out", LAYER): add(1.0)},
        ),
        Call(
            {
                "steering": [
                    *_sent({"method": "ablate", "vector": V})["steering"],
                    _given({"vector": V, "scale": 1.0}, point="mlp_out_post")["steering"],
                ]
            },
            {LAYER: without_v},
            inside={("mlp_out", LAYER): add(1.0)},
        ),
        Call(
            _given({"vector": _HEADS, "scale": 2.0}, point="z"),
            inside={("z", LAYER): lambda rows: rows + 2.0 * _HEADS.double()},
        ),
    ],
    "`resid_pre.N`, `resid_mid.N`, `resid_post.N`, `final_norm`": [
        *(
            Call(point=ours, hooks=[f"{theirs}.{n}" for n in range(LAYERS)])
            for theirs, ours in (
                ("resid_pre", "pre_attn"),
                ("resid_mid", "post_attn"),
                ("resid_post", "post_block"),
            )
        ),
        Call(point="final", hooks=["final_norm"]),
    ],
    "`attn_out_post.N`, `mlp_out_post.N`, `mlp_in.N`, `z.N`": [
        Call(point=ours, hooks=[f"{theirs}.{n}" for n in range(LAYERS)])
        for theirs, ours in (
            ("attn_out_post", "attn_out"),
            ("mlp_out_post", "mlp_out"),
            ("mlp_in", "mlp_in"),
            ("z", "z"),
        )
    ],
}
SPECS: dict[tuple[str, str], list[Call]] = {
    **{("hotwire", line): calls for line, calls in _HOTWIRE.items()},
    **{("interp-engine", line): calls for line, calls in _INTERP.items()},
}
"""(section, first cell of the line) -> calls of that kind."""
