# SPDX-License-Identifier: Apache-2.0
"""What is refused of operations, modules and positions of vectors in a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.errors.case import Case, path
from tests.support.plans import BF16, HEADS, HIDDEN, LANES, SHAPE, VECTOR, config_of
from vllm.config import VllmConfig
from vllm.config.points import STEERING_POINTS
from vllm.config.steering import FAMILIES
from vllm.v1.interventions.frontend.request.steering import MAX_MODULES
from vllm.v1.steering.modules import Module, parse_module

ALL_FAMILIES: dict[str, Any] = {"steering_families": list(FAMILIES)}
EVERYWHERE = {"pre_attn": {0: VECTOR}}
CONFIG = config_of(**ALL_FAMILIES)
AT_HEADS = config_of(HEADS, steering_points=list(STEERING_POINTS), **ALL_FAMILIES)
IN_LANES = config_of(LANES, **ALL_FAMILIES)
GATE = {"probe": VECTOR, "threshold": 0.0, "sharpness": 1.0}


def op(name: str = "ablate", config: VllmConfig = CONFIG, **fields: Any) -> dict[str, Any]:
    """A request for one operation; a field given as None is left out."""
    given = {"op": name, "point": "post_block", "layers": [1], "direction": VECTOR, **fields}
    entry = {key: value for key, value in given.items() if value is not None}
    return {"steering": [entry], "config": config}


def without_direction(name: str, config: VllmConfig = CONFIG, **fields: Any) -> dict[str, Any]:
    return op(name, config, direction=None, **fields)


def at_heads(name: str = "scale", **fields: Any) -> dict[str, Any]:
    """An operation at z, by default of head 2 in layer 1, where there are 4 of 3 numbers."""
    given = {"point": "z", "heads": {1: [2]}, "layers": None, **fields}
    return without_direction(name, AT_HEADS, **given)


def in_lanes(name: str = "add", **fields: Any) -> dict[str, Any]:
    """An operation in a stream of three lanes, by default the addition of a vector."""
    given = {"point": "pre_attn", "vector": VECTOR, **fields}
    return without_direction(name, IN_LANES, **given)


def lane_vector(vector: Any = VECTOR, **fields: Any) -> dict[str, Any]:
    entry = {"vector": vector, **fields}
    return {"steering_vectors": {"pre_attn": {0: entry}}, "config": config_of(LANES)}


def lane_capture(**fields: Any) -> dict[str, Any]:
    given = {"hooks": {"pre_attn": [0]}, **fields}
    return {"capture": {"inline": given}, "config": config_of(LANES)}


def replace(**fields: Any) -> dict[str, Any]:
    return without_direction("replace", **{"positions": [1], "values": [VECTOR], **fields})


def low_rank(**fields: Any) -> dict[str, Any]:
    """One of rank 1."""
    return without_direction("low_rank", **{"A": [VECTOR], "B": [[1.0]] * HIDDEN, **fields})


def gated(**fields: Any) -> dict[str, Any]:
    return op(gate={**GATE, **fields})


def limited(positions: Any, field: str = "steering_vectors", **more: Any) -> dict[str, Any]:
    return {field: {"pre_attn": {0: {"vector": VECTOR, "positions": positions}}}, **more}


def module(value: Any = None, config: VllmConfig = CONFIG) -> Module:
    return parse_module(value or EVERYWHERE, "source", SHAPE, config.steering_config)


def named(names: Any, **modules: Module) -> dict[str, Any]:
    return {"steering_modules": names, "modules": modules, "config": CONFIG}


PIN = {"op": "pin", "point": "pre_attn", "layers": [0], "direction": VECTOR, "value": 1.0}
OP = "steering[0]"
AT = "steering_vectors.pre_attn.0.positions"

STEERING = [
    # Operations.
    Case(path("steering", "dict"), {"steering": PIN, "config": CONFIG}),
    Case(path(OP, "'add'"), {"steering": ["add"], "config": CONFIG}),
    Case(path(f"{OP}.op", "'twist'", ", ".join(FAMILIES[:-1])), op("twist")),
    Case(path(f"{OP}.point"), op(point=["pre_attn", "pre_attn"])),
    Case(path(f"{OP}.point"), op(point=[])),
    Case(path(f"{OP}.op", "list"), op(["add"])),  # type: ignore[arg-type]
    Case(path(f"{OP}.op", allowed="add"), op(config=config_of())),
    Case(
        path(f"{OP}.gate", allowed="ablate, add"),
        op(gate=GATE, config=config_of(steering_families=["add", "ablate"])),
    ),
    Case(
        path(OP, "['depth']", "op, point, layers, direction, strength, positions, gate"),
        op(depth=1),
    ),
    Case(path(OP, allowed="direction", op="ablate"), without_direction("ablate")),
    Case(path(OP, allowed="layers", op="ablate"), op(layers=None)),
    Case(
        path(f"{OP}.gate", "['when_ever']", "probe, threshold, sharpness, when, cosine, latch"),
        gated(when_ever=1),
    ),
    Case(
        path(f"{OP}.gate", allowed="probe", op="a gate"), op(gate={"threshold": 0, "sharpness": 1})
    ),
    Case(path(f"{OP}.A", "5", "1-4"), low_rank(A=[VECTOR] * 5)),
    Case(path(f"{OP}.A", "0", "1-4"), low_rank(A=[])),
    Case(path(f"{OP}.B", "[1, 4] (transpose it)", "[4, 1]"), low_rank(B=np.ones((1, HIDDEN)))),
    Case(path(f"{OP}.B", "[3, ...]", "[4, 1]"), low_rank(B=[[1.0]] * 3)),
    Case(path(f"{OP}.c", "2", "1"), low_rank(c=[1.0, 2.0])),
    Case(path(OP, allowed="B", op="low_rank"), low_rank(B=None)),
    Case(path(OP, allowed="lo' or 'hi", op="clamp"), op("clamp")),
    Case(path(f"{OP}.lo", "2", "1"), op("clamp", lo=2.0, hi=1.0)),
    Case(path(f"{OP}.direction"), op(direction=[0.0] * HIDDEN)),
    Case(path(f"{OP}.direction", "3", "4"), op(direction=VECTOR[:3])),
    Case(path(f"{OP}.strength", "'1'"), op(strength="1")),
    Case(path(f"{OP}.value", "nan", "1e+30"), op("pin", value=float("nan"))),
    Case(path(f"{OP}.gate.when", "'now'"), gated(when="now")),
    Case(path(f"{OP}.gate.cosine", "1"), gated(cosine=1)),
    Case(path(f"{OP}.gate.probe"), gated(cosine=True, probe=[0.0] * HIDDEN)),
    Case(path(f"{OP}.gate.latch", "1"), gated(latch=1)),
    Case(path(f"{OP}.gate.latch"), gated(latch=True, when="last_prompt")),
    Case(path(f"{OP}.positions"), op(gate={**GATE, "latch": True}, positions=[1, 2, 4])),
    Case(
        path(f"{OP}.positions", "1"),
        op(gate={**GATE, "when": "last_prompt"}, positions=[1, 6]),
    ),
    Case(path(f"{OP}.positions"), op(positions="last_generated")),
    Case(
        path(f"{OP}.positions", "1", "0", prompt="5"),
        op(positions="all_generated") | {"max_tokens": 1},
    ),
    Case(path(f"{OP}.alpha", "1.5"), replace(alpha=1.5)),
    Case(
        path(f"{OP}.positions", "position 1"), replace(positions=[1, -4], values=[VECTOR, VECTOR])
    ),
    Case(path(f"{OP}.values", "1", "2"), replace(positions=[1, 2])),
    Case(path(f"{OP}.values", "[1, 3]", "[n, 4]"), replace(values=np.ones((1, 3)))),
    Case(path(f"{OP}.values", "'abc'"), replace(values="abc")),
    Case(
        path("max_tokens", "steering_vectors", "2147483648"),
        {"steering_vectors": EVERYWHERE, "max_tokens": 1 << 64},
    ),
    Case(path(f"{OP}.values", "matrix"), replace(values=np.matrix([VECTOR]))),
    Case(path(f"{OP}.direction", "MaskedArray"), op(direction=np.ma.array(VECTOR))),
    Case(
        path(f"{OP}.values", "torch.sparse_coo on cpu"),
        replace(values=torch.ones(1, HIDDEN).to_sparse()),
    ),
    Case(path(f"{OP}.values[0]", "3", "4"), replace(values=[VECTOR[:3]])),
    Case(
        path(f"{OP}.values[0]", allowed="bfloat16"),
        replace(values=[[3.4e38] * HIDDEN], config=config_of(BF16, **ALL_FAMILIES)),
    ),
    Case(
        path(f"{OP}.vector", allowed="float32"),
        without_direction("add", vector=[1e39] * HIDDEN),
    ),
    Case(
        path(f"{OP}", allowed="bfloat16"),
        without_direction(
            "add", vector=[1e30] * HIDDEN, scale=1e9, config=config_of(BF16, **ALL_FAMILIES)
        ),
    ),
    Case(
        path("steering[1]", "2", "1", place="post_block 1"),
        {
            "steering": op()["steering"] * 2,
            "config": config_of(max_steering_ops=1, **ALL_FAMILIES),
        },
    ),
    Case(
        path("steering_modules + steering", "2", "1"),
        {
            **named(["m"], m=module({"ops": [PIN]})),
            "steering": [PIN],
            "config": config_of(max_steering_ops=1, **ALL_FAMILIES),
        },
    ),
    Case(
        path("default_steering_modules", "2", "1"),
        {
            "modules": {"m": module({"ops": [PIN]}), "n": module({"ops": [PIN]})},
            "config": config_of(
                max_steering_ops=1, default_steering_modules=["m", "n"], **ALL_FAMILIES
            ),
        },
    ),
    Case(
        path("steering", "4", "3"),
        {
            "steering": [PIN | {"gate": GATE}, PIN | {"gate": GATE, "value": 2.0}],
            "config": config_of(max_steering_rows=3, **ALL_FAMILIES),
        },
    ),
    Case(
        path(f"{OP}.post_block", allowed="['pre_attn']"),
        op(config=config_of(steering_points=["pre_attn"], **ALL_FAMILIES)),
    ),
    # Heads.
    Case(
        path("steering_vectors.z.all", "z", "[12, 16]"),
        {"steering_vectors": {"z": {"all": [1.0] * 12}}, "config": AT_HEADS},
    ),
    Case(
        path("steering_vectors.z.1", "4", "12"),
        {"steering_vectors": {"z": {1: VECTOR}}, "config": AT_HEADS},
    ),
    Case(
        path("steering_vectors.z.2", "'z'", layer="2"),
        {"steering_vectors": {"z": {2: VECTOR}}, "config": AT_HEADS},
    ),
    Case(
        path("steering_vectors.z", allowed="['pre_attn', 'post_attn', 'post_block']"),
        {"steering_vectors": {"z": {1: [1.0] * 12}}, "config": config_of(HEADS)},
    ),
    Case(path(f"{OP}.lane", "3", "0-2"), in_lanes(lane=3)),
    Case(path(f"{OP}.vector", "2", "3"), in_lanes(vector=[VECTOR] * 2)),
    Case(path(f"{OP}.vector", "[3, 4]", "[4]"), in_lanes(vector=np.ones((3, 4)), lane=1)),
    Case(path(f"{OP}.vector[1]", "3", "4"), in_lanes(vector=[VECTOR, VECTOR[:3], VECTOR])),
    Case(
        path(f"{OP}.direction[1]"),
        op("ablate", IN_LANES, point="pre_attn", direction=[VECTOR, [0.0] * 4, VECTOR]),
    ),
    Case(
        path(f"{OP}.values", "[3, 2, 4]", "[n, 4]"),
        in_lanes("replace", vector=None, values=np.ones((3, 2, 4)), positions=[0, 1, 2]),
    ),
    Case(
        path(OP),
        in_lanes("replace", vector=None, values=np.ones((3, 4)), lane=1),
    ),
    Case(path(f"{OP}.gate.probe", "2", "3"), in_lanes(gate={**GATE, "probe": [VECTOR] * 2})),
    Case(
        path(OP, "['lane']", "op, point, layers, vector, scale, positions, gate"),
        op("add", direction=None, vector=VECTOR, lane=0),
    ),
    Case(path("steering_vectors.pre_attn.0.lane", "True", "0-2"), lane_vector(lane=True)),
    Case(path("steering_vectors.pre_attn.0.vector", "3", "4"), lane_vector(VECTOR[:3], lane=0)),
    Case(path("steering_vectors.pre_attn.0.vector", "4", "3"), lane_vector(np.ones((4, 4)))),
    Case(
        path("steering_vectors.post_attn", "'post_attn'", "pre_attn, post_block"),
        {"steering_vectors": {"post_attn": {0: VECTOR}}, "config": config_of(LANES)},
    ),
    Case(path("capture.inline.lane", "-1", "0-2"), lane_capture(lane=-1)),
    Case(path("capture.inline.lane"), lane_capture(lane=0) | {"config": CONFIG}),
    Case(path("capture.inline.lane"), lane_capture(lane=0, hooks={"final": "all"})),
    Case(
        path("capture.inline.project.modules", allowed="3"),
        lane_capture(project={"modules": ["calm"]}),
    ),
    Case(path("capture.inline.project[0]", "3", "4"), lane_capture(project=[[VECTOR] * 3])),
    Case(
        path("capture.inline.reduce"),
        lane_capture(reduce="mean", positions=[0], hooks={"pre_attn": [0], "final": "all"}),
    ),
    Case(path("capture.inline.lens", allowed="3"), lane_capture(lens={"name": "logit"})),
    Case(
        path("rules[0]", allowed="3"),
        {
            "rules": [
                {"name": "r", "point": "pre_attn", "layer": 0, "threshold": 0, "probe": VECTOR}
            ],
            "config": config_of(LANES),
        },
    ),
    Case(path(f"{OP}.heads", "z", "[3, 4]"), at_heads("add", heads="all", vector=VECTOR[:3])),
    Case(
        path(f"{OP}.layers", "z", "[12, 16]"), at_heads("add", heads=None, layers="all", vector=[])
    ),
    Case(path(f"{OP}.vector", "4", "3"), at_heads("add", vector=VECTOR)),
    Case(path(f"{OP}.heads.1", "4", "0-3", layer="1"), at_heads(heads={1: [4]}, factor=0)),
    Case(path(f"{OP}.heads.2", "'z'", layer="2"), at_heads(heads={2: [0]}, factor=0)),
    Case(path(OP, allowed="factor", op="scale"), at_heads()),
    Case(path(OP, allowed="layers", op="scale"), at_heads(heads=None, factor=0)),
    Case(
        path(OP, "['gate']", "op, point, heads, factor, positions"), at_heads(factor=0, gate=GATE)
    ),
    Case(
        path(OP, "['layers']", "op, point, heads, factor, positions"), at_heads(factor=0, layers=1)
    ),
    Case(path(f"{OP}.factor", "nan", "1e+30"), at_heads(factor=float("nan"))),
    Case(path(f"{OP}.op", op="ablate"), at_heads("ablate")),
    Case(
        path(f"{OP}.point"),
        at_heads("add", heads=None, point=["z", "pre_attn"], layers=1, vector=VECTOR),
    ),
    Case(path(f"{OP}.point"), at_heads(heads=None, point="pre_attn", layers=1, factor=0)),
    Case(
        path("steering", "z layer 1"),
        {"steering": at_heads(factor=1e30)["steering"] * 2, "config": AT_HEADS},
    ),
    Case(
        path(f"{OP}.op", allowed="add"),
        {**at_heads(factor=0), "config": config_of(HEADS, steering_points=["z"])},
    ),
    # Positions of vectors.
    Case(path(AT), limited("last_generated")),
    Case(path(AT, "1", "0", prompt="5"), limited("all_generated", max_tokens=1)),
    Case(
        path("prefill_steering_vectors.pre_attn.0.positions", "5", tier="prefill"),
        limited([1, 5], "prefill_steering_vectors"),
    ),
    Case(
        path("decode_steering_vectors.pre_attn.0.positions", "4", tier="decode"),
        limited([4, 5], "decode_steering_vectors"),
    ),
    Case(
        path("steering_vectors", allowed="1000000"),
        limited({"step": 2}, prompt=6000, config=config_of(max_request_work=1_000_000)),
    ),
    # Modules, and whether global tiers are added.
    Case(path("steering_modules", "'calm'"), named("calm")),
    Case(path("steering_modules", "65", str(MAX_MODULES)), named(["m"] * 65, m=module())),
    Case(path("steering_modules[0]", "3"), named([("calm", 1.0, 2.0)])),
    Case(path("steering_modules[1]", "7"), named(["m", 7], m=module())),
    Case(path("steering_modules[0][1]", "'2'"), named([("m", "2")], m=module())),
    Case(
        path("steering_modules[1]", "'calm'", "m, n"), named(["m", "calm"], m=module(), n=module())
    ),
    Case(path("steering_modules[0]", "'calm'", "none"), named(["calm"])),
    Case(
        path("steering_modules[0]", "2", "add, norm_match, ablate, low_rank", op="pin"),
        named([("m", 2)], m=module({"ops": [PIN]})),
    ),
    Case(path("steering_inherit_global", "1"), {"steering_inherit_global": 1}),
]
