# SPDX-License-Identifier: Apache-2.0
"""The methods' formulas against scikit-learn and numpy, and what each finds in planted data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vllm.pilot.directions import (
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
from vllm.pilot.linear_probe import fit_probe

pytestmark = pytest.mark.quick

HIDDEN = 24


def planted(
    count: int = 200, length: float = 2.0, seed: int = 0, spread: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A unit direction, and pairs that differ by `length` along it, more or less by `spread`."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    unit = unit / unit.norm()
    shared = 3 * torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(2, count, HIDDEN, generator=generator, dtype=torch.float64)
    away = length + spread * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return unit, shared + noise[0] + away * unit, shared + noise[1]


def cosine(a: torch.Tensor | np.ndarray, b: torch.Tensor | np.ndarray) -> float:
    a, b = (torch.as_tensor(x).double().flatten() for x in (a, b))
    return float(a @ b / a.norm() / b.norm())


def test_mean_difference_is_half_the_difference_of_means() -> None:
    _, p, n = planted()
    assert torch.allclose(mean_difference(p, n), ((p.mean(0) - n.mean(0)) / 2).float())
    # Of other numbers of examples too, and of all layers at once.
    stacked = mean_difference(torch.stack([p, 2 * p], 1)[:150], torch.stack([n, n], 1))
    assert torch.allclose(stacked[0], mean_difference(p[:150], n))
    assert torch.allclose(stacked[1], mean_difference(2 * p[:150], n))
    assert torch.allclose(mean_difference(n, p), -mean_difference(p, n))


@pytest.mark.parametrize("count", [10, 200], ids=["wide", "long"])
def test_pca_is_scikit_learns(count: int) -> None:
    unit, p, n = planted(count, spread=1.0)
    d = (p - n).numpy()
    plain = TruncatedSVD(1, algorithm="arpack").fit(d).components_[0]
    assert abs(cosine(pca(p, n), plain)) > 1 - 1e-9
    centred = PCA(1).fit(d).components_[0]
    assert abs(cosine(pca(p, n, centred=True), centred)) > 1 - 1e-9
    # They are not each other.
    assert abs(cosine(plain, centred)) < 1 - 1e-4
    assert cosine(pca(p, n), unit) > 0.9


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("count", [9, 150], ids=["wide", "long"])
@pytest.mark.parametrize("penalty", [0.1, 1.0, 10.0])
def test_probe_is_scikit_learns(intercept: bool, count: int, penalty: float) -> None:
    _, p, n = planted(count)
    probe = fit_probe(p, n[: count - 2] + 1, penalty, intercept)
    rows = torch.cat([p, n[: count - 2] + 1]).numpy()
    sides = np.r_[np.ones(count), np.zeros(count - 2)]
    theirs = LogisticRegression(
        C=1 / penalty, fit_intercept=intercept, tol=1e-12, max_iter=100_000, solver="newton-cg"
    ).fit(rows, sides)
    assert cosine(probe.weight, theirs.coef_) > 1 - 1e-8
    assert float(probe.weight.norm()) == pytest.approx(np.linalg.norm(theirs.coef_), rel=1e-4)
    assert probe.bias == pytest.approx(float(theirs.intercept_[0]) if intercept else 0.0, abs=1e-3)
    scores = probe.scores(p.float())
    assert scores.shape == (count,)
    assert probe.accuracy(p.float(), (n + 1).float()) > 0.6


def test_logistic_of_pairs_is_the_regression_without_their_means() -> None:
    _, p, n = planted(120)
    m = (p + n) / 2
    rows = torch.cat([p - m, n - m]).numpy()
    theirs = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-12, max_iter=100_000)
    theirs.fit(rows, np.r_[np.ones(120), np.zeros(120)])
    assert cosine(logistic(p, n), theirs.coef_) > 1 - 1e-6
    assert cosine(logistic(p, n, paired=False), theirs.coef_) < 1 - 1e-4


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": mean_difference,
    "pca": pca,
    "logistic": logistic,
    "lat": lat,
    "mean-centred": lambda p, n: mean_centred(p, n, n - (p - n).mean(0)),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_what_was_planted(name: str) -> None:
    # `lat` takes pairs of any rows, so there the concept must be most of what differs.
    unit, p, n = planted(400, length=20.0 if name == "lat" else 3.0)
    found = METHODS[name](p, n)
    assert cosine(found, unit) > 0.9
    # Scale 1 goes half of the way between the classes.
    half = float((p.mean(0) - n.mean(0)) @ found.double() / found.double().norm()) / 2
    assert float(found.norm()) == pytest.approx(half, rel=1e-3)
    assert found.dtype == torch.float32
    # The other way round it points the other way.
    other = mean_centred(n, p, p + (p - n).mean(0)) if "-" in name else METHODS[name](n, p)
    assert cosine(other, found) < -0.9


def test_centring_takes_the_concept_out_and_says_so() -> None:
    unit, p, n = planted(200, length=3.0)
    assert bool(centring_removes(p, n))
    assert abs(cosine(pca(p, n, centred=True), unit)) < 0.5
    # Where pairs differ by more or less of it, it does not.
    unit, p, n = planted(200, length=0.5, spread=3.0)
    assert not bool(centring_removes(p, n))
    assert abs(cosine(pca(p, n, centred=True), unit)) > 0.95


def test_sums_of_pairs_are_the_pairs() -> None:
    """What is added a few at a time is numpy's of all at once, and its pca that of the rows."""
    _, p, n = planted(200, spread=1.0)
    p, n = (torch.stack([x, 2 * x + x.roll(1, 1)], 1).float() for x in (p, n))
    sums = PairSums(2, HIDDEN)
    for at in range(0, 200, 7):
        sums.add(p[at : at + 7], n[at : at + 7])
    assert torch.allclose(sums.means[0], p.double().mean(0), rtol=1e-12, atol=1e-12)
    for centred in (False, True):
        found, want = sums.pca(centred), pca(p, n, centred)
        assert torch.allclose(found, want, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, pca(p, n, not centred), atol=1e-2)
    assert sums.centring_removes.tolist() == centring_removes(p, n).tolist()
    _, p, n = planted(200, length=3.0)
    more = PairSums(1, HIDDEN)
    more.add(p[:, None], n[:, None])
    assert more.centring_removes.tolist() == [True] != sums.centring_removes.tolist()[:1]
    none = PairSums(1, HIDDEN)
    none.add(p[:, None], p[:, None])
    with pytest.raises(ValueError, match="do not differ at layers"):
        none.pca()


def test_lat_is_of_random_pairs_with_a_seed() -> None:
    _, p, n = planted(50)
    assert torch.equal(lat(p, n, seed=3), lat(p, n, seed=3))
    assert not torch.equal(lat(p, n, seed=3), lat(p, n, seed=4))
    both = torch.cat([p, n])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    d = both[order[:50]] - both[order[50:]]
    d = (d / d.norm(dim=-1, keepdim=True)).numpy()
    top = TruncatedSVD(1, algorithm="arpack").fit(d).components_[0]
    assert abs(cosine(lat(p, n, seed=3), top)) > 1 - 1e-9


def test_scores_are_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(1)
    p = torch.randint(0, 9, (40, 3), generator=generator).double() + 1
    n = torch.randint(0, 9, (33, 3), generator=generator).double()
    sides = np.r_[np.ones(40), np.zeros(33)]
    for layer in range(3):
        theirs = roc_auc_score(sides, torch.cat([p, n])[:, layer])
        assert float(auroc(p, n)[layer]) == pytest.approx(theirs, abs=1e-12)
    assert float(auroc(p[:, 0], n[:, 0])) == pytest.approx(float(auroc(p, n)[0]))
    spread = ((p.var(0) + n.var(0)) / 2).sqrt()
    assert torch.allclose(d_prime(p, n), (p.mean(0) - n.mean(0)) / spread)
    assert d_prime(torch.ones(3), torch.ones(3)) == 0


def test_arrays_and_half_precision_are_taken() -> None:
    _, p, n = planted(50)
    want = mean_difference(p.half(), n.half())
    assert torch.equal(mean_difference(p.half().numpy(), n.half().numpy()), want)
    assert torch.allclose(want, mean_difference(p, n), atol=1e-2)


ROWS = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: mean_difference(ROWS[:0], ROWS), "positive: there are no examples"),
        (lambda: mean_difference(ROWS, ROWS), "do not differ"),
        (lambda: mean_difference(ROWS, ROWS[:, :2]), "not of the same layers"),
        (lambda: mean_difference(ROWS[0], ROWS), "shape"),
        (lambda: mean_difference(ROWS / 0, ROWS), "row 0 is not finite"),
        (lambda: pca(ROWS, ROWS), "do not differ"),
        (lambda: pca(ROWS, ROWS[:2]), "pairs are needed"),
        (lambda: pca(ROWS[:1], ROWS[1:2], centred=True), "two pairs"),
        (lambda: logistic(ROWS, ROWS[:2]), "pairs are needed"),
        (lambda: direction("mean-centred", ROWS, ROWS + 1), "--background"),
        (lambda: direction("nothing", ROWS, ROWS + 1), "methods are mean, pca"),  # type: ignore[arg-type]
        (lambda: fit_probe(ROWS, ROWS + 1, penalty=0), "penalty"),
        (lambda: fit_probe(ROWS, ROWS[:0]), "negative"),
    ],
)
def test_what_cannot_be_done(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
    assert mean_difference(ROWS, ROWS[:2]).shape == (3,)
