# SPDX-License-Identifier: Apache-2.0
"""Checks of global tiers, modules, positions and ops on a GPU, for `tests.gpu.mode`.

No reference model: what a request's own vectors do is proved against Hugging Face there, and here
other ways to say the same must give the same bits. Ops are computed in float64 from the rows of a
plain run of the same graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.support.op_reference import apply_site
from vllm.config.operations import STREAM_OPERATIONS

if TYPE_CHECKING:
    from tests.gpu.mode import Mode

FAMILIES = [*STREAM_OPERATIONS, "gate"]
ROUNDING = 2.0**-7
"""Of a bfloat16 row, relative: an op reads one that was rounded and is rounded again."""

Runs = list[tuple[list[int], dict[tuple[str, int], torch.Tensor]]]


def vector(seed: int, hidden: int) -> torch.Tensor:
    return torch.randn(hidden, generator=torch.Generator().manual_seed(seed)) * 2


def same(one: Runs, two: Runs) -> bool:
    return all(
        a[0] == b[0] and all(torch.equal(a[1][site], b[1][site]) for site in a[1])
        for a, b in zip(one, two, strict=True)
    )


def tiers(mode: Mode, tokens: list[list[int]], hidden: int) -> dict[str, Any]:
    """Global tiers, a module and a request's own vectors give the same bits; clearing gives the
    plain ones again."""
    v, w = vector(11, hidden), vector(12, hidden)
    own = {
        "steering_vectors": {"post_attn": {1: v}},
        "decode_steering_vectors": {"pre_attn": {2: w}},
    }
    steering, count = mode.llm.steering, len(tokens)
    plain = mode.run(tokens, [{}] * count)
    asked = mode.run(tokens, [own] * count)
    steering.set_tiers({"base": {"post_attn": {1: v}}, "decode": {"pre_attn": {2: w}}})
    global_ = mode.run(tokens, [{}] * count)
    without = mode.run(tokens, [{"steering_inherit_global": False}] * count)
    steering.clear()
    cleared = mode.run(tokens, [{}] * count)
    module = {"vectors": {"post_attn": {1: v}}, "decode_vectors": {"pre_attn": {2: w}}}
    steering.register_module("both", module)
    named = mode.run(tokens, [{"steering_modules": ["both"]}] * count)
    found = {
        "global_is_own": same(global_, asked),
        "opted_out_is_plain": same(without, plain),
        "cleared_is_plain": same(cleared, plain),
        "module_is_own": same(named, asked),
        "moved": not same(plain, asked),
    }
    return {**found, "ok": all(found.values())}


def positions(mode: Mode, tokens: list[list[int]], hidden: int) -> dict[str, Any]:
    """A vector at two positions moves its site's rows there, by itself, and nowhere before."""
    v = vector(13, hidden)
    site = ("pre_attn", 3)
    limited = {"steering_vectors": {site[0]: {site[1]: {"vector": v, "positions": [2, -1]}}}}
    plain = mode.run(tokens, [{}] * len(tokens))
    asked = mode.run(tokens, [limited] * len(tokens))
    error, still = 0.0, True
    for ids, (_, before), (_, after) in zip(tokens, plain, asked, strict=True):
        for position in (2, len(ids) - 1):
            moved = after[site][position].float() - before[site][position].float()
            if position == 2:  # later ones are moved through attention, too
                scale = before[site][position].float().norm() + v.norm()
                error = max(error, float((moved - v).norm() / scale))
        still &= torch.equal(after[site][:2], before[site][:2])
    return {"error": error, "before_untouched": still, "ok": still and error <= ROUNDING}


def ops(mode: Mode, tokens: list[list[int]], hidden: int) -> dict[str, Any]:
    """Every op, gated and not, at a layer in the middle, against float64 on the plain rows."""
    u, p, v = vector(14, hidden), vector(15, hidden) / hidden, vector(18, hidden)
    values = torch.stack([vector(16, hidden), vector(17, hidden)])
    gate = {"probe": p, "threshold": 0.1, "sharpness": 2.0}
    asked: list[list[dict[str, Any]]] = [
        [{"op": "norm_match", "direction": u, "scale": 0.5}],
        [{"op": "ablate", "direction": u}],
        [{"op": "clamp", "direction": u, "lo": -0.5, "hi": 0.5}],
        [{"op": "pin", "direction": u, "value": 3.0}],
        [{"op": "replace", "values": values, "positions": [1, 3]}],
        [{"op": "add", "vector": u, "gate": gate}, {"op": "normalize"}],
        [{"op": "pin", "direction": u, "value": 2.0, "gate": {**gate, "when": "last_prompt"}}],
        [
            {"op": "feature", "encoder": u / hidden, "decoder": p, "bias": 0.1, "value": 9.0},
            {"op": "feature", "encoder": p, "decoder": u, "threshold": 0.1, "value": 2.0},
        ],
        [{"op": "swap", "direction": u, "other": p}],
        [{"op": "add", "vector": u, "gate": {**gate, "cosine": True}}],
        [{"op": "add", "vector": u, "gate": {**gate, "latch": True}}],
        [
            {"op": "low_rank", "A": torch.stack([u, v]) / hidden, "B": torch.stack([v, u], dim=1)},
            {"op": "low_rank", "A": torch.stack([p, u]), "B": torch.stack([u, p], dim=1) / hidden},
        ],
    ]
    tokens = tokens[: len(asked)]
    point, layer = "post_attn", 4
    plain = mode.run(tokens, [{}] * len(tokens))
    said = [
        {"steering": [{**op, "point": point, "layers": [layer]} for op in ops]} for ops in asked
    ]
    steered = mode.run(tokens, said)
    worst, least_move = 0.0, 9e9
    for ids, ops, (_, before), (_, after) in zip(tokens, asked, plain, steered, strict=True):
        arrived = before[point, layer][: len(ids)].double().numpy()
        known = [_resolved(op) for op in ops]
        want = apply_site(arrived, np.zeros_like(arrived), known, len(ids))
        got = after[point, layer][: len(ids)].double().numpy()
        norm = np.linalg.norm(want, axis=1)
        worst = max(worst, float((np.linalg.norm(got - want, axis=1) / norm).max()))
        moved = np.linalg.norm(want - arrived, axis=1) / np.linalg.norm(arrived, axis=1)
        least_move = min(least_move, float(moved.max()))
    exact = torch.equal(steered[4][1][point, layer][[1, 3]], values.bfloat16())
    ok = worst <= ROUNDING and least_move >= 0.02 and exact
    return {"error": worst, "least_move": least_move, "replaced_exact": exact, "ok": ok}


def _resolved(op: dict[str, Any]) -> dict[str, Any]:
    """For the reference: float64 arrays, and a frozen gate acts from the last prompt row on."""
    known = {k: v.double().numpy() if isinstance(v, torch.Tensor) else v for k, v in op.items()}
    if "gate" in op:
        known["gate"] = {**op["gate"], "probe": op["gate"]["probe"].double().numpy()}
    return known
