# SPDX-License-Identifier: Apache-2.0
"""Scores of probes by their definitions, one row at a time, in plain Python."""

from __future__ import annotations

import math

import numpy as np

from vllm.v1.probes import pools
from vllm.v1.probes.probe import ServedProbe


def numbers_of(probe: ServedProbe, rows: np.ndarray) -> np.ndarray:
    """What the head gives of rows [n, sites, hidden], of the probe's fields alone."""
    fields, made = probe.fields(), []
    units = np.asarray(fields["weight"], float).reshape(len(fields["bias"]), -1)
    for row in rows.astype(float):
        hidden = [
            math.fsum(u * row.ravel()) + float(b)
            for u, b in zip(units, fields["bias"], strict=True)
        ]
        if "output_weight" in fields:
            active = [max(h, 0.0) for h in hidden]
            assert fields["activation"] == "relu"
            last = zip(fields["output_weight"], fields["output_bias"], strict=True)
            hidden = [math.fsum(w * active) + float(b) for w, b in last]
        made.append(hidden)
    return np.array(made)


def pooled(pool: pools.AnyPool, numbers: np.ndarray) -> list[float]:
    """The score at each row: of z_1 ... z_t, by the formula in the pool's docstring."""
    return [_score(pool, numbers[:t].tolist()) for t in range(1, len(numbers) + 1)]


def _score(pool: pools.AnyPool, z: list[list[float]]) -> float:
    first = [row[0] for row in z]
    match pool:
        case pools.Each():
            return first[-1]
        case pools.Mean():
            return math.fsum(first) / len(first)
        case pools.Max():
            return max(first)
        case pools.MultiMax():
            return math.fsum(max(row[h] for row in z) for h in range(len(z[0])))
        case pools.Exponential(a=a):
            score = first[0]
            for number in first[1:]:
                score = a * number + (1 - a) * score
            return score
        case pools.RollingMax(window=window):
            ends = range(window, len(first) + 1)
            means = [math.fsum(first[end - window : end]) / window for end in ends]
            return max(means, default=math.fsum(first) / len(first))
        case pools.Attention():
            heads, score = len(z[0]) // 2, 0.0
            for h in range(heads):
                largest = max(row[h] for row in z)
                weights = [math.exp(row[h] - largest) for row in z]
                values = [w * row[heads + h] for w, row in zip(weights, z, strict=True)]
                score += math.fsum(values) / math.fsum(weights)
            return score
