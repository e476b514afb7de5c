# SPDX-License-Identifier: Apache-2.0
"""What is examined: the pairs, what steering is to change and by how much, for either kind of
model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from demo import mood, prompts
from demo.corpus import contrast_prompts, openings
from demo.probe import Sentences
from vllm.pilot.metrics import Metric, Odds, Score
from vllm.pilot.pairs import Pairs

PERPLEXITY_BOUND = 1.5
"""Steered text may be this many times as surprising to the unsteered model as its own."""


@dataclass(frozen=True)
class Subject:
    """Disjoint sets of prompts, for each decision one.

    metrics: on the prompts that choose layer and scale, and on those that are reported; settings:
    of `vllm.pilot.train`.
    """

    pairs: Pairs
    metrics: tuple[Metric, Metric]
    settings: dict[str, Any]
    sweep: tuple[str, ...]
    held_out: tuple[str, ...]
    temperature: float
    answer_tokens: int
    neutral: tuple[str, ...] = ()
    """Texts that are to stay as likely as they were; none: what the model wrote itself is."""
    probed: Sentences | None = None
    """On which a probe of the pairs' texts is tested."""


def grammar_mood(prompt: str, text: str) -> float:
    """The mood the grammar reads in what the model writes after the prompt (`demo.mood`), in nats
    per mood-bearing slot; positive for cheerful."""
    # A last word that the token limit may have cut is no word of the grammar.
    whole = text if text.endswith(".") else text.rpartition(" ")[0]
    return mood.read(prompt, whole).mood


def grammar_subject(quick: bool) -> Subject:
    """The demo's own model. Unless `quick`, openings are used twice, with different seeds."""
    cheerful, gloomy = contrast_prompts(64 if quick else 128, seed=1)
    repeats = 1 if quick else 2
    sweep = tuple(opening.text() for opening in openings("sweep")) * repeats
    held_out = tuple(opening.text() for opening in openings("held-out")) * repeats
    unit = "nats per mood-bearing slot"
    return Subject(
        pairs=Pairs.of(cheerful, gloomy),
        metrics=(
            Score(grammar_mood, sweep, 40, unit=unit),
            Score(grammar_mood, held_out, 40, unit=unit),
        ),
        settings={
            "scales": (0.5, 1.0, 1.5, 2.0),
            "candidates": None,
            "guard": "written",
            "max_nats": math.log(PERPLEXITY_BOUND),
            "randoms": 4 if quick else 8,
        },
        sweep=sweep,
        held_out=held_out,
        temperature=1.0,
        answer_tokens=40,
    )


def own_subject(quick: bool) -> Subject:
    """Anyone's model of English text."""
    return Subject(
        pairs=Pairs.of(prompts.CHEERFUL, prompts.GLOOMY),
        metrics=(_endings(prompts.SWEEP), _endings(prompts.HELD_OUT)),
        settings={
            "scales": (2.0, 4.0, 6.0, 8.0),
            "candidates": 8,
            "max_nats": math.log(PERPLEXITY_BOUND),
            "randoms": 2 if quick else 8,
            "neutral": list(prompts.NEUTRAL),
        },
        sweep=prompts.SWEEP,
        held_out=prompts.HELD_OUT,
        temperature=0.0,
        answer_tokens=24,
        neutral=prompts.NEUTRAL,
        probed=(prompts.PROBED_CHEERFUL, prompts.PROBED_GLOOMY),
    )


def real_subject(quick: bool) -> Subject:
    """SmolLM2, of 30 layers: as anyone's model, with a map of its depth. The last layers are left
    out: a direction there chooses the words themselves, and says them again and again."""
    own = own_subject(quick)
    some = {"layers": range(3, 24, 3), "candidates": None, "scales": (2.0, 4.0, 6.0)}
    return replace(own, settings={**own.settings, **some})


def _endings(starts: tuple[str, ...]) -> Odds:
    """log P of cheerful continuations less log P of gloomy ones."""
    ends = list(zip(prompts.CHEERFUL_ENDINGS, prompts.GLOOMY_ENDINGS, strict=True))
    asked = [Pairs.of([good], [bad], start) for start in starts for good, bad in ends]
    pairs = Pairs([p.positive[0] for p in asked], [p.negative[0] for p in asked])
    return Odds(pairs, "nats, cheerful minus gloomy continuations")
