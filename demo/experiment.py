# SPDX-License-Identifier: Apache-2.0
"""The experiment: find a direction, sweep layers and scales, and test the choice on held-out
prompts. Nothing is printed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from demo.engine import Bench, Steering, Written
from demo.subject import Subject

PERPLEXITY_BOUND = 1.5
"""Steered text may be this many times as surprising to the unsteered model as its own."""

ENOUGH = 0.8
"""The smallest scale with this share of the strongest effect is chosen."""


@dataclass(frozen=True)
class Directions:
    """Per layer, from the rows at the last prompt token of the contrasting prompts.

    vectors: [layers, hidden], half the difference of the class means, so that scale 1 goes from
    between the classes to the cheerful one; middle: [layers, hidden], halfway between the means;
    separation: [layers], distance of the classes along the direction in standard deviations.
    """

    vectors: torch.Tensor
    middle: torch.Tensor
    separation: torch.Tensor
    stream: torch.Tensor
    """[layers], mean length of the rows."""

    def projection(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        """[n, hidden] -> [n]: +1 where the mean cheerful row is, -1 where the gloomy one is."""
        vector = self.vectors[layer]
        return (rows - self.middle[layer]) @ vector / vector.dot(vector)


@dataclass(frozen=True)
class Sweep:
    """effect: [layers, scales], mean change of the measure over the sweep prompts."""

    effect: torch.Tensor
    unsteered: float


@dataclass(frozen=True)
class Choice:
    """The layer, and a scale at which the text stays ordinary to the unsteered model.

    perplexity: per scale at that layer, on the sweep prompts; unsteered: that of plain text.
    """

    layer: int
    scale: float
    perplexity: tuple[float, ...]
    unsteered_perplexity: float


@dataclass(frozen=True)
class Result:
    """What the held-out prompts say; effects are mean changes of the measure in its unit."""

    effect: tuple[float, ...]
    """Per scale at the chosen layer."""
    unsteered: float
    random: tuple[float, ...]
    """Per random direction and sign at the chosen scale, as long as the chosen vector."""
    perplexity: tuple[float, float]
    """At minus and plus the chosen scale, under the unsteered model."""
    unsteered_perplexity: float
    changed_by_zero: int
    """Answers whose tokens differ between no steering and v - v through a slot."""
    answers: dict[float, list[Written]]
    """Answers per scale, at the chosen layer."""


def find_directions(bench: Bench, subject: Subject) -> Directions:
    """Captures the contrasting prompts and takes the difference of means per layer."""
    rows = bench.last_rows([*subject.cheerful, *subject.gloomy])
    cheerful, gloomy = rows[: len(subject.cheerful)], rows[len(subject.cheerful) :]
    vectors = (cheerful.mean(0) - gloomy.mean(0)) / 2
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    along = [(side * unit).sum(-1) for side in (cheerful, gloomy)]
    spread = ((along[0].var(0) + along[1].var(0)) / 2).sqrt()
    return Directions(
        vectors=vectors,
        middle=(cheerful.mean(0) + gloomy.mean(0)) / 2,
        separation=(along[0].mean(0) - along[1].mean(0)) / spread,
        stream=rows.norm(dim=-1).mean(0),
    )


def sweep_layers(
    bench: Bench, subject: Subject, directions: Directions, layers: Sequence[int]
) -> Sweep:
    """Each layer with all nine scales: one `generate` call a layer."""
    plain = subject.measure(bench, subject.sweep, [None]).values.mean()
    effects = []
    for layer in layers:
        steerings = [Steering(layer, directions.vectors[layer], s) for s in subject.scales]
        effects.append(subject.measure(bench, subject.sweep, steerings).values.mean(-1) - plain)
    return Sweep(torch.stack(effects), float(plain))


def choose(
    bench: Bench, subject: Subject, directions: Directions, sweep: Sweep, layers: Sequence[int]
) -> Choice:
    """The layer with the strongest two-sided effect, then a scale, on the sweep prompts alone.

    The last layer is not chosen: behind it is only the output matrix, and shifting its input is
    choosing words, not moods. Of the scales whose text stays within `PERPLEXITY_BOUND` at both
    signs, the smallest with `ENOUGH` of the strongest effect is taken.
    """
    half = len(subject.scales) // 2
    two_sided = (sweep.effect[:, half + 1 :] - sweep.effect[:, :half].flip(-1)) / 2
    candidates = [i for i, layer in enumerate(layers) if layer < bench.layers - 1] or [0]
    best = max(candidates, key=lambda i: float(two_sided[i].max()))
    layer, strength = layers[best], two_sided[best].tolist()
    steerings = [Steering(layer, directions.vectors[layer], s) for s in subject.scales]
    plain, *steered = bench.write(subject.sweep, [None, *steerings])
    unsteered = perplexity(bench, plain)
    found = [perplexity(bench, answers) for answers in steered]
    worst = [max(found[half + 1 + i], found[half - 1 - i]) for i in range(half)]
    allowed = [i for i in range(half) if worst[i] <= PERPLEXITY_BOUND * unsteered] or [0]
    strongest = max(strength[i] for i in allowed)
    step = next(i for i in allowed if strength[i] >= ENOUGH * strongest)
    return Choice(layer, subject.scales[half + 1 + step], tuple(found), unsteered)


def held_out(bench: Bench, subject: Subject, directions: Directions, choice: Choice) -> Result:
    """Everything that is claimed, measured on prompts no decision was made on."""
    vector = directions.vectors[choice.layer]
    steerings: list[Steering | None] = [None]
    steerings += [Steering(choice.layer, vector, s) for s in subject.scales]
    scored = subject.measure(bench, subject.held_out, steerings)
    scores = scored.values.mean(-1)
    answers = scored.answers or bench.write(subject.held_out, steerings)
    written = dict(zip(subject.scales, answers[1:], strict=True))
    pairs = zip(answers[0], written[0.0], strict=True)
    return Result(
        effect=tuple((scores[1:] - scores[0]).tolist()),
        unsteered=float(scores[0]),
        random=_random_effects(bench, subject, choice, vector, float(scores[0])),
        perplexity=(
            perplexity(bench, written[-choice.scale]),
            perplexity(bench, written[choice.scale]),
        ),
        unsteered_perplexity=perplexity(bench, answers[0]),
        changed_by_zero=sum(plain.token_ids != zero.token_ids for plain, zero in pairs),
        answers=written,
    )


def _random_effects(
    bench: Bench, subject: Subject, choice: Choice, vector: torch.Tensor, unsteered: float
) -> tuple[float, ...]:
    """The effect of random directions as long as `vector`, at plus and minus the chosen scale."""
    generator = torch.Generator().manual_seed(0)
    steerings = []
    for _ in range(subject.random_directions):
        noise = torch.randn(len(vector), generator=generator)
        direction = noise * (vector.norm() / noise.norm())
        steerings += [Steering(choice.layer, direction, sign * choice.scale) for sign in (-1, 1)]
    scores = subject.measure(bench, subject.held_out, steerings).values.mean(-1)
    return tuple((scores - unsteered).tolist())


def perplexity(bench: Bench, answers: Sequence[Written]) -> float:
    """Per token of the answers, under the unsteered model."""
    nats, tokens = bench.surprise(answers).sum(0).tolist()
    return math.exp(nats / max(tokens, 1))
