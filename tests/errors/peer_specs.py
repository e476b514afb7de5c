# SPDX-License-Identifier: Apache-2.0
"""What is refused of requests of hotwire and interp-engine, with `--compat`."""

from __future__ import annotations

from typing import Any

from tests.errors.case import Case, path
from tests.support.plans import SHAPE, VECTOR, config_of
from vllm import SamplingParams
from vllm.v1.interventions.frontend.compat import addresses, doors, hotwire, interp_engine
from vllm.v1.interventions.frontend.request.budget import Work

MOST = 1 << 23
CAR = {"id": "car", "layer": 1, "scale": 1.5}
OP = {"method": "additive", "vector": VECTOR, "scale": 1.0}
SWAP = {"method": "swap", "vector": VECTOR, "target": VECTOR[::-1]}


def said(value: Any) -> Any:
    return lambda: hotwire.fields_of({"hotwire": value}, "x.", SHAPE, Work(MOST))


def specs(*given: Any) -> Any:
    return lambda: interp_engine.fields_of([*given], "s")


def at_layer(*ops: Any, **more: Any) -> Any:
    return specs({"layers": {"1": [*ops]}, **more})


def op(**more: Any) -> Any:
    """An operation that adds, but for `more`."""
    return at_layer({**OP, **more})


def hooks(*given: Any) -> Any:
    return lambda: addresses.capture_of({"inline": {"hooks": [*given]}}, "c", Work(MOST))


def both_keys() -> None:
    args = {"hotwire": CAR, "output_residual_stream": [0]}
    doors.read_args(SamplingParams(extra_args=args), config_of(compat=["lens", "hotwire"]))


def beside_ours() -> None:
    params = SamplingParams(extra_args={"hotwire": CAR}, steering=[])
    doors.read_args(params, config_of(compat=["hotwire"]))


AT, FIRST = "x.hotwire", "s[0].layers.1[0]"
HOTWIRE = [
    Case(path(AT), do=said("{")),
    Case(path(AT, "5", "64"), do=said(5)),
    Case(path(AT, "0", "64"), do=said("[]")),
    Case(path(AT, "65", "64"), do=said([CAR] * 65)),
    Case(path(f"{AT}.id", "3"), do=said({**CAR, "id": 3})),
    Case(path(f"{AT}.layer", "9"), do=said({**CAR, "layer": 9})),
    Case(path(f"{AT}.scale"), do=said({"id": "car", "layer": 1})),
    Case(path(AT, "['position']"), do=said({**CAR, "position": 1})),
    Case(path(f"{AT}.decode_only", "1"), do=said({**CAR, "decode_only": 1})),
    Case(path(f"{AT}[1]", layer="1"), do=said([CAR, {**CAR, "id": "cat"}])),
    Case(path("extra_args.hotwire", "extra_args.output_residual_stream"), do=both_keys),
    Case(path("steering", "extra_args.hotwire"), do=beside_ours),
]
INTERP = [
    Case(path("s", "33", "32"), do=specs(*[{"layers": {}}] * 33)),
    Case(path("s[0].point", "'attn_out'"), do=at_layer(OP, point="attn_out")),
    Case(path("s[0].point", "3"), do=at_layer(OP, point=3)),
    Case(path("s[0].stream"), do=at_layer(OP, stream=2)),
    Case(path("s[0]", "['op']"), do=specs({"op": "add"})),
    Case(path(FIRST, "swap", point="z"), do=at_layer(SWAP, point="z")),
    Case(path("s[0].layers.x", "'x'"), do=specs({"layers": {"x": [OP]}})),
    Case(path("s[0].layers.1", "3"), do=specs({"layers": {"1": 3}})),
    Case(path(f"{FIRST}.method", "'add'"), do=op(method="add")),
    Case(path(FIRST, "['coeff']"), do=op(coeff=1.0)),
    Case(path(f"{FIRST}.vector"), do=op(vector=[0.0] * len(VECTOR), normalize=True)),
    Case(path(FIRST), do=at_layer({"vector": VECTOR, "min": None, "max": None})),
    Case(
        path(f"{FIRST}.max_fraction", "-1.0"),
        do=at_layer({"vector": VECTOR, "strength": 1.0, "max_fraction": -1.0}),
    ),
    Case(path("s[0].layers.1[1]"), do=at_layer(SWAP, SWAP)),
    Case(path("c.inline.hooks", "0"), do=hooks()),
    Case(path("c.inline.hooks[0]", "'resid_post.1.stream-2'"), do=hooks("resid_post.1.stream-2")),
    Case(path("c.inline.hooks[1]", "resid_post.10"), do=hooks("final_norm", "resid_post")),
    Case(path("c.inline.hooks[0]", "'lm_head'"), do=hooks("lm_head")),
    Case(path("c.inline.hooks[0]", "'mlp_out.3'"), do=hooks("mlp_out.3")),
]
