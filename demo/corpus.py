# SPDX-License-Identifier: Apache-2.0
"""Synthetic English from a probabilistic grammar with a hidden mood.

A passage is about one speaker: an opening sentence, what happened, a second opening, what happened
then. Three features are drawn once and agree from the first word to the last: the speaker (name,
title, pronoun), the register the speaker belongs to (formal or plain: verbs, conjunctions,
negations) and the mood (cheerful or gloomy: adjectives, verbs, adverbs, company, endings).

The mood is more than a word list. In a predicate, "merry" is cheerful, "by no means merry" is not;
"the music began" is cheerful, "the rain began" is not. Each of these words is as frequent in either
mood; only the combination tells. And every mood-bearing slot slips to the other mood with
probability `SLIP`, so no single slot settles the matter: whoever wants to predict the next one has
to keep count. `demo.mood` reads a text with the same grammar.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, permutations

SLIP = 0.04
"""Probability that a mood-bearing slot takes the other mood."""

Slot = tuple[tuple[str, float], ...]
"""Phrases (words separated by spaces) and their probabilities, which sum to 1."""


class Mood(enum.Enum):
    CHEERFUL = "cheerful"
    GLOOMY = "gloomy"

    @property
    def other(self) -> Mood:
        return Mood.GLOOMY if self is Mood.CHEERFUL else Mood.CHEERFUL


@dataclass(frozen=True)
class Speaker:
    name: str
    pronoun: str
    formal: bool


@dataclass(frozen=True)
class Opening:
    """The first words of a passage, up to its first mood-bearing slot: any mood may follow."""

    time: str
    speaker: Speaker
    verb: str

    def words(self) -> tuple[str, ...]:
        return tuple(f"{self.time} , {self.speaker.name} {self.verb} the".split())

    def text(self) -> str:
        return render(self.words())


@dataclass(frozen=True)
class Passage:
    """One sampled passage.

    second: the opening of its third sentence; bridge: the index of the word behind it, which bears
    mood; mood_words: the indices of the words at which mood-bearing slots start.
    """

    opening: Opening
    second: Opening
    mood: Mood
    words: tuple[str, ...]
    mood_words: tuple[int, ...]
    bridge: int

    def text(self) -> str:
        return render(self.words)


SPEAKERS = (
    Speaker("Mrs Hale", "She", True),
    Speaker("Mr Stone", "He", True),
    Speaker("Lady Finch", "She", True),
    Speaker("Captain Moss", "He", True),
    Speaker("Professor Quill", "She", True),
    Speaker("Judge Barrow", "He", True),
    Speaker("Ada", "She", False),
    Speaker("Tom", "He", False),
    Speaker("Nell", "She", False),
    Speaker("Jack", "He", False),
    Speaker("little Bea", "She", False),
    Speaker("old Sam", "He", False),
)
TIMES = ("At noon", "On Sunday", "Last week", "After supper", "Before dawn", "In April")
OPENING_VERBS = {
    True: ("returned to", "arrived at", "proceeded to", "inspected"),
    False: ("went back to", "got to", "ran to", "looked at"),
}
PLACES = ("garden", "harbour", "market", "orchard", "station", "village", "kitchen", "bridge")
MATTERS = ("letter", "supper", "journey", "answer", "party", "lesson")

# Mood lists come in pairs (cheerful, gloomy).
PLACE_ADJECTIVES = (
    ("sunny", "golden", "blooming", "friendly"),
    ("misty", "ruined", "empty", "frozen"),
)
FORMAL_VERBS = (("rejoiced", "beamed", "applauded"), ("lamented", "despaired", "mourned"))
PLAIN_VERBS = (("grinned", "laughed", "cheered"), ("moaned", "sulked", "wept"))
FORMAL_REPORTS = (("announced", "promised"), ("complained", "feared"))
PLAIN_REPORTS = (("shouted", "boasted"), ("grumbled", "sighed"))
ADVERBS = (("warmly", "brightly", "gladly"), ("bitterly", "wearily", "darkly"))
GROUPS = (("friends", "cousins", "guests"), ("rivals", "strangers", "lawyers"))
PREDICATES = (("merry", "kind", "splendid", "lively"), ("dull", "cruel", "dreadful", "tired"))
WELCOME = ("music", "dancing", "sunshine", "singing")
UNWELCOME = ("rain", "storm", "quarrel", "coughing")
ENDINGS = (("hope", "song", "delight"), ("tears", "regret", "sorrow"))


def _uniform(phrases: tuple[str, ...]) -> Slot:
    return tuple((phrase, 1.0 / len(phrases)) for phrase in phrases)


def _moody(pair: tuple[tuple[str, ...], tuple[str, ...]], mood: Mood) -> Slot:
    """Phrases of the passage's mood, with `SLIP` left for the other one."""
    own, other = pair if mood is Mood.CHEERFUL else (pair[1], pair[0])
    return tuple((phrase, (1 - SLIP) / len(own)) for phrase in own) + tuple(
        (phrase, SLIP / len(other)) for phrase in other
    )


def _predicates(formal: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(cheerful, gloomy) predicates: half of each are the other mood's adjectives, negated."""
    negation = "by no means" if formal else "not at all"
    good, bad = PREDICATES
    return (
        good + tuple(f"{negation} {word}" for word in bad),
        bad + tuple(f"{negation} {word}" for word in good),
    )


def _events() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(cheerful, gloomy) events: good things begin and bad things stop, or the reverse."""
    return (
        tuple(f"{x} began" for x in WELCOME) + tuple(f"{x} stopped" for x in UNWELCOME),
        tuple(f"{x} began" for x in UNWELCOME) + tuple(f"{x} stopped" for x in WELCOME),
    )


@cache
def derivations(speaker: Speaker, mood: Mood) -> tuple[tuple[float, tuple[Slot, ...]], ...]:
    """Every slot sequence a passage can take given its features, with its probability.

    Given the features the slots are independent, so this is the whole grammar.
    """

    def fixed(phrase: str) -> Slot:
        return ((phrase, 1.0),)

    formal = speaker.formal
    opening = (
        _uniform(TIMES),
        fixed(","),
        fixed(speaker.name),
        _uniform(OPENING_VERBS[formal]),
        fixed("the"),
        _moody(PLACE_ADJECTIVES, mood),
        _uniform(PLACES),
        fixed("."),
    )
    reaction = (
        fixed(speaker.pronoun),
        _moody(FORMAL_VERBS if formal else PLAIN_VERBS, mood),
        _moody(ADVERBS, mood),
        fixed("because the" if formal else "as the"),
        _moody(GROUPS, mood),
        fixed("were"),
        _moody(_predicates(formal), mood),
        fixed("."),
    )
    report = (
        fixed(speaker.pronoun),
        _moody(FORMAL_REPORTS if formal else PLAIN_REPORTS, mood),
        fixed("that the" if formal else "the"),
        _uniform(MATTERS),
        fixed("was"),
        _moody(_predicates(formal), mood),
        fixed("."),
    )
    event = (
        fixed("Presently the" if formal else "Then the"),
        _moody(_events(), mood),
        fixed(", and"),
        fixed("all was" if formal else "it was all"),
        _moody(ENDINGS, mood),
        fixed("."),
    )
    orders = tuple(permutations((reaction, report, event), 2))
    return tuple((1 / len(orders), opening + first + opening + last) for first, last in orders)


def is_mood_slot(speaker: Speaker, slot: Slot) -> bool:
    """Tell whether a slot's distribution depends on the mood."""
    return slot not in _neutral_slots(speaker)


@cache
def _neutral_slots(speaker: Speaker) -> frozenset[Slot]:
    sets = [{slot for _, slots in derivations(speaker, mood) for slot in slots} for mood in Mood]
    return frozenset(sets[0] & sets[1])


def openings(split: str) -> tuple[Opening, ...]:
    """The openings of one split: "train", "sweep" or "held-out", disjoint and in a fixed order.

    Only "train" openings occur in the training text and among the contrasting prompts; "sweep"
    openings choose the layer and scale; "held-out" ones measure the effect.
    """
    wanted = {"train": range(0, 8), "sweep": range(8, 9), "held-out": range(9, 10)}
    if split not in wanted:
        raise ValueError(f"split must be one of {sorted(wanted)}, got {split!r}")
    everything = [
        Opening(time, speaker, verb)
        for time in TIMES
        for speaker in SPEAKERS
        for verb in OPENING_VERBS[speaker.formal]
    ]
    random.Random(0).shuffle(everything)
    return tuple(o for i, o in enumerate(everything) if i % 10 in wanted[split])


def sample(opening: Opening, mood: Mood, rng: random.Random) -> Passage:
    """A passage that starts with `opening` in `mood`."""
    speaker = opening.speaker
    choices = derivations(speaker, mood)
    slots = rng.choices([s for _, s in choices], [p for p, _ in choices])[0]
    given = (opening.time, ",", speaker.name, opening.verb, "the")
    phrases = list(given)
    for slot in slots[len(given) :]:
        options, weights = zip(*slot, strict=True)
        phrases += rng.choices(options, weights)
    starts = list(accumulate((len(p.split()) for p in phrases), initial=0))
    second = slots.index(slots[0], 1)
    return Passage(
        opening=opening,
        second=Opening(phrases[second], speaker, phrases[second + 3]),
        mood=mood,
        words=tuple(" ".join(phrases).split()),
        mood_words=tuple(starts[i] for i, s in enumerate(slots) if is_mood_slot(speaker, s)),
        bridge=starts[second + len(given)],
    )


def training_text(count: int, seed: int) -> Iterator[str]:
    """`count` passages with training openings only, both moods equally likely."""
    rng = random.Random(seed)
    choices = openings("train")
    allowed = frozenset(choices)
    while count > 0:
        passage = sample(rng.choice(choices), rng.choice(tuple(Mood)), rng)
        if passage.second in allowed:
            count -= 1
            yield passage.text()


def contrast_prompts(pairs: int, seed: int) -> tuple[list[str], list[str]]:
    """`pairs` cheerful and as many gloomy prompts.

    Each is a passage cut behind its second opening, so that all end alike and mood is what the two
    sets differ in; both members of a pair have the same openings and the same plan between them.
    """
    rng = random.Random(seed)
    choices = openings("train")
    allowed = frozenset(choices)
    prompts: dict[Mood, list[str]] = {mood: [] for mood in Mood}
    while len(prompts[Mood.GLOOMY]) < pairs:
        opening, draws = rng.choice(choices), rng.random()
        both = [sample(opening, mood, random.Random(draws)) for mood in Mood]
        if both[0].second in allowed:
            for passage in both:
                prompts[passage.mood].append(render(passage.words[: passage.bridge]))
    return prompts[Mood.CHEERFUL], prompts[Mood.GLOOMY]


def render(words: tuple[str, ...]) -> str:
    """Words as text: no space before punctuation."""
    return " ".join(words).replace(" ,", ",").replace(" .", ".")
