# SPDX-License-Identifier: Apache-2.0
"""What is refused of vectors and captures that a request brings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.errors.case import Case, path
from tests.support.plans import (
    GAPS,
    HEADS,
    HIDDEN,
    PARALLEL_ONLY,
    SHAPE,
    VECTOR,
    config_of,
    with_layers,
)
from vllm.config.points import CAPTURE_POINTS


def steer(value: Any, **more: Any) -> dict[str, Any]:
    return {"steering_vectors": value, **more}


def at(layers: Any, entry: Any = VECTOR, point: str = "post_block", **more: Any) -> dict[str, Any]:
    return steer({point: {layers: entry}}, **more)


def capture(positions: Any, hooks: Any = None, **more: Any) -> dict[str, Any]:
    hooks = {"post_block": [1]} if hooks is None else hooks
    return {"capture": {"inline": {"hooks": hooks, "positions": positions}}, **more}


def hooks(value: Any) -> dict[str, Any]:
    return capture("last_prompt", value)


STEERED = "pre_attn, z, post_attn, mlp_in, post_block"
ALL = (
    "embed, pre_attn, q, k, v, z, attn_out, post_attn, mlp_in, router_logits, mlp_act, mlp_out, "
    "post_block, final"
)
HEADED = config_of(
    HEADS, capture_consumers=["inline", "logging"], capture_points=list(CAPTURE_POINTS)
)
HEADED_CONFIG = {"config": HEADED}
BRANCHES = ("attn_out", "mlp_out")
BRANCHED_CONFIG = {
    "config": config_of(
        with_layers(SHAPE, [1], branches=BRANCHES),
        capture_consumers=["inline", "logging"],
    )
}
V1 = "steering_vectors.post_block.1"
SELECTORS = (
    "last_prompt, all_prompt, all_generated, last_generated, predicting, all, "
    "a list of positions, {'start', 'stop', 'step', 'of'}, {'at', 'of'}, {'text', 'which'}, "
    "{'token_ids', 'which'}, {'role', 'turn'}, {'images'}, {'modality'} or a list of these, "
    "with {'except'}"
)
POSITIONS = "capture.inline.positions"
HOOKS = "capture.inline.hooks"
ABC = SimpleNamespace(
    all_special_ids=[],
    decode=lambda ids, skip_special_tokens: "".join("abcde"[i - 100] for i in ids),
)
"""A tokenizer for the prompt of `plan_of`: "abcde"."""
MOST = str(1 << 23)
"""The default of max_request_work."""
HUGE_INT = 10**5000

REQUESTS = [
    # Points and layers.
    Case(path("steering_vectors", "list"), steer([VECTOR])),
    Case(path("steering_vectors.post_block", "list"), steer({"post_block": [VECTOR]})),
    Case(path("capture", "'inline'"), {"capture": "inline"}),
    Case(path("capture.inline", "None"), {"capture": {"inline": None}}),
    Case(path(HOOKS, "'post_block'"), hooks("post_block")),
    Case(path("steering_vectors.mlp", "'mlp'", STEERED), at(1, point="mlp")),
    Case(path("steering_vectors.7", "7", STEERED), steer({7: {1: VECTOR}})),
    Case(path("decode_steering_vectors.x", "'x'", STEERED), {"decode_steering_vectors": {"x": {}}}),
    Case(path(f"{HOOKS}.resid", "'resid'", ALL), hooks({"resid": [1]})),
    Case(path("steering_vectors.q", "'q'", STEERED), at(1, point="q", config=HEADED)),
    Case(path(f"{HOOKS}.q", "'q'", "embed, pre_attn, post_attn, post_block"), hooks({"q": [1]})),
    Case(path("steering_vectors.embed", "'embed'", "pre_attn of layer 0"), at(0, point="embed")),
    Case(
        path("steering_vectors.final", "'final'", "post_block of the last layer"),
        at(3, point="final"),
    ),
    Case(
        path("steering_vectors.router_logits", "'router_logits'", "post_attn"),
        at(1, point="router_logits"),
    ),
    Case(path("steering_vectors.mlp_act", "'mlp_act'", "post_block"), at(1, point="mlp_act")),
    Case(
        path(f"{HOOKS}.mlp_act", "'mlp_act'", "embed, pre_attn, post_attn, post_block"),
        hooks({"mlp_act": "all"}),
    ),
    Case(
        path("steering[0].point", "'mlp_out'", "post_block"),
        {"steering": [{"op": "add", "point": "mlp_out", "layers": 1, "vector": VECTOR}]},
    ),
    Case(
        path(f"{HOOKS}.final", "'final'", "embed, pre_attn, post_attn, post_block"),
        hooks({"final": "all"}),
    ),
    Case(
        path(f"{HOOKS}.embed", "'embed'", "pre_attn, post_attn, post_block, attn_out, mlp_out")
        | {"layer": "1"},
        hooks({"embed": 1}) | BRANCHED_CONFIG,
    ),
    Case(
        path(f"{HOOKS}.attn_out", "'attn_out'", "pre_attn, post_block", layer="2"),
        hooks({"attn_out": 2}) | BRANCHED_CONFIG,
    ),
    Case(
        path("capture.logging.hooks"),
        {"capture": {"logging": {"hooks": {"attn_out": [1], "post_attn": [1]}}}} | BRANCHED_CONFIG,
    ),
    Case(
        path("capture.inline.project"),
        {"capture": {"inline": {"hooks": {"mlp_out": 1, "pre_attn": 1}, "project": [VECTOR]}}}
        | BRANCHED_CONFIG,
    ),
    Case(
        path("capture.inline.reduce"),
        {"capture": {"inline": {"hooks": {"mlp_out": 1, "pre_attn": 1}, "reduce": "mean"}}}
        | BRANCHED_CONFIG,
    ),
    Case(
        path(f"{HOOKS}.embed", allowed="['post_block']", point="pre_attn"),
        hooks({"embed": "all"}) | {"config": config_of(capture_points=["post_block"])},
    ),
    Case(path(f"{HOOKS}.k[0]", "'k'", layer="3"), hooks({"k": [3]}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q[0]", "4", "0-3"), hooks({"q": [4]}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1", "'none'"), hooks({"q": {1: ["none"]}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1", "True"), hooks({"q": {1: True}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1", "dict"), hooks({"q": {1: {}}}) | HEADED_CONFIG),
    Case(
        path(f"{HOOKS}.k.0-1", "2", "0-1", layer="0"), hooks({"k": {"0-1": [0, 2]}}) | HEADED_CONFIG
    ),
    Case(path(f"{HOOKS}.q.1", "-1", "0-3", layer="1"), hooks({"q": {1: -1}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1", "'2-1'", "0-3", layer="1"), hooks({"q": {1: "2-1"}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1", "a head"), hooks({"q": {1: [0, "0-1"]}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q", "layer 1"), hooks({"q": {1: 0, "0-1": 1}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q.1"), hooks({"q": {1: []}}) | HEADED_CONFIG),
    Case(path(f"{HOOKS}.q"), hooks({"q": {}}) | HEADED_CONFIG),
    Case(
        path("capture.logging.hooks"),
        {"capture": {"logging": {"hooks": {"q": {0: 1, 1: [0, 1]}}}}} | HEADED_CONFIG,
    ),
    Case(
        path("capture.inline.project"),
        {"capture": {"inline": {"hooks": {"q": "all"}, "project": [VECTOR]}}} | HEADED_CONFIG,
    ),
    Case(
        path("capture.inline.reduce"),
        {"capture": {"inline": {"hooks": {"q": "all"}, "reduce": "mean"}}} | HEADED_CONFIG,
    ),
    Case(
        path(f"{HOOKS}.q", allowed="['pre_attn', 'post_attn', 'post_block', 'final']"),
        hooks({"q": [1]}) | {"config": config_of(HEADS)},
    ),
    Case(
        path("steering_vectors.post_attn", "'post_attn'", "pre_attn, post_block"),
        at("all", point="post_attn", config=config_of(PARALLEL_ONLY)),
    ),
    Case(path("steering_vectors.post_block.-5", "-5", "0-3"), at(-5)),
    Case(path("steering_vectors.post_block.4", "4", "0-3"), at(4)),
    Case(path("steering_vectors.post_block.2-9", "9", "0-3"), at("2-9")),
    Case(path("steering_vectors.post_block.0-999999999", "999999999", "0-3"), at("0-999999999")),
    Case(
        path("steering_vectors.pre_attn.1", "1", "0, 2, 5"),
        at(1, point="pre_attn", config=config_of(GAPS)),
    ),
    Case(
        path("steering_vectors.pre_attn.0-5", "1", "0, 2, 5"),
        at("0-5", point="pre_attn", config=config_of(GAPS)),
    ),
    Case(
        path("steering_vectors.post_block.an int of 16610 bits", "an int of 16610 bits", "0-3"),
        at(HUGE_INT),
    ),
    Case(path(f"{HOOKS}.post_block[1]", "7", "0-3"), hooks({"post_block": [0, 7]})),
    Case(
        path("steering_vectors.post_attn.2", "'post_attn'", "pre_attn, post_block", layer="2"),
        at(2, point="post_attn"),
    ),
    Case(
        path(f"{HOOKS}.post_attn", "'post_attn'", "pre_attn, post_block", layer="2"),
        hooks({"post_attn": "1-3"}),
    ),
    Case(path("steering_vectors.post_block.3-1", "'3-1'"), at("3-1")),
    Case(path("steering_vectors.post_block.last", "'last'"), at("last")),
    Case(path("steering_vectors.post_block.True", "True"), at(True)),
    Case(path("steering_vectors.post_block.--1", "'--1'"), at("--1")),
    Case(path(f"{HOOKS}.post_block", "1.0"), hooks({"post_block": 1.0})),
    Case(path(f"{HOOKS}.post_block", "ndarray"), hooks({"post_block": np.array([1.0, 2.0])})),
    Case(path(f"{HOOKS}.post_block[0]", "list"), hooks({"post_block": [[1]]})),
    Case(path(f"{HOOKS}.post_block", "layer 1"), hooks({"post_block": [1, 0, "1"]})),
    Case(path(f"{HOOKS}.post_block"), hooks({"post_block": []})),
    # Vectors.
    Case(
        path("steering_vectors.post_block.01", "1"),
        steer({"post_block": {1: VECTOR, "01": VECTOR}}),
    ),
    Case(
        path("steering_vectors.post_block.1", "1"),
        steer({"post_block": {"0-2": VECTOR, 1: VECTOR}}),
    ),
    Case(path(V1, "'abc'"), at(1, "abc")),
    Case(path(V1, "None"), at(1, None)),
    Case(path(V1, "int64"), at(1, np.arange(HIDDEN))),
    Case(path(V1, "torch.bool"), at(1, torch.ones(HIDDEN, dtype=torch.bool))),
    Case(path(V1, "torch.sparse_coo on cpu"), at(1, torch.ones(HIDDEN).to_sparse())),
    Case(path(V1, "torch.strided on meta"), at(1, torch.ones(HIDDEN, device="meta"))),
    Case(path(V1, "3", "4"), at(1, VECTOR[:3])),
    Case(path(f"{V1}.vector", "5", "4"), at(1, {"vector": [*VECTOR, 0.0]})),
    Case(path(V1, "[1, 4]", "[4]"), at(1, torch.ones(1, HIDDEN))),
    Case(path(V1, "[5]", "[4]"), at(1, np.ones(5))),
    Case(path(f"{V1}[2]", "'0.5'"), at(1, [1.0, 2.0, "0.5", 3.0])),
    Case(path(f"{V1}[0]", "True"), at(1, [True, 1.0, 1.0, 1.0])),
    Case(path(f"{V1}[3]", "list"), at(1, [1.0, 1.0, 1.0, [1.0]])),
    Case(path(f"{V1}.scale", "'2'"), at(1, {"vector": VECTOR, "scale": "2"})),
    Case(path(V1, "2"), at(1, [1.0, 1.0, float("nan"), 1.0])),
    Case(path(f"{V1}.vector", "0"), at(1, {"vector": torch.full((HIDDEN,), float("inf"))})),
    Case(path(f"{V1}[1]", "an int of 16610 bits"), at(1, [1.0, HUGE_INT, 1.0, 1.0])),
    Case(path(f"{V1}.scale", "nan", "1e+30"), at(1, {"vector": VECTOR, "scale": float("nan")})),
    Case(path(f"{V1}.scale", "-1e+31", "1e+30"), at(1, {"vector": VECTOR, "scale": -1e31})),
    Case(path(f"{V1}.scale", "an int of 16610 bits"), at(1, {"vector": VECTOR, "scale": HUGE_INT})),
    Case(
        path(V1, "['factor']", "vector, scale, positions"), at(1, {"vector": VECTOR, "factor": 2.0})
    ),
    Case(path(V1), at(1, {"scale": 2.0})),
    Case(
        path("steering_vectors + decode_steering_vectors", "post_block layer 1", "float32"),
        at(
            1,
            {"vector": VECTOR, "scale": 1e30},
            decode_steering_vectors={"post_block": {1: {"vector": [1e9] * 4, "scale": 1e30}}},
        ),
    ),
    # What is captured.
    Case(path("capture"), {"capture": {}}),
    Case(path("capture.disk", "'disk'", "['inline']"), {"capture": {"disk": {}}}),
    Case(path("capture.inline", "['layers']"), {"capture": {"inline": {"layers": [1]}}}),
    Case(path(HOOKS), {"capture": {"inline": {"positions": "all"}}}),
    Case(path(HOOKS), hooks({})),
    Case(path(POSITIONS, "'first'", SELECTORS), capture("first")),
    Case(path(POSITIONS, "3", SELECTORS), capture(3)),
    Case(path(POSITIONS, "None", SELECTORS), capture(None)),
    Case(path(f"{POSITIONS}[1]", "True", SELECTORS), capture([0, True])),
    Case(path(f"{POSITIONS}[0]", "1.0", SELECTORS), capture([1.0])),
    Case(path(POSITIONS, "['end', 'start']", SELECTORS), capture({"start": 0, "end": 2})),
    Case(path(POSITIONS, "['start', 'text']", SELECTORS), capture({"text": "a", "start": 0})),
    Case(path(f"{POSITIONS}[1].which", "1"), capture([0, {"text": "a", "which": 1}])),
    Case(path(f"{POSITIONS}.which", "list"), capture({"token_ids": [1], "which": ["first"]})),
    Case(path(f"{POSITIONS}.text", "7"), capture({"text": 7}, tokenizer=ABC)),
    Case(path(f"{POSITIONS}.text"), capture({"text": ""}, tokenizer=ABC)),
    Case(path(f"{POSITIONS}.text"), capture({"text": "a\ufffd"}, tokenizer=ABC)),
    Case(path(f"{POSITIONS}.text"), capture({"text": "a"})),
    Case(path(f"{POSITIONS}.text", "'ca'", prompt="5"), capture({"text": "ca"}, tokenizer=ABC)),
    Case(path(f"{POSITIONS}.token_ids", "'1'"), capture({"token_ids": "1"})),
    Case(path(f"{POSITIONS}.token_ids"), capture({"token_ids": []})),
    Case(path(f"{POSITIONS}.token_ids", "6", prompt="5"), capture({"token_ids": [100] * 6})),
    Case(path(f"{POSITIONS}.token_ids[1]", "True"), capture({"token_ids": [1, True]})),
    Case(
        path(f"{POSITIONS}.token_ids", "[101, 100]", prompt="5"),
        capture({"token_ids": [101, 100]}),
    ),
    Case(
        path(f"{POSITIONS}[39].token_ids", allowed=MOST),
        capture([{"token_ids": [100]}] * 50, prompt=int(MOST) // 40),
    ),
    Case(path(f"{POSITIONS}.start", "'0'"), capture({"start": "0"})),
    Case(path(f"{POSITIONS}[0].stop", "None"), capture([{"stop": None}])),
    Case(path(f"{POSITIONS}.step", "0"), capture({"step": 0})),
    Case(path(f"{POSITIONS}.of", "'answer'"), capture({"start": 0, "of": "answer"})),
    Case(path(f"{POSITIONS}.start", "-1"), capture({"start": -1, "of": "generated"})),
    Case(path(f"{POSITIONS}.at[1]", "-1"), capture({"at": [0, -1], "of": "generated"})),
    Case(path(f"{POSITIONS}.at", "3"), capture({"at": 3})),
    Case(path(f"{POSITIONS}.at[0]", "8", "7", prompt="5"), capture({"at": [3], "of": "generated"})),
    Case(path(f"{POSITIONS}.stop", "9", "8"), capture({"stop": 4, "of": "generated"})),
    Case(path(POSITIONS), capture(["last_generated", {"except": [1]}])),
    Case(path(POSITIONS), capture(["all", {"except": "last_generated"}])),
    Case(path(f"{POSITIONS}[1].except"), capture(["all", {"except": ["all", {"except": [1]}]}])),
    Case(path(POSITIONS, "['except']", f"{SELECTORS}"), capture({"except": [1]})),
    Case(path(f"{POSITIONS}.stop", "2", "8"), capture({"start": 2, "stop": 2})),
    Case(path(f"{POSITIONS}.stop", "9", "8"), capture({"stop": 9})),
    Case(path(f"{POSITIONS}[1]", "8", "7", prompt="5"), capture([0, 8])),
    Case(path(f"{POSITIONS}[0]", "-6", "7", prompt="5"), capture([-6])),
    Case(path(f"{POSITIONS}.start", "8", "7", prompt="5"), capture({"start": 8})),
    Case(path(f"{POSITIONS}[0]", "an int of 16610 bits", "7"), capture([HUGE_INT])),
    Case(path(POSITIONS), capture([])),
    Case(path(f"{POSITIONS}[0]"), capture([[0, 1]])),
    Case(path(POSITIONS, allowed=MOST), capture(range(10**30))),
    Case(path(POSITIONS, allowed=MOST), capture({"step": 2}, prompt=int(MOST) // 4)),
    Case(path(POSITIONS, "1", "0", prompt="5"), capture("all_generated", max_tokens=1)),
    Case(path(POSITIONS, "1", "0", prompt="5"), capture("last_generated", max_tokens=1)),
    # What the engine can do.
    *[
        Case(path(name), {name: {"pre_attn": {0: VECTOR}}, "config": config_of(steering=False)})
        for name in (
            "steering_vectors",
            "prefill_steering_vectors",
            "decode_steering_vectors",
            "steering_modules",
            "steering",
            "steering_inherit_global",
        )
    ],
    Case(path("capture"), capture("all", config=config_of(capture=False))),
    Case(
        path("steering_vectors.pre_attn", allowed="['post_attn', 'post_block']"),
        at(0, point="pre_attn", config=config_of(steering_points=["post_attn", "post_block"])),
    ),
    Case(
        path(f"{HOOKS}.pre_attn", allowed="['post_block']"),
        hooks({"post_block": [0], "pre_attn": [0]})
        | {"config": config_of(capture_points=["post_block"])},
    ),
    Case(
        path("decode_steering_vectors"),
        {"decode_steering_vectors": {"pre_attn": {0: VECTOR}}, "max_tokens": 1},
    ),
    Case(
        path("steering_vectors + decode_steering_vectors", "2", "1"),
        at(
            0,
            decode_steering_vectors={"pre_attn": {0: VECTOR}},
            config=config_of(max_steering_configs=1),
        ),
    ),
    Case(
        path("capture", "64", "63", positions="1 position"),
        hooks({"pre_attn": "all"}) | {"config": config_of(capture_buffer_bytes=63)},
    ),
    Case(
        path("capture.inline", "128", "127", rows="8"),
        capture("all", config=config_of(capture_inline_max_bytes=127)),
    ),
    Case(
        path("capture.inline", "256", "255", rows="16"),
        capture("all", n=2, config=config_of(capture_inline_max_bytes=255)),
    ),
    Case(
        path("steering", allowed=MOST),
        {
            "steering": [
                {
                    "op": "replace",
                    "point": "pre_attn",
                    "layers": [0],
                    "positions": list(range(1025)),
                    "values": [[float(i)] * HIDDEN for i in range(1025)],
                }
            ],
            "n": 16384,
            "prompt": 1100,
            "config": config_of(steering_families=["replace"], max_steering_rows=2048),
        },
    ),
    Case(path("steering"), at(0, resumable=True)),
    Case(path("steering"), capture("all", resumable=True)),
    Case(path("capture"), capture("all", resumable=True, config=config_of(steering=False))),
    Case(
        path("capture.inline.positions.token_ids"),
        capture({"token_ids": [100]}, embedded=range(5)),
    ),
]
