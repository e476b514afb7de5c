# SPDX-License-Identifier: Apache-2.0
"""What must hold for the demo to claim anything; each with the numbers it was decided on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from demo.subject import PERPLEXITY_BOUND
from vllm.pilot.bench import EngineBench, Steering, surprise
from vllm.pilot.evidence import Evidence
from vllm.pilot.training import Trained

RANDOM_BOUND = 0.25
"""Random directions of the same length may have this share of the effect."""

REVERSAL = 0.25
"""The weaker sign must have at least this share of the stronger one's effect."""


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and what was measured."""

    claim: str
    held: bool
    measured: str


@dataclass(frozen=True)
class Perplexity:
    """Of texts, per token, under each sign and under none."""

    minus: float
    plus: float
    unsteered: float


def examine(
    scale: float, evidence: Evidence, perplexity: Perplexity, neutral: Perplexity | None = None
) -> list[Check]:
    """The checks on the held-out result at plus and minus the chosen scale.

    Args:
        neutral: of neutral text, to the model that is steered so.
    """
    effect = dict(zip(evidence.scales, evidence.effect, strict=True))
    up, down = effect[scale], effect[-scale]
    size = (abs(up) + abs(down)) / 2
    random = [abs(value) for _, value in evidence.random_effects]
    chance = sum(random) / len(random)
    claims = {"steered text is ordinary to the unsteered model": perplexity}
    if neutral is not None:
        claims["neutral text is as ordinary to the steered model"] = neutral
    return [
        Check(
            "v plus -v through a slot writes exactly the unsteered tokens",
            evidence.changed_by_zero == 0,
            f"{evidence.cases - evidence.changed_by_zero} of {evidence.cases} answers identical",
        ),
        Check(
            "the negative scale reverses the effect",
            up > 0 > down and min(up, -down) >= REVERSAL * max(up, -down),
            f"{up:+.2f} at {scale:+g}, {down:+.2f} at {-scale:+g}",
        ),
        Check(
            "random directions of the same length do little",
            chance <= RANDOM_BOUND * size and evidence.above_random,
            f"mean |effect| {chance:.2f}, that is {chance / max(size, 1e-9):.0%} of {size:.2f}, "
            f"at most {RANDOM_BOUND:.0%}; {len(random)} of them",
        ),
        *(_ordinary(claim, measured) for claim, measured in claims.items()),
    ]


def _ordinary(claim: str, perplexity: Perplexity) -> Check:
    """Neither sign makes it much larger."""
    worst = max(perplexity.minus, perplexity.plus) / perplexity.unsteered
    return Check(
        claim,
        worst <= PERPLEXITY_BOUND,
        f"perplexity {perplexity.minus:.2f} and {perplexity.plus:.2f}, unsteered "
        f"{perplexity.unsteered:.2f}: at most {worst:.2f} times, allowed {PERPLEXITY_BOUND:g}",
    )


def neutral_perplexity(
    bench: EngineBench, trained: Trained, texts: Sequence[str]
) -> Perplexity | None:
    """Of neutral texts to the model, steered with both signs and not; None where there are none."""
    if not texts:
        return None
    choice = trained.choice
    vector = trained.directions.at(choice.layer)
    signs = (Steering(choice.layer, vector, sign * choice.scale) for sign in (-1, 1))
    encoded = [(bench.encode(text), 1) for text in texts]
    tokens = sum(len(ids) - start for ids, start in encoded)
    nats = surprise(bench, encoded, [*signs, None]).sum(-1) / tokens
    return Perplexity(*(math.exp(each) for each in nats))
