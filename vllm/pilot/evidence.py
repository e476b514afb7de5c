# SPDX-License-Identifier: Apache-2.0
"""Evidence for the claims about a direction, measured on examples that no decision was made on."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm.pilot.bench import Bench, Steering
from vllm.pilot.choice import Choice
from vllm.pilot.fitting import Directions, scores_of, separation_of
from vllm.pilot.metrics import Metric, Written, write
from vllm.pilot.pairs import Pairs
from vllm.pilot.rows import Read

ERRORS = 2.0
"""Standard errors of the mean that an effect must be above zero."""
SHOWN = 4
"""Prompts whose answers are shown in a report."""
_SHOWN_TOKENS = 48


@dataclass(frozen=True)
class Evidence:
    """The effect of the chosen layer and scale on the report examples."""

    measured: bool
    """True if an effect was; else it is the separation alone."""
    unit: str
    strength: float
    """Half of what the scale does more than its negative; without an effect d'."""
    error: float
    """The standard error of that over cases."""
    randoms: list[float]
    """The size of the same for random directions of the same length."""
    scales: list[float]
    effect: list[float]
    """The mean change by each of `scales`."""
    random_effects: list[tuple[float, float]]
    """Scale and effect of each random direction, at minus and plus the chosen scale."""
    plain: float
    """The metric without steering."""
    cases: int
    changed_by_zero: int
    """Cases in which v plus -v changed anything: 0 unless something is broken."""
    auroc: float
    d_prime: float
    answers: dict[float, list[Written]] = field(repr=False)
    """Scale -> the texts written at it, for some scales; scale 0 means v plus -v."""

    @property
    def above_random(self) -> bool:
        """True if the effect is more than that of every random direction, and than chance."""
        return self.strength > max(self.randoms, default=0.0) and (
            self.strength > ERRORS * self.error
        )


def random_directions(vector: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Directions as long as `vector`, float32 [count, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, len(vector), generator=generator)
    lengths = vector.double().norm() / noise.double().norm(dim=-1, keepdim=True)
    return (noise * lengths).float()


def separation_evidence(
    bench: Bench,
    pairs: Pairs,
    found: Directions,
    choice: Choice,
    read: Read,
    point: str,
    randoms: int,
    seed: int,
) -> Evidence:
    """Measure how the chosen layer's direction separates, and how random ones do."""
    vector = found.at(choice.layer)
    several = torch.cat([vector[None], random_directions(vector, randoms, seed)])
    p, n, lengths = scores_of(bench, pairs, [choice.layer], several[None], read, point)
    each = separation_of(p[:, 0], n[:, 0], lengths, pairs.paired)
    area, away = each.auroc[0], each.d_prime[0]
    # The area is the mean of a rank statistic; below chance by its spread is no separation.
    spread = math.sqrt((len(p) + len(n) + 1) / (12 * len(p) * len(n)))
    return Evidence(
        measured=False,
        unit="d' on held-out examples",
        strength=away,
        error=abs(away) / ERRORS * 1.01 if (area - 0.5) < 1.645 * spread else 0.0,
        randoms=[abs(other) for other in each.d_prime[1:]],
        scales=[],
        effect=[],
        random_effects=[],
        plain=0.0,
        cases=len(p) + len(n),
        changed_by_zero=0,
        auroc=area,
        d_prime=away,
        answers={},
    )


def effect_evidence(
    bench: Bench,
    metric: Metric,
    found: Directions,
    choice: Choice,
    scales: list[float],
    point: str,
    randoms: int,
    seed: int,
    separated: Evidence,
) -> Evidence:
    """Measure the chosen layer at all scales, and random directions at the chosen one.

    Args:
        scales: symmetric, with 0.
    """
    vector = found.at(choice.layer)
    steerings: list[Steering | None] = [None]
    steerings += [Steering(choice.layer, vector, scale, point) for scale in scales]
    others = random_directions(vector, randoms, seed)
    signs = (-choice.scale, choice.scale)
    steerings += [Steering(choice.layer, o, scale, point) for o in others for scale in signs]
    scored = metric(bench, steerings)
    values = scored.values
    change = values[1 : 1 + len(scales)] - values[0]
    sides = [change[scales.index(scale)] for scale in (choice.scale, -choice.scale)]
    cases = (sides[0] - sides[1]) / 2
    noise = (values[1 + len(scales) :] - values[0]).mean(-1)
    if scored.answers:
        written = dict(zip(scales, scored.answers[1 : 1 + len(scales)], strict=True))
        plain = scored.answers[0]
    else:
        shown = [None, *(Steering(choice.layer, vector, s, point) for s in (*signs, 0.0))]
        plain, *rest = write(bench, list(metric.prompts)[:SHOWN], shown, _SHOWN_TOKENS, 0.0)
        written = dict(zip((*signs, 0.0), rest, strict=True))
    same = [a.token_ids == b.token_ids for a, b in zip(plain, written[0.0], strict=True)]
    zero = int((change[scales.index(0.0)] != 0).sum())
    return Evidence(
        measured=True,
        unit=metric.unit,
        strength=float(cases.mean()),
        error=float(cases.std(ddof=1)) / math.sqrt(len(cases)) if len(cases) > 1 else 0.0,
        randoms=[abs(float(b - a)) / 2 for a, b in noise.reshape(-1, 2)],
        scales=scales,
        effect=change.mean(-1).tolist(),
        random_effects=[(signs[i % 2], float(value)) for i, value in enumerate(noise)],
        plain=float(np.mean(values[0])),
        cases=len(cases),
        changed_by_zero=max(zero, same.count(False)),
        auroc=separated.auroc,
        d_prime=separated.d_prime,
        answers=written,
    )
