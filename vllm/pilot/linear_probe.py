# SPDX-License-Identifier: Apache-2.0
"""Linear probes: logistic regression on captured rows, by Newton's method in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm.pilot.numbers import as_numbers
from vllm.pilot.row_checks import Rows, as_float32, need_finite, need_rows, need_width

_STEPS = 100
"""Newton steps at most; a handful is usual."""
_ENOUGH = 1e-10
"""The step, as a share of the way from zero in the metric of the curvature, that ends it."""


@dataclass(frozen=True)
class Probe:
    """A linear probe: rows with `row @ weight + bias > 0` are called positive."""

    weight: torch.Tensor
    """float32 [hidden]. As it is what `capture`'s `project` and a gate's `probe` take."""
    bias: float

    def __repr__(self) -> str:
        """Say its size, not its numbers."""
        return f"Probe({len(self.weight)} weights, bias {self.bias:+.3g})"

    def scores(self, rows: Rows) -> torch.Tensor:
        """Log-odds of rows [n, hidden], float32 [n].

        Raises:
            ValueError: a row is not finite; the message has its number.
        """
        wide = need_finite(as_numbers(rows, "rows"), "rows")
        return (wide @ self.weight.double() + self.bias).float()

    def accuracy(self, positive: Rows, negative: Rows) -> float:
        """The share of rows, [n, hidden] of each class, on their own side."""
        right = torch.cat([self.scores(positive) > 0, self.scores(negative) <= 0])
        return float(right.float().mean())


def fit_probe(
    positive: Rows,
    negative: Rows,
    penalty: float = 1.0,
    intercept: bool = True,
) -> Probe:
    """Fit a logistic regression: sum of log(1 + exp(-y (x w + b))) + penalty |w|^2 / 2.

    scikit-learn's `LogisticRegression(C=1 / penalty)` has the same minimum. Rows that are c times
    as large have, with c^2 times the penalty, weights that are divided by c.

    Args:
        positive, negative: rows of each class, [n, hidden] in any float dtype.
        penalty: of the weights; the intercept has none.
        intercept: whether there is one; without it the bias is 0.

    Raises:
        ValueError: a class is empty, shapes differ, a row is not finite, nothing tells the classes
            apart, the penalty is not above 0, or it did not converge.
    """
    return next(fit_probes(positive, negative, [penalty], intercept))


def fit_probes(
    positive: Rows, negative: Rows, penalties: Sequence[float], intercept: bool = True
) -> Iterator[Probe]:
    """Fit a probe for each of several penalties, as `fit_probe` does and raises; the rows are taken
    apart once."""
    for weight, bias in fits(positive, negative, penalties, intercept):
        if not weight.any():
            raise ValueError(
                "fit_probe: nothing tells positive from negative, no weight is above 0"
            )
        yield Probe(as_float32(weight, "fit_probe"), bias)


def fit(
    positive: Rows, negative: Rows, penalty: float, intercept: bool
) -> tuple[torch.Tensor, float]:
    """Find the weights, float64 [hidden], and the bias, as `fit_probe` does and raises."""
    return next(fits(positive, negative, [penalty], intercept))


def fits(
    positive: Rows, negative: Rows, penalties: Sequence[float], intercept: bool
) -> Iterator[tuple[torch.Tensor, float]]:
    """Find weights and bias for each of several penalties, as `fit` does."""
    p, n = need_rows(positive, "positive"), need_rows(negative, "negative")
    for rows, name in ((p, "positive"), (n, "negative")):
        if rows.ndim != 2:
            raise ValueError(f"{name}: rows [n, hidden] are needed, got {list(rows.shape)}")
    need_width(p, n)
    for penalty in penalties:
        if not penalty > 0:
            raise ValueError(f"penalty: {penalty} is not above 0")
    rows = torch.cat([p, n])
    first = rows[0].clone() if intercept else torch.zeros_like(rows[0])
    away = rows - first  # exactly 0 where all rows have one number
    middle = away.mean(0) if intercept else first
    # Unknowns of one size, however large the rows are and each of their channels: the weights are a
    # sum of rows, so of singular vectors, and of these each has its own penalty.
    unknowns, sizes, basis = torch.linalg.svd(away - middle, full_matrices=False)
    kept = sizes > sizes[0] * max(rows.shape) * torch.finfo(rows.dtype).eps
    if not kept.any():
        raise ValueError("positive and negative do not differ: all rows are the same")
    unknowns, sizes, basis = unknowns[:, kept], sizes[kept], basis[kept]
    if intercept:
        unknowns = torch.cat([unknowns, torch.ones_like(unknowns[:, :1])], 1)
    sides = torch.cat([torch.ones(len(p)), -torch.ones(len(n))]).double()
    for penalty in penalties:
        cost = (penalty**0.5 / sizes).square()
        if intercept:
            cost = torch.cat([cost, torch.zeros_like(cost[:1])])
        found = _newton(unknowns, sides, cost)
        weight = (found[: len(sizes)] / sizes) @ basis
        # Of the weights as they are given: what a large channel of all rows rounds off is taken
        # back.
        bias = float(found[-1] - weight.float().double() @ (first + middle)) if intercept else 0.0
        yield weight, bias


def _newton(rows: torch.Tensor, sides: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Minimise; rows [n, k], sides +-1 [n], cost [k] of each unknown. Returns [k]."""
    at, eps = torch.zeros(rows.shape[1], dtype=rows.dtype), torch.finfo(rows.dtype).eps
    for _ in range(_STEPS):
        margin = sides * (rows @ at)
        wrong, right = torch.sigmoid(-margin), torch.sigmoid(margin)
        gradient = cost * at - rows.T @ (sides * wrong)
        if (gradient.abs() <= 8 * eps * (rows.abs().T @ wrong + (cost * at).abs())).all():
            return at  # rounding is all that is left
        curve = (rows.T * (wrong * right)) @ rows + torch.diag(cost)
        size = curve.diagonal().sqrt()
        change = torch.linalg.solve(curve / size / size[:, None], gradient / size) / size
        gain = float(gradient @ change)
        if gain <= _ENOUGH**2 * float(at @ curve @ at):
            return at
        length = 1.0
        while (
            _rise(margin, wrong, right, sides * (rows @ change), length)
            + float((cost * change) @ change) * length**2 / 2
            > length * gain
        ):
            length /= 2
        at = at - length * change
    raise ValueError(f"fit_probe did not converge in {_STEPS} steps; raise the penalty")


def _rise(
    margin: torch.Tensor,
    wrong: torch.Tensor,
    right: torch.Tensor,
    falls: torch.Tensor,
    length: float,
) -> float:
    """Rise of the loss above its tangent by a step; of small ones without the difference."""
    fall = length * falls
    log = torch.nn.functional.logsigmoid
    exact = log(margin) - log(margin - fall) - wrong * fall
    return float(torch.where(fall.abs() < 1e-3, wrong * right * fall * fall / 2, exact).sum())
