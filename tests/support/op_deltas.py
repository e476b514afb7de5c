# SPDX-License-Identifier: Apache-2.0
"""What operations do to a Hugging Face model, as vectors to add.

An operation on a stream h is the addition of f(h) - h once h is known, and h at a site depends on
the sites before it only. So the reference runs once for each site with operations, in the order of
the stream, and needs no hooks of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.conformance.reference import Site
from tests.conformance.runner import Reference
from tests.support.op_reference import apply_site
from tests.support.selected import expected_positions
from vllm.config.operations import VECTORS
from vllm.config.points import STEERING_POINTS


def with_ops(
    reference: Reference,
    ops: Sequence[Mapping[str, Any]],
    added: Mapping[Site, torch.Tensor],
    sequence: Sequence[int],
    num_prompt: int,
) -> dict[Site, torch.Tensor]:
    """(point, layer) -> float32 [len(sequence), hidden]: tiers and operations together.

    Args:
        ops: as a request gives them; `layers` an int or a list of ints, or `heads` a mapping of
            ints to lists of ints.
        added: what the additive tiers add.
        sequence: prompt and generated tokens, without the last.
    """
    generated = len(sequence) + 1 - num_prompt
    at_site: dict[Site, list[dict[str, Any]]] = {}
    plain = reference.run(sequence)
    for op in ops:
        given = op["layers"] if "layers" in op else list(op["heads"])
        for layer in given if isinstance(given, list) else [given]:
            resolved = _resolved(op, num_prompt, generated)
            if op["point"] == "z":
                resolved = _of_heads(resolved, layer, plain.heads["z", layer].shape[1:])
            at_site.setdefault((op["point"], layer), []).append(resolved)
    total = dict(added)
    for site in sorted(at_site, key=lambda site: (site[1], STEERING_POINTS.index(site[0]))):
        others = {other: delta for other, delta in total.items() if other != site}
        forward = reference.run(sequence, others)
        arrived = (
            forward.heads[site].flatten(1) if site[0] == "z" else forward.rows[site]
        ).double()
        tiers = added.get(site, torch.zeros(())).double().expand_as(arrived)
        lanes = 1 if site[0] == "z" else reference.row.adapter.lanes
        parts = zip(arrived.chunk(lanes, 1), tiers.chunk(lanes, 1), strict=True)
        changed = [
            apply_site(rows.numpy(), more.numpy(), _of_lane(at_site[site], lane), num_prompt)
            for lane, (rows, more) in enumerate(parts)
        ]
        total[site] = (torch.from_numpy(np.concatenate(changed, axis=1)) - arrived).float()
    return total


def _of_heads(op: Mapping[str, Any], layer: int, shape: Sequence[int]) -> dict[str, Any]:
    """An operation at z with the numbers of whole rows, of `shape` [heads, width]."""
    (count, width), made = shape, dict(op)
    chosen = list(made.pop("heads", {layer: range(count)})[layer])
    for key, rest in (("vector", 0.0), ("values", 0.0), ("factor", 1.0)):
        if key in made:
            given = np.full(width, made[key]) if key == "factor" else np.asarray(made[key])
            rows = np.full((*given.shape[:-1], count, width), rest)
            rows[..., chosen, :] = given.reshape(*given.shape[:-1], -1, width)
            made[key] = rows.reshape(*given.shape[:-1], count * width)
    return made


def _of_lane(ops: Sequence[Mapping[str, Any]], lane: int) -> list[dict[str, Any]]:
    """Those that act on a lane, each with its part of what is given for every lane."""
    made = []
    for op in ops:
        own = {name: value for name, value in op.items() if name != "lane"}
        # With positions the first dimension of `values` is theirs.
        of_lanes = dict.fromkeys(VECTORS, 2) | {"values": 3 if "positions" in op else 2}
        if op["op"] == "low_rank":  # matrices are of every lane
            of_lanes = {}
        for key, ndim in of_lanes.items():
            if np.ndim(own.get(key, 0.0)) == ndim:
                own[key] = np.asarray(own[key])[..., lane, :]
        if "gate" in op and op["gate"]["probe"].ndim == 2:
            own["gate"] = {**op["gate"], "probe": op["gate"]["probe"][lane]}
        if op.get("lane", lane) == lane:
            made.append(own)
    return made


def _resolved(op: Mapping[str, Any], prompt: int, generated: int) -> dict[str, Any]:
    """The operation as `apply_site` takes it."""
    fields = {name: _array(value) for name, value in op.items()}
    if "gate" in op:
        fields["gate"] = {name: _array(value) for name, value in op["gate"].items()}
    if "positions" in op:
        given = op["positions"]
        in_order = isinstance(given, list) and all(isinstance(p, int) for p in given)
        fields["positions"] = (
            [p if p >= 0 else prompt + p for p in given]  # the order of the rows of `replace`
            if in_order
            else expected_positions(given, prompt, generated)
        )
    return fields


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double().numpy()
    return value.astype(np.float64) if isinstance(value, np.ndarray) else value
