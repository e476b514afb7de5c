# SPDX-License-Identifier: Apache-2.0
"""What is examined: the prompts, the measure and the scales, for either kind of model."""

from __future__ import annotations

from dataclasses import dataclass

from demo import prompts
from demo.corpus import contrast_prompts, openings
from demo.measure import ContinuationOdds, GrammarMood, Measure


@dataclass(frozen=True)
class Subject:
    """Three disjoint sets of prompts, one for each decision.

    cheerful, gloomy: their captured rows make the direction; sweep: chooses layer and scale;
    held_out: what is reported. Scales are nine, symmetric, with 0 in the middle, in units of half
    the distance between the two contrasting means.
    """

    cheerful: tuple[str, ...]
    gloomy: tuple[str, ...]
    sweep: tuple[str, ...]
    held_out: tuple[str, ...]
    scales: tuple[float, ...]
    measure: Measure
    temperature: float
    answer_tokens: int
    random_directions: int


def grammar_subject(quick: bool) -> Subject:
    """The demo's own model. Unless `quick`, openings are used twice, with different seeds."""
    cheerful, gloomy = contrast_prompts(64 if quick else 128, seed=1)
    repeats = 1 if quick else 2
    return Subject(
        cheerful=tuple(cheerful),
        gloomy=tuple(gloomy),
        sweep=tuple(opening.text() for opening in openings("sweep")) * repeats,
        held_out=tuple(opening.text() for opening in openings("held-out")) * repeats,
        scales=tuple(i / 2 for i in range(-4, 5)),
        measure=GrammarMood(),
        temperature=1.0,
        answer_tokens=40,
        random_directions=4 if quick else 8,
    )


def own_subject(quick: bool) -> Subject:
    """Anyone's model of English text."""
    return Subject(
        cheerful=prompts.CHEERFUL,
        gloomy=prompts.GLOOMY,
        sweep=prompts.SWEEP,
        held_out=prompts.HELD_OUT,
        scales=tuple(2.0 * i for i in range(-4, 5)),
        measure=ContinuationOdds(prompts.CHEERFUL_ENDINGS, prompts.GLOOMY_ENDINGS),
        temperature=0.0,
        answer_tokens=24,
        random_directions=2 if quick else 8,
    )
