# SPDX-License-Identifier: Apache-2.0
"""Linear probes: logistic regression on captured rows, by Newton's method in float64."""

from dataclasses import dataclass

import numpy as np
import torch

_STEPS = 100
"""Newton steps at most; a handful is usual."""
_ENOUGH = 1e-10
"""The gradient, relative to the first one, at which it has converged."""


@dataclass(frozen=True)
class Probe:
    """A linear probe: rows with `row @ weight + bias > 0` are called positive."""

    weight: torch.Tensor
    """float32 [hidden]. As it is what `capture`'s `project` and a gate's `probe` take."""
    bias: float

    def __repr__(self) -> str:
        """Say its size, not its numbers."""
        return f"Probe({len(self.weight)} weights, bias {self.bias:+.3g})"

    def scores(self, rows: torch.Tensor | np.ndarray) -> torch.Tensor:
        """Log-odds of rows [n, hidden], float32 [n]."""
        return torch.as_tensor(rows).float() @ self.weight + self.bias

    def accuracy(
        self, positive: torch.Tensor | np.ndarray, negative: torch.Tensor | np.ndarray
    ) -> float:
        """The share of rows, [n, hidden] of each class, on their own side."""
        right = torch.cat([self.scores(positive) > 0, self.scores(negative) <= 0])
        return float(right.float().mean())


def fit_probe(
    positive: torch.Tensor | np.ndarray,
    negative: torch.Tensor | np.ndarray,
    penalty: float = 1.0,
    intercept: bool = True,
) -> Probe:
    """Fit a logistic regression: sum of log(1 + exp(-y (x w + b))) + penalty |w|^2 / 2.

    scikit-learn's `LogisticRegression(C=1 / penalty)` has the same minimum.

    Args:
        positive, negative: rows of each class, [n, hidden] in any float dtype.
        penalty: of the weights; the intercept has none.
        intercept: whether there is one; without it the bias is 0.

    Raises:
        ValueError: a class is empty, shapes differ, the penalty is not above 0, or it did not
            converge.
    """
    p, n = (torch.as_tensor(rows).detach().cpu().double() for rows in (positive, negative))
    for rows, name in ((p, "positive"), (n, "negative")):
        if rows.ndim != 2 or not len(rows):
            raise ValueError(f"{name}: rows [n, hidden] are needed, got {list(rows.shape)}")
        if not rows.isfinite().all():
            raise ValueError(f"{name}: not all numbers are finite")
    if p.shape[1] != n.shape[1]:
        raise ValueError(f"positive has rows of {p.shape[1]}, negative of {n.shape[1]}")
    if not penalty > 0:
        raise ValueError(f"penalty: {penalty} is not above 0")
    rows = torch.cat([p, n])
    # The weights are a sum of rows: in a basis of these there may be far fewer unknowns.
    basis = None
    if len(rows) < rows.shape[1]:
        basis = torch.linalg.qr(rows.T).Q
        rows = rows @ basis
    if intercept:
        rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1)
    sides = torch.cat([torch.ones(len(p)), -torch.ones(len(n))]).double()
    cost = torch.full((rows.shape[1],), float(penalty), dtype=torch.float64)
    if intercept:
        cost[-1] = 0.0
    found = _newton(rows, sides, cost)
    bias = float(found[-1]) if intercept else 0.0
    weight = found[:-1] if intercept else found
    return Probe((weight if basis is None else basis @ weight).float(), bias)


def _newton(rows: torch.Tensor, sides: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Minimise; rows [n, k], sides +-1 [n], cost [k] of each weight. Returns [k]."""

    def loss(at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(-sides * (rows @ at)).sum() + (cost * at * at).sum() / 2

    at = torch.zeros(rows.shape[1], dtype=rows.dtype)
    first = 0.0
    for _ in range(_STEPS):
        wrong = torch.sigmoid(-sides * (rows @ at))
        gradient = cost * at - rows.T @ (sides * wrong)
        size = float(gradient.norm())
        first = first or size
        if size <= _ENOUGH * max(first, 1.0):
            return at
        curve = (rows.T * (wrong * (1 - wrong))) @ rows + torch.diag(cost)
        if not cost[-1]:
            curve[-1, -1] += 1e-12  # an intercept that is sure has no curvature left
        change = torch.linalg.solve(curve, gradient)
        before, length = loss(at), 1.0
        while length > 1e-8 and loss(at - length * change) > before:
            length /= 2
        if length <= 1e-8:  # rounding is all that is left
            return at
        at = at - length * change
    raise ValueError(f"fit_probe did not converge in {_STEPS} steps; raise the penalty")
