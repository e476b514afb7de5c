# SPDX-License-Identifier: Apache-2.0
"""What `vllm/pilot` makes of rows, brought back to rows of size 1.

`tests/pilot/test_sizes.py` tries each over sizes. A new method needs a line here, or its name and a
reason in `ABSENT`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch

from vllm.pilot import Pairs, Sweep
from vllm.pilot.bench import Fields, Reply
from vllm.pilot.choice import Choice, choose, two_sided
from vllm.pilot.directions import (
    Method,
    PairSums,
    auroc,
    centring_removes,
    d_prime,
    direction,
    lat,
    logistic,
    mean_centred,
    mean_difference,
    pca,
)
from vllm.pilot.evidence import random_directions, separation_evidence
from vllm.pilot.fitting import (
    Directions,
    find_directions,
    scores_of,
    separate,
    separation_of,
)
from vllm.pilot.linear_probe import fit, fit_probe, fit_probes, fits
from vllm.pilot.pairs import Text
from vllm.pilot.picture import heat_map, place_map, subplots
from vllm.pilot.reranker import rank
from vllm.pilot.row_checks import need_finite, need_rows
from vllm.pilot.rows import read_rows, reduce_rows, rows_of
from vllm.pilot.tracker import HeadScores, important_heads

COUNT, HIDDEN = 40, 12
SIZES = 2.0**-40, 2.0**-20, 2.0**20, 2.0**40
"""About 1e-12 to 1e12; powers of two change no digit in any dtype."""
BAD = 3
"""The number of a row that is not finite."""

Rows = torch.Tensor
Call = Callable[[Rows, Rows, float], Any]
"""Numbers made of positive and negative rows [n, hidden] of a size, brought back to size 1."""


class Given:
    """A model whose rows are given: texts are numbers, positive ones even."""

    name = "given"

    def __init__(self, positive: Rows, negative: Rows) -> None:
        self.hidden = positive.shape[1]
        self.layers: dict[int, tuple[str, ...]] = {0: ("post_block",)}
        self.rows = positive, negative

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        return [int(str(text)), 0]

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        def reply(number: int) -> Reply:
            row = self.rows[number % 2][number // 2].float()
            return Reply((number, 0), (0,), "", False, [], {("post_block", 0): row[None]})

        return [reply(ids[0]) for ids in prompts]

    @property
    def pairs(self) -> Pairs:
        ours, others = ([str(2 * i + side) for i in range(len(self.rows[side]))] for side in (0, 1))
        return Pairs.of(ours, others)


AT: dict[str, Any] = {"read": "last", "point": "post_block"}


def found_by(method: Method, p: Rows, n: Rows, memory: int = 4 << 30) -> Directions:
    bench = Given(p, n)
    return find_directions(bench, bench.pairs, [0], method, **AT, memory=memory)


def given_direction(p: Rows, n: Rows) -> Directions:
    vector = ((p.double().mean(0) - n.double().mean(0)) / 2).float()
    middle = ((p.double().mean(0) + n.double().mean(0)) / 2).float()
    return Directions([0], vector[None], middle[None], [])


def in_sums(p: Rows, n: Rows) -> PairSums:
    sums = PairSums(1, p.shape[1])
    for at in range(0, len(p), 7):
        sums.add(p[at : at + 7, None], n[at : at + 7, None])
    return sums


def separated(p: Rows, n: Rows, size: float) -> list[Any]:
    bench = Given(p, n)
    made, (ours, others) = separate(bench, bench.pairs, given_direction(p, n), **AT)
    lengths = [np.array(made.stream) / size, ours / size, others / size]
    return [made.auroc, made.d_prime, made.share, lengths]


def evident(p: Rows, n: Rows, size: float) -> list[Any]:
    bench = Given(p, n)
    choice = Choice(0, 1.0, {}, 0.0, True)
    made = separation_evidence(
        bench, bench.pairs, given_direction(p, n), choice, **AT, randoms=4, seed=0
    )
    return [made.strength, made.randoms, made.auroc, made.above_random]


def projected(p: Rows, n: Rows, size: float) -> list[Any]:
    directions = given_direction(p, n)
    return [directions.projection(rows.float(), 0) for rows in (p, n)]


def probed(p: Rows, n: Rows, size: float) -> list[Any]:
    probe = fit_probe(p, n, size**2)
    return [probe.scores(p), probe.scores(n), probe.accuracy(p, n)]


def swept(p: Rows, n: Rows) -> Sweep:
    """Effects of the size of rows: a score may have any unit."""
    effect = (p.double() - n.double()).sum(-1)[:4]
    values = torch.stack([-2 * effect, -effect, effect, 2 * effect]).T
    scales = [-2.0, -1.0, 1.0, 2.0]
    made = values.numpy()[..., None]
    return Sweep([*range(4)], scales, made, np.zeros(1), "", "post_block", {}, None)


def chosen(p: Rows, n: Rows, size: float) -> list[Any]:
    cheap = dict.fromkeys((-2.0, -1.0, 1.0, 2.0), 0.0)
    made = choose(swept(p, n), lambda _: cheap, 0.0, 0.1, last=9)
    return [made.layer, made.scale]


def scores(rows: Rows) -> list[HeadScores]:
    heads = [(0, i) for i in range(rows.shape[1])]
    return [HeadScores(heads, row.double().numpy()) for row in rows]


def coloured(draw: Callable[[Any, np.ndarray], None]) -> Call:
    """What the ends of a colour map are."""

    def call(p: Rows, n: Rows, size: float) -> list[Any]:
        from matplotlib import pyplot as plt

        figure, (axes,) = subplots(1)
        draw(axes, p[:4, :4].double().numpy())
        ends = axes.images[0].get_clim()
        plt.close(figure)
        return [np.array(ends) / size]

    return call


def ranked(p: Rows, n: Rows, size: float) -> list[Any]:
    made = rank(list(p.double().numpy()), list(n.double().numpy()))
    return [made.scores / size, made.order]


DIRECTIONS: dict[str, Call] = {
    "directions.mean_difference": lambda p, n, c: mean_difference(p, n).double() / c,
    "directions.pca": lambda p, n, c: pca(p, n).double() / c,
    "directions.pca, centred": lambda p, n, c: pca(p, n, centred=True).double() / c,
    "directions.lat": lambda p, n, c: lat(p, n).double() / c,
    "directions.mean_centred": lambda p, n, c: (
        mean_centred(p, n, torch.cat([n, p[:5]])).double() / c
    ),
    "directions.logistic": lambda p, n, c: logistic(p, n, penalty=c**2).double() / c,
    "directions.logistic, unpaired": lambda p, n, c: (
        logistic(p, n, paired=False, penalty=c**2).double() / c
    ),
    "directions.PairSums": lambda p, n, c: in_sums(p, n).pca().double() / c,
    "directions.PairSums, centred": lambda p, n, c: in_sums(p, n).pca(True).double() / c,
    "fitting.find_directions": lambda p, n, c: found_by("mean", p, n).vectors.double() / c,
    "fitting.find_directions, sums": lambda p, n, c: (
        found_by("pca", p, n).vectors.double() / c
    ),
    "fitting.find_directions, lat": lambda p, n, c: found_by("lat", p, n).vectors.double() / c,
} | {
    f"directions.direction, {name}": lambda p, n, c, name=name: (
        direction(name, p, n, torch.cat([n, p[:5]])).double() / c
    )
    for name in get_args(Method)
    if name != "logistic"
}  # fmt: skip
"""What is as long as rows are."""

NUMBERS: dict[str, Call] = {
    "directions.centring_removes": lambda p, n, c: centring_removes(p, n),
    "directions.PairSums.centring_removes": lambda p, n, c: in_sums(p, n).centring_removes,
    "directions.auroc": lambda p, n, c: auroc(p, n),
    "directions.d_prime": lambda p, n, c: d_prime(p, n),
    "linear_probe.fit": lambda p, n, c: fit(p, n, c**2, intercept=True)[0] * c,
    "linear_probe.fit_probe": lambda p, n, c: fit_probe(p, n, c**2).weight.double() * c,
    "linear_probe.fit_probes": lambda p, n, c: [
        probe.weight.double() * c for probe in fit_probes(p, n, [c**2, 9 * c**2])
    ],
    "linear_probe.fits": lambda p, n, c: [
        weight * c for weight, _ in fits(p, n, [c**2, 9 * c**2], intercept=True)
    ],
    "linear_probe.fit_probe, without": lambda p, n, c: (
        fit_probe(p, n, c**2, intercept=False).weight.double() * c
    ),
    "linear_probe.Probe": probed,
    "fitting.Directions": projected,
    "fitting.separate": separated,
    "fitting.separation_of": lambda p, n, c: (
        separation_of(p.double(), n.double(), [1.0], True).d_prime
    ),
    "fitting.scores_of": lambda p, n, c: [
        x / c for x in scores_of(Given(p, n), Given(p, n).pairs, [0], p[:1], **AT)[:2]
    ],
    "evidence.separation_evidence": evident,
    "evidence.random_directions": lambda p, n, c: random_directions(p[0], 3, 0).double() / c,
    "rows.read_rows": lambda p, n, c: torch.stack(read_rows(Given(p, n), Given(p, n).pairs)) / c,
    "rows.rows_of": lambda p, n, c: (
        rows_of(Given(p, n), list(map(str, range(0, 2 * len(p), 2)))) / c
    ),
    "rows.reduce_rows": lambda p, n, c: reduce_rows(p, "norm").double() / c,
    "rows.reduce_rows, mean": lambda p, n, c: reduce_rows(p.float(), "mean").double() / c,
    "row_checks.need_rows": lambda p, n, c: need_rows(p, "positive") / c,
    "row_checks.need_finite": lambda p, n, c: need_finite(p.double(), "positive") / c,
    "choice.two_sided": lambda p, n, c: np.array([*two_sided(swept(p, n)).values()]) / c,
    "choice.choose": chosen,
    "sweeps.Sweep": lambda p, n, c: swept(p, n).effect / c,
    "reranker.rank": ranked,
    "tracker.important_heads": lambda p, n, c: important_heads(scores(p), scores(n), k=0.1),
    "tracker.HeadScores": lambda p, n, c: [s.score / c for s in scores(p)],
    "picture.heat_map": coloured(
        lambda axes, x: heat_map(axes, x, range(4), [1.0, 2.0, 3.0, 4.0], "", "post_block")
    ),
    "picture.place_map": coloured(lambda axes, x: place_map(axes, x, range(4), "abcd", "", "")),
}
"""All else that is made of rows, or of numbers in a unit of the user's."""

NOT_ROWS = (
    "choice.choose", "choice.two_sided", "sweeps.Sweep", "tracker.", "picture.",
    "evidence.random_directions",
)  # fmt: skip
"""Of these no number is a row's."""

CASES = {**DIRECTIONS, **NUMBERS}
OF_ROWS = {name: call for name, call in CASES.items() if not name.startswith(NOT_ROWS)}

ABSENT = {
    "attention": "weights of a query sum to 1; what is not finite is below",
    "bench": "asks models, and adds nats",
    "captures": "rows as they are; its direction is mean_difference's",
    "checkpoints": "files",
    "comparing": "grades of the user's judge",
    "choice.Choice": "numbers of others",
    "choice.KlGuard": "nats",
    "choice.candidate_layers": "ranks by d'",
    "choice.divergence": "probabilities sum to 1",
    "choice.written_surprise": "nats",
    "evidence.Evidence": "numbers of others",
    "evidence.effect_evidence": "the metric's unit is in and out; it compares only with itself",
    "features": "an autoencoder's biases and thresholds are of the size of its rows",
    "fitting.Separation": "numbers of others",
    "head_sweeps": "nats; tests/programs/test_cookbook.py",
    "linking": "weights of a query sum to 1, what is added is the paper's; tried below",
    "metrics": "nats, or the unit of the user's function",
    "numbers": "numbers as they are, in float64",
    "pairs": "texts",
    "patching": "nats; tests/http/test_sweep_plan.py",
    "persona": "texts",
    "picture.curve": "axes scale themselves",
    "picture.head_map": "attention, from 0 to 1",
    "picture.histogram": "ranges of the scores' own size",
    "picture.named_bars": "axes scale themselves",
    "picture.roc_curve": "rates",
    "picture.subplots": "no numbers",
    "records": "lines",
    "report": "numbers of others",
    "reranker.Ranking": "numbers of others",
    "reranker.received": "weights of a query sum to 1",
    "reranker.rerank": "as rank, of weights",
    "reranker.rerank_capture": "no numbers",
    "row_checks.as_float32": "below",
    "row_checks.need_differ": "bools",
    "row_checks.need_width": "shapes",
    "rows.Encoded": "tokens",
    "rows.encode": "tokens",
    "rows.need_layers": "numbers of layers",
    "rows.need_read": "no numbers",
    "rows.read_encoded": "through read_rows",
    "rows.row_chunks": "through read_rows",
    "sweeps.sweep": "the metric's unit",
    "tracker.attention_tracker": "weights of a query sum to 1, what is added is the paper's",
    "tracker.tracker_capture": "no numbers",
    "training": "its steps are here",
}  # fmt: skip
"""Name of a function, or of a module with all it has -> why no size of rows reaches it."""
