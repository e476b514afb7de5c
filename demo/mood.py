# SPDX-License-Identifier: Apache-2.0
"""Reads the mood of a text with the grammar that made it.

The reader runs the grammar's forward algorithm twice, once under each mood, summing over every
derivation that agrees with the words so far. What a word says about the mood is

    log P(word | words before it, cheerful) - log P(word | words before it, gloomy)      [nats]

so a word counts for what it means where it stands: "merry" after "by no means" is gloomy. A text
that leaves the grammar is read up to the offending word and not beyond.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from demo.corpus import SPEAKERS, Mood, Speaker, derivations

State = tuple[Speaker, int, int, int, str]
"""(speaker, derivation, slot, word within the phrase, phrase): where a derivation stands."""

_EVIDENCE = 0.05  # nats; a mood-bearing word carries about 3, any other exactly 0 up to rounding


@dataclass(frozen=True)
class Reading:
    """What a text says about its mood.

    words: the words after the prompt that were read; evidence: nats per word, positive for
    cheerful; grammatical: the fraction of the words after the prompt that the grammar allows.
    """

    words: tuple[str, ...]
    evidence: tuple[float, ...]
    grammatical: float

    @property
    def slots(self) -> tuple[float, ...]:
        """The evidence of the mood-bearing words alone."""
        return tuple(e for e in self.evidence if abs(e) > _EVIDENCE)

    @property
    def mood(self) -> float:
        """Mean evidence per mood-bearing slot in nats, 0 where the text has none.

        Weighted by `grammatical`, so that a text earns nothing for the part that is gibberish.
        """
        return self.grammatical * sum(self.slots) / len(self.slots) if self.slots else 0.0

    @property
    def agreement(self) -> float:
        """The fraction of mood-bearing slots on the majority's side, 1.0 where there are none."""
        cheerful = sum(e > 0 for e in self.slots)
        return max(cheerful, len(self.slots) - cheerful) / max(len(self.slots), 1)


def split_words(text: str) -> list[str]:
    """Words and punctuation marks, in order."""
    return re.findall(r"[^\s,.]+|[,.]", text)


@cache
def _starts(mood: Mood) -> dict[State, float]:
    """The derivations before the first word, with their probabilities."""
    states: dict[State, float] = {}
    for speaker in SPEAKERS:
        for number, (chance, slots) in enumerate(derivations(speaker, mood)):
            for phrase, weight in slots[0]:
                states[speaker, number, 0, 0, phrase] = chance * weight / len(SPEAKERS)
    return states


@cache
def _after(mood: Mood, state: State) -> tuple[tuple[State, float], ...]:
    """The states one word later, with their probabilities; empty at the end of the passage."""
    speaker, number, slot, word, phrase = state
    if word + 1 < len(phrase.split()):
        return (((speaker, number, slot, word + 1, phrase), 1.0),)
    slots = derivations(speaker, mood)[number][1]
    if slot + 1 == len(slots):
        return ()
    return tuple(((speaker, number, slot + 1, 0, p), weight) for p, weight in slots[slot + 1])


def _likelihoods(words: Sequence[str], mood: Mood) -> list[float]:
    """log P(words[:i + 1] | mood) for each i; -inf from where the words leave the grammar."""
    states = _starts(mood)
    found: list[float] = []
    for word in words:
        alive = {s: p for s, p in states.items() if s[4].split()[s[3]] == word}
        total = sum(alive.values())
        found.append(math.log(total) if total > 0 else -math.inf)
        following: dict[State, float] = defaultdict(float)
        for state, chance in alive.items():
            for after, weight in _after(mood, state):
                following[after] += chance * weight
        states = following
    return found


def read(prompt: str, continuation: str) -> Reading:
    """The mood of `continuation`, read as what follows `prompt`.

    Pass only whole words: a word cut off by a token limit is no word of the grammar.
    """
    before, words = split_words(prompt), split_words(continuation)
    cheerful = _likelihoods(before + words, Mood.CHEERFUL)
    gloomy = _likelihoods(before + words, Mood.GLOOMY)
    odds = [c - g if math.isfinite(c) else None for c, g in zip(cheerful, gloomy, strict=True)]
    evidence: list[float] = []
    last = odds[len(before) - 1] if before else 0.0
    for value in odds[len(before) :]:
        if value is None or last is None:
            break
        evidence.append(value - last)
        last = value
    return Reading(
        tuple(words[: len(evidence)]), tuple(evidence), len(evidence) / max(len(words), 1)
    )
