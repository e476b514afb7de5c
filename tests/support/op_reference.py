# SPDX-License-Identifier: Apache-2.0
"""What the operations mean, in float64 and one row at a time. The fast code is tested against this.

An operation is the mapping a request gives, its `positions` resolved to ascending ints (left out:
all). Rows and vectors are float64 [hidden].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = np.ndarray
_WHEN = ("when", "latch")


def unit(direction: Row) -> Row:
    return direction / np.linalg.norm(direction)


def add(h: Row, vector: Row, scale: float = 1.0) -> Row:
    return h + scale * vector


def norm_match(h: Row, direction: Row, scale: float) -> Row:
    return h + scale * np.linalg.norm(h) * unit(direction)


def ablate(h: Row, direction: Row, strength: float = 1.0) -> Row:
    u = unit(direction)
    return h - strength * (h @ u) * u


def clamp(
    h: Row, direction: Row, lo: float = -np.inf, hi: float = np.inf, strength: float = 1.0
) -> Row:
    u = unit(direction)
    return h + strength * (np.clip(h @ u, lo, hi) - h @ u) * u


def pin(h: Row, direction: Row, value: float, strength: float = 1.0) -> Row:
    u = unit(direction)
    return h + strength * (value - h @ u) * u


def replace(h: Row, values: Row, alpha: float = 1.0) -> Row:
    """`values` is the row of this position, or of all."""
    return (1 - alpha) * h + alpha * values


def swap(h: Row, direction: Row, other: Row) -> Row:
    """The components of h along both, by least squares, change places; the rest stays."""
    both = np.stack([unit(direction), unit(other)], axis=1)
    first, second = np.linalg.lstsq(both, h, rcond=None)[0]
    return h + both @ np.array([second - first, first - second])


def feature(
    h: Row,
    read: Row,
    encoder: Row,
    decoder: Row,
    bias: float = 0.0,
    threshold: float = 0.0,
    value: float | None = None,
    strength: float = 1.0,
    add: float = 0.0,
    only_if_active: bool = False,
) -> Row:
    """`read` is the row before the first of the features that follow each other."""
    before = read @ encoder + bias
    activation = before if before > threshold else 0.0
    change = add + (0.0 if value is None else strength * (value - activation))
    return h if only_if_active and activation == 0 else h + change * decoder


def low_rank(
    h: Row, A: np.ndarray, B: np.ndarray, c: Row | None = None, strength: float = 1.0
) -> Row:
    """A [r, hidden], B [hidden, r], c [r]: all of them read the row as it is."""
    read = A @ h if c is None else A @ h + c
    return h + strength * (B @ read)


def normalize(h: Row, norm: float) -> Row:
    """`norm` is that of the row as it arrived at the point. A zero row has no direction to keep."""
    return h if not h.any() else norm / np.linalg.norm(h) * h


def scale(h: Row, factor: Row) -> Row:
    """`factor` of each number: that of its head."""
    return h * factor


def gate(h: Row, probe: Row, threshold: float, sharpness: float, cosine: bool = False) -> float:
    if cosine:
        h, probe = (unit(row) if row.any() else row for row in (h, probe))
    # 1 / (1 + exp(-x)), written so that exp cannot overflow.
    return float(0.5 * (1 + np.tanh(0.5 * sharpness * (h @ probe - threshold))))


def apply_point(
    h: Row,
    additive: Row,
    ops: Sequence[Mapping[str, Any]],
    position: int = 0,
    num_prompt: int = 1,
    decided: dict[int, float] | None = None,
) -> Row:
    """One row through one point.

    Args:
        h: as it arrives.
        additive: the sum of the additive tiers at this position.
        ops: those of this point and layer, in order.
        position: of the row.
        num_prompt: tokens of the prompt; the last of them decides `last_prompt` gates.
        decided: index of the op -> what it decided. Written at the last prompt row, read later. The
            largest number so far of a gate that latches is beside it at `~index`.
    """
    arrived, h = h, h + additive
    decided, read = {} if decided is None else decided, h
    for index, op in enumerate(ops):
        g = 1.0
        positions = op.get("positions")
        acts = positions is None or position in positions
        if "gate" in op:
            asked = op["gate"]
            # A feature's gate is of the row that the feature reads.
            judged = read if op["op"] == "feature" else h
            g = gate(judged, **{k: value for k, value in asked.items() if k not in _WHEN})
            if asked.get("latch") and acts:
                g = decided[~index] = max(g, decided.get(~index, 0.0))
            if asked.get("when", "row") == "last_prompt":
                if position == num_prompt - 1:
                    decided[index] = g
                g = decided.get(index, 0.0)
        if acts:
            h = h + g * (_changed(h, arrived, read, op, position) - h)
        decides = decided.get(index) is not None and position == num_prompt - 1
        if op["op"] != "feature" and (acts or decides):
            read = h
    return h


def _changed(h: Row, arrived: Row, read: Row, op: Mapping[str, Any], position: int) -> Row:
    skipped = ("op", "point", "layers", "positions", "gate")
    given = {name: value for name, value in op.items() if name not in skipped}
    if np.ndim(given.get("values", 0.0)) == 2:
        given["values"] = given["values"][list(op["positions"]).index(position)]
    if op["op"] != "replace" and "values" in given:
        given["vector" if op["op"] == "add" else "direction"] = given.pop("values")
    match op["op"]:
        case "replace":
            return replace(h, **given)
        case "normalize":
            return normalize(h, float(np.linalg.norm(arrived)))
        case "add":
            return add(h, **given)
        case "norm_match":
            return norm_match(h, **given)
        case "ablate":
            return ablate(h, **given)
        case "clamp":
            return clamp(h, **given)
        case "pin":
            return pin(h, **given)
        case "scale":
            return scale(h, **given)
        case "swap":
            return swap(h, **given)
        case "feature":
            return feature(h, read, **given)
        case "low_rank":
            return low_rank(h, **given)
    raise ValueError(op["op"])


def apply_site(
    rows: np.ndarray, additive: np.ndarray, ops: Sequence[Mapping[str, Any]], num_prompt: int
) -> np.ndarray:
    """All rows of a sequence, [positions, hidden], through one point of one layer."""
    decided: dict[int, float] = {}
    return np.stack(
        [
            apply_point(h, added, ops, position, num_prompt, decided)
            for position, (h, added) in enumerate(zip(rows, additive, strict=True))
        ]
    )
