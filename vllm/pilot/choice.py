# SPDX-License-Identifier: Apache-2.0
"""The choice of a layer and a scale: a strong effect, as long as the text stays ordinary."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from vllm.pilot.bench import Bench, Steering, likelihoods, surprise, surprise_of
from vllm.pilot.fitting import Directions, Separation
from vllm.pilot.metrics import Written
from vllm.pilot.sweeps import Sweep

ENOUGH = 0.8
"""The smallest scale with this share of the strongest effect is chosen."""

Guard = Literal["kl", "written"]
"""Measure that must stay small, in nats a token: "kl" is KL(plain||steered), see `KlGuard`;
"written" is how much more the text that the steered model wrote surprises the plain model than its
own text does."""


@dataclass(frozen=True)
class Choice:
    """A layer, and a scale that is meant for both signs."""

    layer: int
    scale: float
    nats: dict[float, float]
    """Scale -> what the guard measured at that layer, nats a token."""
    plain_nats: float
    """The surprise of the guard's text to the plain model, nats a token."""
    within: bool
    """True if the guard allows it."""


LIKELIEST = 20
"""Number of tokens that a divergence is of at each place; no server need be asked to allow more."""


class KlGuard:
    """KL(plain||steered) of the next token on neutral text, in nats a token.

    Of text that the plain model wrote itself, by how much likelier it is to the plain model than to
    the steered one: an unbiased estimate. Of other text `divergence` at each place, a lower bound.

    Args:
        texts: tokens, and from which index on they count.
        own: whether the plain model wrote them, drawing at temperature 1.
    """

    def __init__(self, bench: Bench, texts: Sequence[tuple[list[int], int]], own: bool) -> None:
        self._bench, self._texts = bench, texts
        self._others = 0 if own else LIKELIEST
        self._ids = [token for ids, start in texts for token in ids[start:]]
        if not self._ids:
            raise ValueError("guard: the neutral texts have no tokens")
        [self._listed] = self._measured([None])
        self.plain = surprise_of(self._ids, self._listed) / len(self._ids)
        """The surprise of the texts to the plain model, nats a token."""

    def _measured(self, steerings: Sequence[Steering | None]) -> list[list[dict[int, float]]]:
        made = likelihoods(self._bench, self._texts, steerings, self._others)
        return [list(chain.from_iterable(of_texts)) for of_texts in made]

    def __call__(self, steerings: Sequence[Steering]) -> list[float]:
        """Measure each steering."""
        count, found = len(self._ids), []
        for listed in self._measured(steerings):
            if self._others:
                pairs = zip(self._listed, listed, strict=True)
                found.append(sum(divergence(p, q) for p, q in pairs if p) / count)
            else:
                found.append(surprise_of(self._ids, listed) / count - self.plain)
        # Where the steered model's numbers are none, nothing is small.
        return [math.inf if math.isnan(nats) else nats for nats in found]


def divergence(plain: Mapping[int, float], steered: Mapping[int, float]) -> float:
    """KL(plain||steered) in nats of the tokens that both list, all others counted as one.

    What is told apart less well diverges less, so it is a lower bound of that of all tokens.

    Args:
        plain, steered: token -> log P, of some tokens.
    """
    both = plain.keys() & steered.keys()
    p, q = (np.exp([of[token] for token in both], dtype=np.float64) for of in (plain, steered))
    # What is left for the others is a difference of rounded numbers, and may be nothing.
    p, q = (np.append(of, max(1 - of.sum(), 1e-9)) for of in (p, q))
    listed = p > 0
    with np.errstate(divide="ignore"):  # infinite, where a token has become impossible
        return float(p[listed] @ np.log(p[listed] / q[listed]))


def written_surprise(bench: Bench, answers: Sequence[Written]) -> float:
    """Nats a token of what was written, to the plain model."""
    texts = [([*a.prompt_ids, *a.token_ids], len(a.prompt_ids)) for a in answers]
    tokens = sum(len(a.token_ids) for a in answers)
    return float(surprise(bench, texts, [None]).sum()) / max(tokens, 1)


def candidate_layers(found: Directions, separation: Separation, count: int | None) -> list[int]:
    """The layers that separate best, in their order; all for None.

    The last layer is none of them while there are others: behind it is only the output matrix, and
    to shift what that reads is to choose words.
    """
    rank = sorted(range(len(found.layers)), key=lambda i: -separation.d_prime[i])
    layers = [found.layers[i] for i in rank]
    return sorted(layers[: len(layers) if count is None else count])


def choose(
    swept: Sweep,
    nats_of: Callable[[int], dict[float, float]],
    plain_nats: float,
    most: float,
    last: int,
) -> Choice:
    """Choose the layer with the strongest effect that the guard allows, then its smallest scale.

    Args:
        swept: with positive scales and their negatives.
        nats_of: layer -> what the guard measures for each scale; asked for as few as will do.
        most: the nats a token that are allowed, at both signs.
        last: the model's last layer, which is taken only if it is the only one.
    """
    strength = two_sided(swept)
    cells = [cell for cell in strength if cell[0] != last] or list(strength)
    nats: dict[int, dict[float, float]] = {}

    def worst(cell: tuple[int, float]) -> float:
        layer, scale = cell
        if layer not in nats:
            nats[layer] = nats_of(layer)
        return max(nats[layer][scale], nats[layer][-scale])

    ranked = sorted(cells, key=lambda cell: -strength[cell])
    best = next((cell for cell in ranked if worst(cell) <= most), None) or min(cells, key=worst)
    enough = [
        cell
        for cell in cells
        if cell[0] == best[0] and worst(cell) <= most and strength[cell] >= ENOUGH * strength[best]
    ]
    layer, scale = min(enough, default=best)
    return Choice(layer, scale, nats[layer], plain_nats, worst((layer, scale)) <= most)


def two_sided(swept: Sweep) -> dict[tuple[int, float], float]:
    """Half of what a scale does more than its negative, by layer and positive scale."""
    effect = swept.effect
    return {
        (layer, scale): float(effect[i, j] - effect[i, swept.scales.index(-scale)]) / 2
        for i, layer in enumerate(swept.layers)
        for j, scale in enumerate(swept.scales)
        if scale > 0
    }
