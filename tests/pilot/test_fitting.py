# SPDX-License-Identifier: Apache-2.0
"""Directions of many pairs within a bound of memory, and the choice of a layer and a scale; the
model is made up, so that there may be many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vllm.pilot import Pairs, Sweep, pca, read_rows
from vllm.pilot.bench import Fields, Reply
from vllm.pilot.choice import choose, divergence
from vllm.pilot.fitting import find_directions
from vllm.pilot.pairs import Text

pytestmark = pytest.mark.quick

HIDDEN, LAYERS = 32, 2


class MadeUp:
    """Rows are noise, by their text, which is a number; those of even ones are further along."""

    name = "made up"

    def __init__(self, hidden: int = HIDDEN) -> None:
        self.hidden = hidden
        self.layers: dict[int, tuple[str, ...]] = dict.fromkeys(range(LAYERS), ("post_block",))
        self.asked: list[int] = []
        """How many prompts each call had."""

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        return [int(str(text)), 0]

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        self.asked.append(len(prompts))
        return [self._reply(ids, each) for ids, each in zip(prompts, fields, strict=True)]

    def _reply(self, ids: Sequence[int], fields: Fields) -> Reply:
        inline = fields["capture"]["inline"]
        number = ids[0]
        rows = {}
        for layer in inline["hooks"]["post_block"]:
            generator = torch.Generator().manual_seed(LAYERS * number + layer)
            row = torch.randn(1, self.hidden, generator=generator)
            row[0, layer] += 3.0 * (number % 2 == 0) * (1 + number % 5)
            rows["post_block", layer] = row[: len(inline["positions"])]
        return Reply(tuple(ids), (0,), "", False, [], rows)


def pairs_of(count: int) -> Pairs:
    return Pairs.of([str(2 * i) for i in range(count)], [str(2 * i + 1) for i in range(count)])


def found(bench: MadeUp, count: int, method: Any = "pca", **more: Any) -> torch.Tensor:
    layers = [*range(LAYERS)]
    return find_directions(
        bench, pairs_of(count), layers, method, "last", "post_block", **more
    ).vectors


@pytest.mark.parametrize("method", ["pca", "pca-centred"])
def test_many_pairs_need_no_more_than_sums(method: str) -> None:
    """Their rows would need sixty times what is allowed; a layer at a time is the same."""
    bench, count = MadeUp(), 1500
    rows = read_rows(bench, pairs_of(count))
    want = pca(*rows, centred=method == "pca-centred")
    one = 8 * HIDDEN**2
    for lot in (1, 2):
        bench.asked.clear()
        made = found(bench, count, method, memory=(5 + lot) * one)
        assert torch.allclose(made, want, atol=1e-5), "one pass, and a pass for each layer"
        assert sum(bench.asked) == 2 * count * (LAYERS if lot == 1 else 1)
    assert not torch.allclose(made, pca(*rows, centred=method == "pca"), atol=1e-2)
    assert 2 * count * HIDDEN * 4 > 6 * one * 7
    with pytest.raises(ValueError, match="--memory: 3000 rows of one layer"):
        found(bench, count, method, memory=6 * one - 1)
    with pytest.raises(ValueError, match="--memory: 3000 rows of one layer"):
        found(bench, count, "lat", memory=7 * one)


def test_wide_rows_come_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = MadeUp()
    whole = found(bench, 300, "mean")
    assert bench.asked == [512, 88]
    bench.asked.clear()
    monkeypatch.setattr("vllm.pilot.rows.CHUNK_BYTES", 100 * 2 * LAYERS * HIDDEN * 4)
    assert torch.allclose(found(bench, 300, "mean"), whole, atol=1e-6)
    assert bench.asked == [200, 200, 200]


def test_where_there_is_no_row() -> None:
    with pytest.raises(ValueError, match=r"read: \[\] is none of the 2 tokens"):
        read_rows(MadeUp(), pairs_of(2), read=[])


LAST = 3


def swept(effects: dict[int, list[float]]) -> Sweep:
    """The effect of scales 1, 2, 4 by layer; of their negatives the opposite."""
    scales = [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0]
    rows = [[-e for e in reversed(three)] + [0.0] + three for three in effects.values()]
    values = np.array(rows)[..., None]
    return Sweep([*effects], scales, values, np.zeros(1), "nats", "post_block", {}, None)


def nats(layer: int) -> dict[float, float]:
    """Larger scales cost more, layer 1 more than others, and minus more than plus."""
    cost = 0.02 if layer == 1 else 0.01
    return {s: cost * abs(s) * (1.5 if s < 0 else 1.0) for s in (-4.0, -2.0, -1.0, 1.0, 2.0, 4.0)}


@pytest.mark.parametrize(
    "effects, most, chosen",
    [
        # The smallest scale with four fifths of the strongest effect of that layer.
        ({0: [1.0, 5.0, 6.0], 1: [1.0, 1.0, 1.0]}, 1.0, (0, 2.0, True)),
        ({0: [1.0, 4.7, 6.0], 1: [1.0, 1.0, 1.0]}, 1.0, (0, 4.0, True)),
        # Layer 1 is stronger, but what the guard allows of it is not: 0.12 nats at -4, 0.06 at -2.
        ({0: [1.0, 2.0, 6.0], 1: [1.0, 2.0, 9.0]}, 0.1, (0, 4.0, True)),
        ({0: [1.0, 2.0, 6.0], 1: [1.0, 2.0, 9.0]}, 0.12, (1, 4.0, True)),
        # The sign that costs more counts: +4 of layer 0 costs 0.04, -4 0.06.
        ({0: [1.0, 2.0, 6.0]}, 0.05, (0, 2.0, True)),
        # Where the guard allows nothing, the least costly is named, and that it is not within.
        ({0: [1.0, 2.0, 6.0], 1: [1.0, 2.0, 9.0]}, 0.001, (0, 1.0, False)),
        # The last layer only where there is no other.
        ({0: [1.0, 2.0, 3.0], LAST: [5.0, 9.0, 20.0]}, 1.0, (0, 4.0, True)),
        ({LAST: [5.0, 9.0, 20.0]}, 1.0, (LAST, 4.0, True)),
    ],
)
def test_the_choice(
    effects: dict[int, list[float]], most: float, chosen: tuple[int, float, bool]
) -> None:
    made = choose(swept(effects), nats, 2.0, most, LAST)
    assert (made.layer, made.scale, made.within) == chosen


def test_a_divergence_is_exact_or_less() -> None:
    """Of all tokens it is theirs; of the likeliest ones of each it is a bound from below."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        logits = generator.normal(size=(2, 60)) * generator.uniform(0.5, 4)
        p, q = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        exact = float(np.exp(p) @ (p - q))
        plain, steered = dict(enumerate(p)), dict(enumerate(q))
        assert divergence(plain, steered) == pytest.approx(exact, rel=1e-6)
        assert abs(divergence(steered, plain) - exact) > 1e-3
        some = (dict(sorted(of.items(), key=lambda one: -one[1])[:20]) for of in (plain, steered))
        assert 0 <= divergence(*some) < exact
        assert divergence(plain, plain) == 0
