# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a row, h + strength B (A h + c), as terms that act at once, and back.

LoReFT, R^T (W h + b - R h), is A = W - R, B = R^T, c = b (Wu et al. 2024, arXiv:2404.03592).
`vllm.v1.steering_formula` says what the numbers of a term do: the sign is in A and c, so that the
strength of an operation is that of its terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.v1.interventions.given import Given
from vllm.v1.interventions.terms import Term
from vllm.v1.interventions.values import Array
from vllm.v1.steering_formula import Scalars


@dataclass(frozen=True)
class LowRank:
    """Matrices of the operation, float32, as a user gives them."""

    A: np.ndarray
    """[r, hidden]"""
    B: np.ndarray
    """[hidden, r]"""
    c: np.ndarray
    """[r]"""

    def numbers(self, i: int, scalars: Scalars) -> Scalars:
        """Numbers of term `i`; `scalars` are those that all terms have."""
        # A difference, so that there is one zero.
        return scalars._replace(
            bias=float(0.0 - self.c[i]),
            opens=float(i == 0),
            closes=float(i == len(self.c) - 1),
        )


def num_rows(given: Given) -> int:
    """Return the rank that a matrix A [r, hidden] says to have, before anything of it is read; 0 if
    it is no matrix."""
    value = given.value
    if isinstance(value, Array):
        return int(value.shape[0]) if value.ndim else 0
    return len(value) if isinstance(value, list | tuple) else 0


def read_low_rank(a: Given, b: Given, c: Given, width: int, most: int) -> LowRank:
    """Read A [r, width], B [width, r] and c [r], which may be None.

    Args:
        most: the highest rank.

    Raises:
        ValueError: the rank is 0 or too high; a matrix has another shape or a number that is not
            finite; the message names the matrix.
    """
    rank = num_rows(a)
    if not 1 <= rank <= most:
        if isinstance(a.value, Array | list | tuple):
            a.refuse(
                f"has {rank} rows, allowed are 1-{most}: each counts as one of max_steering_ops"
            )
        a.array()
    shift = np.zeros(rank) if c.value is None else c.vector(rank)
    with np.errstate(over="ignore"):  # looked at by who packs them
        made = (_matrix(a, rank, width), _matrix(b, width, rank), shift)
        return LowRank(*(part.astype(np.float32) for part in made))


def low_rank_of(terms: Sequence[Term]) -> LowRank:
    """Return what the terms of a low-rank operation were made of."""
    columns = [np.frombuffer(term.vector, np.float32) for term in terms]
    rows = [np.frombuffer(term.encoder, np.float32) for term in terms]
    shift = np.array([0.0 - term.scalars.bias for term in terms], np.float32)
    return LowRank(-np.stack(rows), np.stack(columns, axis=1), shift)


def _matrix(given: Given, rows: int, columns: int) -> np.ndarray:
    """Finite numbers, float64 [rows, columns], from a list of lists or a 2-D array of floats."""
    value, needed = given.value, f"the model needs [{rows}, {columns}]"
    if isinstance(value, list | tuple):
        if len(value) != rows:
            given.refuse(f"has shape [{len(value)}, ...], {needed}")
        return np.stack(
            [Given(row, f"{given.path}[{i}]").vector(columns) for i, row in enumerate(value)]
        )
    shape = list(given.array().shape)
    if shape != [rows, columns]:
        turned = " (transpose it)" if shape == [columns, rows] else ""
        given.refuse(f"has shape {shape}{turned}, {needed}")
    flat = given.floats().reshape(-1)
    return Given(flat, given.path).vector(rows * columns).reshape(rows, columns)
