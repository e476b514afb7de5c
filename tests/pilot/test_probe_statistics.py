# SPDX-License-Identifier: Apache-2.0
"""Areas, rates and thresholds against scikit-learn and scipy, and their intervals by simulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm
from sklearn.metrics import roc_auc_score, roc_curve

from vllm.pilot.probes.calibration import _between
from vllm.pilot.probes.learned_heads import _POOLED
from vllm.pilot.probes.statistics import (
    allowed_hits,
    best_threshold,
    needed_for,
    rate,
    roc_area,
    roc_points,
)
from vllm.v1.probes import pools

pytestmark = pytest.mark.quick


def drawn(seed: int, positive: int = 40, negative: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose true area is P(N(1.2, 1) > N(0, 1)), and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(positive + negative) < positive
    return rng.normal(size=len(labels)) + 1.2 * labels, labels


@pytest.mark.parametrize("digits", [8, 0])
def test_the_area_is_scikit_learns(digits: int) -> None:
    """Ties too, of which rounded scores have many; other labels have another area."""
    scores, labels = drawn(0)
    scores = scores.round(digits)
    assert roc_area(scores, labels).value == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert roc_area(scores, labels).value != pytest.approx(roc_area(scores, labels[::-1]).value)
    false, true = roc_points(scores, labels)
    wanted = roc_curve(labels, scores, drop_intermediate=False)
    assert np.allclose(false, wanted[0]) and np.allclose(true, wanted[1])


def test_the_interval_of_the_area_covers() -> None:
    """95 % within what 600 draws tell; one of half the width does not."""
    true = norm.cdf(1.2 / 2**0.5)
    found = [roc_area(*drawn(seed)) for seed in range(600)]
    covered = np.mean([one.low <= true <= one.high for one in found])
    assert 0.92 <= covered <= 0.98
    halved = [abs(true - one.value) <= (one.high - one.low) / 4 for one in found]
    assert np.mean(halved) < 0.8


def test_no_pair_on_the_wrong_side() -> None:
    """Few texts prove nothing, however well they are apart."""
    scores, labels = np.arange(6.0), np.arange(6) > 2
    assert roc_area(scores, labels).low == pytest.approx(0.025 ** (1 / 3))
    assert roc_area(scores, labels)[::2] == (1.0, 1.0)
    assert roc_area(-scores, labels).value == 0.0
    scores, labels = np.arange(40.0), np.arange(40) > 19
    assert roc_area(scores, labels).low > 0.8
    # One of a class has no spread.
    assert roc_area(np.array([1.0, 0.0, 2.0]), np.array([True, False, False])).low == 0.0


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (3, 100), (7, 7), (1, 1000)])
def test_the_interval_of_a_rate_is_scipys(hits: int, count: int) -> None:
    wanted = binomtest(hits, count).proportion_ci(0.95, "exact")
    assert rate(hits, count)[1:] == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert rate(hits, count).high != pytest.approx(rate(hits, count + 1).high)


def test_the_interval_of_a_calibration_covers() -> None:
    """The true rate of a threshold that is chosen on the same scores is in the interval."""
    rng, inside, off = np.random.default_rng(1), 0, 0
    for _ in range(600):
        scores = rng.normal(size=200)
        threshold = _between(scores, allowed_hits(0.02, 200))
        above = int((scores > threshold).sum())
        assert above == 4
        true = norm.sf(threshold)
        low, high = rate(above, 200)[1:]
        inside += low <= true <= high
        off += abs(true - 0.02) > 0.002
    assert inside >= 600 * 0.93 and off > 300


def test_thresholds() -> None:
    scores = np.array([5.0, 4.0, 4.0, 3.0, 1.0])
    assert _between(scores, 1) == 4.5 and _between(scores, 3) == 3.5
    assert (scores > _between(scores, 2)).sum() == 1  # equal ones are not told apart
    assert _between(scores, 5) == 2.0 and _between(np.ones(3), 1) == 1.0
    assert allowed_hits(0.1, 30) == 3 and allowed_hits(0.01, 99) == 0
    count = needed_for(0.01)
    assert rate(allowed_hits(0.01, count), count).high <= 0.02
    assert rate(1, 100).high > 0.02
    labels = np.array([True, True, False, True, False])
    assert best_threshold(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), labels) in (1.5, 3.5)
    assert best_threshold(-np.arange(4.0), np.array([True, True, False, False])) == -1.5
    assert best_threshold(np.ones(2), np.array([True, False])) == 1.0


@pytest.mark.parametrize(
    ("pool", "outputs"),
    [
        (pools.Each(), 1),
        (pools.Mean(), 1),
        (pools.Max(), 1),
        (pools.MultiMax(), 3),
        (pools.Exponential(0.3), 1),
        (pools.Exponential(1.0), 1),
        (pools.RollingMax(4), 1),
        (pools.RollingMax(100), 1),
        (pools.Attention(), 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3, 4, 17])
def test_pools_of_torch_are_those_of_rules(pool: pools.AnyPool, outputs: int, rows: int) -> None:
    numbers = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(rows))
    wanted = pool.scores(numbers.double().numpy())
    made = _POOLED[type(pool)](numbers, pool)
    assert made.shape == (rows,) and made.numpy() == pytest.approx(wanted, abs=1e-5)
    moved = _POOLED[type(pool)](numbers + torch.linspace(1, 2, rows)[:, None], pool)
    assert moved.numpy() != pytest.approx(wanted, abs=1e-3)
