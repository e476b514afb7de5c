# SPDX-License-Identifier: Apache-2.0
"""What must hold for the demo to claim anything; each with the numbers it was decided on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demo.experiment import PERPLEXITY_BOUND, Choice, Result

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


def examine(scales: Sequence[float], choice: Choice, result: Result) -> list[Check]:
    """The checks on the held-out result."""
    effect = dict(zip(scales, result.effect, strict=True))
    up, down = effect[choice.scale], effect[-choice.scale]
    size = (abs(up) + abs(down)) / 2
    chance = sum(map(abs, result.random)) / len(result.random)
    worst = max(result.perplexity) / result.unsteered_perplexity
    answers = len(result.answers[0.0])
    return [
        Check(
            "v plus -v through a slot writes exactly the unsteered tokens",
            result.changed_by_zero == 0,
            f"{answers - result.changed_by_zero} of {answers} answers identical",
        ),
        Check(
            "the negative scale reverses the effect",
            up > 0 > down and min(up, -down) >= REVERSAL * max(up, -down),
            f"{up:+.2f} at {choice.scale:+g}, {down:+.2f} at {-choice.scale:+g}",
        ),
        Check(
            "random directions of the same length do little",
            chance <= RANDOM_BOUND * size,
            f"mean |effect| {chance:.2f}, that is {chance / max(size, 1e-9):.0%} of {size:.2f}, "
            f"at most {RANDOM_BOUND:.0%}; {len(result.random)} of them",
        ),
        Check(
            "steered text is ordinary to the unsteered model",
            worst <= PERPLEXITY_BOUND,
            f"perplexity {result.perplexity[0]:.2f} and {result.perplexity[1]:.2f}, unsteered "
            f"{result.unsteered_perplexity:.2f}: at most {worst:.2f} times, "
            f"allowed {PERPLEXITY_BOUND:g}",
        ),
    ]
