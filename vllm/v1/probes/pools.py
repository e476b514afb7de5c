# SPDX-License-Identifier: Apache-2.0
"""Pools of probes: the score at each row of an answer, from the numbers of the rows up to it.

z_1, z_2, ... are the numbers of the rows that count, in their order, and s_t the score at the t-th.
A pool's state takes rows in parts of any size, and gives the same bits as for all at once: it adds
up one after the other in float64. Rules keep one for each completion, where every row comes once,
whatever is chunked, preempted, drafted or taken from a cache.
"""

from abc import ABC, abstractmethod
from typing import Annotated

import msgspec
import numpy as np

MAX_WINDOW = 4096
"""The longest window of a rolling mean, in rows."""


class Pooled(ABC):
    """Running state of a pool for one completion."""

    @abstractmethod
    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Take the rows that follow, float64 [n, outputs], n >= 1; return their scores, [n]."""


class Pool(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Kind of pool, and what it is told."""

    @property
    def wants(self) -> str:
        """Words for the number of outputs that it takes, for errors; "" if any number will do."""
        return "one output"

    def takes(self, outputs: int) -> bool:
        """Tell whether a head with so many outputs fits."""
        return outputs == 1

    def state(self) -> Pooled:
        """Return a state without rows."""
        raise NotImplementedError


class Each(Pool, frozen=True, tag="each"):
    """Score of each row by itself: s_t = z_t."""

    def state(self) -> Pooled:
        """Return a state, which keeps nothing."""
        return _Each()


class _Each(Pooled):
    def add(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, 0]


class Mean(Pool, frozen=True, tag="mean"):
    """Mean of the rows so far: s_t = (z_1 + ... + z_t) / t."""

    def state(self) -> Pooled:
        """Return a sum and a count."""
        return _Mean()


class _Mean(Pooled):
    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def add(self, numbers: np.ndarray) -> np.ndarray:
        sums = np.cumsum(np.concatenate([[self._sum], numbers[:, 0]]))[1:]
        counts = np.arange(self._rows + 1, self._rows + 1 + len(sums))
        self._sum, self._rows = float(sums[-1]), int(counts[-1])
        means: np.ndarray = sums / counts
        return means


class Max(Pool, frozen=True, tag="max"):
    """Largest of the rows so far: s_t = max(z_1, ..., z_t)."""

    def state(self) -> Pooled:
        """Return the largest so far."""
        return _MultiMax()


class MultiMax(Pool, frozen=True, tag="multimax"):
    """Sum of the largest of each head: s_t = sum over outputs h of max(z_1h, ..., z_th), a hard
    maximum in the place of attention's softmax, which long contexts dilute (arXiv 2601.11516)."""

    @property
    def wants(self) -> str:
        """No number in particular."""
        return ""

    def takes(self, outputs: int) -> bool:
        """Every number of heads fits."""
        return True

    def state(self) -> Pooled:
        """Return the largest of each head so far."""
        return _MultiMax()


class _MultiMax(Pooled):
    def __init__(self) -> None:
        self._largest: np.ndarray | None = None

    def add(self, numbers: np.ndarray) -> np.ndarray:
        before = [] if self._largest is None else [self._largest]
        largest = np.maximum.accumulate(np.stack([*before, *numbers]))[len(before) :]
        self._largest = largest[-1]
        scores: np.ndarray = largest.sum(1)
        return scores


class Exponential(Pool, frozen=True, tag="exponential"):
    """Exponential moving average: s_1 = z_1, s_t = a z_t + (1 - a) s_(t-1), as in Constitutional
    Classifiers++ (arXiv 2601.04603)."""

    a: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """The share of the newest row."""

    def state(self) -> Pooled:
        """Return the average so far."""
        return _Exponential(self.a)


class _Exponential(Pooled):
    def __init__(self, a: float) -> None:
        self._a = a
        self._score: float | None = None

    def add(self, numbers: np.ndarray) -> np.ndarray:
        a, score, made = self._a, self._score, []
        for z in numbers[:, 0].tolist():
            score = z if score is None else a * z + (1 - a) * score
            made.append(score)
        self._score = score
        return np.array(made)


class RollingMax(Pool, frozen=True, tag="rolling_max"):
    """Largest mean of `window` neighbouring rows so far, and before there are so many the mean of
    all: the sliding windows of arXiv 2601.04603, the max of rolling means of arXiv 2601.11516."""

    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)]
    """Number of rows."""

    def state(self) -> Pooled:
        """Return the sums of the last window, and the largest mean."""
        return _RollingMax(self.window)


class _RollingMax(Pooled):
    def __init__(self, window: int) -> None:
        self._window, self._largest, self._rows = window, -np.inf, 0
        self._sums = np.zeros(1)
        """Sums of all rows up to each of the last `window`, and before these."""

    def add(self, numbers: np.ndarray) -> np.ndarray:
        sums = np.concatenate([self._sums, numbers[:, 0]])
        first = len(self._sums)
        np.cumsum(sums[first - 1 :], out=sums[first - 1 :])
        counts = np.arange(self._rows + 1, self._rows + 1 + len(numbers))
        ago = np.arange(first, len(sums)) - np.minimum(counts, self._window)
        means = (sums[first:] - sums[ago]) / np.minimum(counts, self._window)
        full = counts >= self._window
        largest = np.maximum.accumulate(np.concatenate([[self._largest], means[full]]))[1:]
        means[full] = largest
        if len(largest):
            self._largest = float(largest[-1])
        self._rows, self._sums = int(counts[-1]), sums[-self._window - 1 :]
        return means


class Attention(Pool, frozen=True, tag="attention"):
    """Attention probe: s_t = sum over heads h of sum_i softmax_i(q_ih) v_ih over rows i <= t. Of 2 H
    outputs the first H are q, the others v (arXiv 2601.11516)."""

    @property
    def wants(self) -> str:
        """An even number."""
        return "an even number of outputs: a query score and a value for each head"

    def takes(self, outputs: int) -> bool:
        """Half of them are query scores."""
        return outputs > 0 and outputs % 2 == 0

    def state(self) -> Pooled:
        """Return the sums of each head."""
        return _Attention()


class _Attention(Pooled):
    """Sums of e^q, and of e^q v over positive and over negative values, as logarithms: no score is
    too large, and a rise of the largest one costs nothing."""

    def __init__(self) -> None:
        self._sums: np.ndarray | None = None
        """[3, heads]."""

    def add(self, numbers: np.ndarray) -> np.ndarray:
        heads = numbers.shape[1] // 2
        q, v = numbers[:, :heads], numbers[:, heads:]
        with np.errstate(divide="ignore"):  # the logarithm of 0 is right
            terms = np.stack([q, q + np.log(np.maximum(v, 0)), q + np.log(np.maximum(-v, 0))], 1)
        if self._sums is not None:
            terms = np.concatenate([self._sums[None], terms])
        sums = np.logaddexp.accumulate(terms, axis=0)[-len(numbers) :]
        self._sums = sums[-1]
        scores: np.ndarray = (
            np.exp(sums[:, 1] - sums[:, 0]) - np.exp(sums[:, 2] - sums[:, 0])
        ).sum(1)
        return scores


AnyPool = Each | Mean | Max | MultiMax | Exponential | RollingMax | Attention
