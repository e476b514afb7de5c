# SPDX-License-Identifier: Apache-2.0
"""Statistics of scores of two classes: the area under the ROC curve, rates, and their intervals.

All intervals are of 95 %, two-sided.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
_TAIL = (1 - LEVEL) / 2
_Z = NormalDist().inv_cdf(1 - _TAIL)


class Interval(NamedTuple):
    """An estimate, and the ends of its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write it to three digits."""
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def roc_area(scores: np.ndarray, labels: np.ndarray) -> Interval:
    """Return the area under the ROC curve: P(positive > negative), ties counted half.

    The interval is that of DeLong, DeLong and Clarke-Pearson (Biometrics 1988) on the scale of the
    logit (Pepe, 2003, section 5.2.4), with placements by ranks (Sun and Xu, 2014). Where no pair is
    on the wrong side, the variance is 0 and says nothing: then it ends where as many independent
    pairs as the smaller class has would all be right with probability 2.5 %.

    Args:
        scores: float64 [n].
        labels: bool [n], with both classes.
    """
    positive, negative = scores[labels], scores[~labels]
    m, n = len(positive), len(negative)
    of_all = _midranks(np.concatenate([positive, negative]))
    above = (of_all[:m] - _midranks(positive)) / n
    below = 1 - (of_all[m:] - _midranks(negative)) / m
    area = float(above.mean())
    least = _TAIL ** (1 / min(m, n))
    if area in (0.0, 1.0) or min(m, n) < 2:
        return Interval(area, least if area == 1 else 0.0, 1 - least if area == 0 else 1.0)
    spread = math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n) / (area * (1 - area))
    at = math.log(area / (1 - area))
    low, high = (1 / (1 + math.exp(-at + sign * _Z * spread)) for sign in (1, -1))
    return Interval(area, low, high)


def _midranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, float64 [n]; equal values share the mean of theirs."""
    ordered = np.sort(values)
    first, last = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    ranks: np.ndarray = (first + 1 + last) / 2
    return ranks


def need_scipy() -> None:
    """Raise ImportError, with what to do, where there is no scipy."""
    try:
        import scipy.stats  # noqa: F401
    except ImportError:
        raise ImportError("intervals need scipy: pip install 'vllm[pilot]'") from None


def rate(hits: int, count: int) -> Interval:
    """Return a share with the interval of Clopper and Pearson (Biometrika 1934).

    Of the share of scores above a threshold that stands between the k-th and the next largest of
    `count` scores it is right, too: the ends are quantiles of the two scores' own ranks.

    Raises:
        ImportError: scipy is not installed.
    """
    need_scipy()
    from scipy.stats import beta

    low = float(beta.ppf(_TAIL, hits, count - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - _TAIL, hits + 1, count - hits)) if hits < count else 1.0
    return Interval(hits / count if count else math.nan, low, high)


def allowed_hits(wanted: float, count: int) -> int:
    """Return how many of `count` may be above a threshold for a rate of `wanted` at most."""
    return math.floor(wanted * count * (1 + 1e-12))


def needed_for(wanted: float, factor: float = 2.0) -> int:
    """Return about how many negatives it takes until the interval of a rate of `wanted` ends below
    `factor` times as much."""
    count = math.ceil(1 / wanted)
    while rate(allowed_hits(wanted, count), count).high > factor * wanted:
        count = math.ceil(count * 1.05)
    return count


def roc_points(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ROC curve's corners, from (0, 0) to (1, 1): false and true positive rates."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.diff(scores[order]) != 0, True)
    true, false = np.cumsum(labels[order])[ends], np.cumsum(~labels[order])[ends]
    return np.append(0.0, false / false[-1]), np.append(0.0, true / true[-1])


def best_threshold(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the threshold with the largest difference of true and false positive rates (Youden's
    J), halfway between two scores; there are two different ones at least."""
    false, true = roc_points(scores, labels)
    values = np.unique(scores)[::-1]
    best = int(np.argmax((true - false)[1:-1])) if len(values) > 1 else 0
    return float(values[best : best + 2].mean())
