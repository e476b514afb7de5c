# SPDX-License-Identifier: Apache-2.0
"""Pools of probes: the score at each row of an answer, from the numbers of the rows up to it.

z_1, z_2, ... are the numbers of the rows that count, in their order, and s_t the score at the t-th.
Rows may come in parts of any size, with the same bits as all at once: they are added up one after
the other in float64. Rules keep a state for each completion, where every row comes once, whatever
is chunked, preempted, drafted or taken from a cache.
"""

from math import isnan
from typing import Annotated

import msgspec
import numpy as np

MAX_WINDOW = 4096
"""The longest window of a rolling mean, in rows."""


State = np.ndarray
"""State of a pool for one completion, float64 [size]."""


class Pool(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Kind of pool, and what it is told."""

    @property
    def kind(self) -> str:
        """Name of the kind, as files and rules say it."""
        return str(self.__struct_config__.tag)

    @property
    def wants(self) -> str:
        """Words for the number of outputs that it takes, for errors."""
        return "one output"

    def takes(self, outputs: int) -> bool:
        """Tell whether a head with so many outputs fits."""
        return outputs == 1

    def numbers(self, outputs: int) -> int:
        """Return how many numbers of a row it goes through, which takes the frontend's time."""
        return outputs

    def start(self, outputs: int) -> State:
        """Return the state before the first row."""
        raise NotImplementedError

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Take the rows that follow of one completion, float64 [n, outputs], n >= 1; return its
        next state, and the scores, [n]."""
        raise NotImplementedError

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take one row of each of several completions; as `run`, bit for bit.

        Args:
            states: [completions, size].
            numbers: [completions, outputs].

        Returns:
            The next states, and the scores, [completions].
        """
        raise NotImplementedError

    def scores(self, numbers: np.ndarray) -> np.ndarray:
        """Return the scores of all rows of one completion, [n, outputs], n >= 1."""
        return self.run(self.start(numbers.shape[1]), numbers)[1]


class Each(Pool, frozen=True, tag="each"):
    """Score of each row by itself: s_t = z_t."""

    def numbers(self, outputs: int) -> int:
        """Return 0: numpy copies them all at once."""
        return 0

    def start(self, outputs: int) -> State:
        """Nothing is kept."""
        return np.empty(0)

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Return the numbers."""
        return state, numbers[:, 0]

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers."""
        return states, numbers[:, 0]


class Mean(Pool, frozen=True, tag="mean"):
    """Mean of the rows so far: s_t = (z_1 + ... + z_t) / t."""

    def start(self, outputs: int) -> State:
        """Sum and count."""
        return np.zeros(2)

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Add up."""
        sums = np.cumsum(np.concatenate([state[:1], numbers[:, 0]]))[1:]
        counts = np.arange(1, 1 + len(sums)) + state[1]
        return np.array([sums[-1], counts[-1]]), sums / counts

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add one."""
        states = states + np.concatenate([numbers, np.ones_like(numbers)], 1)
        return states, states[:, 0] / states[:, 1]


class MultiMax(Pool, frozen=True, tag="multimax"):
    """Sum of the largest of each head: s_t = sum over outputs h of max(z_1h, ..., z_th), a hard
    maximum in the place of attention's softmax, which long contexts dilute (arXiv 2601.11516)."""

    @property
    def wants(self) -> str:
        """No number in particular."""
        return "at least one output"

    def takes(self, outputs: int) -> bool:
        """Every number of heads fits."""
        return outputs > 0

    def start(self, outputs: int) -> State:
        """The largest of each head."""
        return np.full(outputs, -np.inf)

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Accumulate the largest."""
        largest = np.maximum.accumulate(np.concatenate([state[None], numbers]))[1:]
        return largest[-1], largest.sum(1)

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take the larger."""
        largest = np.maximum(states, numbers)
        return largest, largest.sum(1)


class Max(MultiMax, frozen=True, tag="max"):
    """Largest of the rows so far: s_t = max(z_1, ..., z_t)."""

    @property
    def wants(self) -> str:
        """One head."""
        return "one output"

    def takes(self, outputs: int) -> bool:
        """One head fits."""
        return outputs == 1


class Exponential(Pool, frozen=True, tag="exponential"):
    """Exponential moving average: s_1 = z_1, s_t = a z_t + (1 - a) s_(t-1), as in Constitutional
    Classifiers++ (arXiv 2601.04603)."""

    a: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """The share of the newest row."""

    def start(self, outputs: int) -> State:
        """No average yet."""
        return np.array([np.nan])

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Average one after the other."""
        a, score, made = self.a, state.item(), []
        for z in numbers[:, 0].tolist():
            score = z if isnan(score) else a * z + (1 - a) * score
            made.append(score)
        return np.array([score]), np.array(made)

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Average each with its number."""
        averages = self.a * numbers + (1 - self.a) * states
        states = np.where(np.isnan(states), numbers, averages)
        return states, states[:, 0]


class RollingMax(Pool, frozen=True, tag="rolling_max"):
    """Largest mean of `window` neighbouring rows so far, and before there are so many the mean of
    all: the sliding windows of arXiv 2601.04603, the max of rolling means of arXiv 2601.11516."""

    window: Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)]
    """Number of rows."""

    def start(self, outputs: int) -> State:
        """The largest mean, the count, and the sums of all rows up to each of the last `window` and
        the one before these, the newest last."""
        state = np.zeros(3 + self.window)
        state[0] = -np.inf
        return state

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Take the sums of windows from sums of all."""
        window, first = self.window, self.window + 1
        sums = np.concatenate([state[2:], numbers[:, 0]])
        np.cumsum(sums[first - 1 :], out=sums[first - 1 :])
        counts = np.arange(1, 1 + len(numbers)) + state[1]
        means = (sums[first:] - sums[1 : len(numbers) + 1]) / np.minimum(counts, window)
        full = counts >= window
        largest = np.maximum.accumulate(np.concatenate([state[:1], means[full]]))
        means[full] = largest[1:]
        return np.concatenate([largest[-1:], counts[-1:], sums[-first:]]), means

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move each window on by a row."""
        newest = states[:, -1] + numbers[:, 0]
        counts = states[:, 1] + 1
        means = (newest - states[:, 3]) / np.minimum(counts, self.window)
        full = counts >= self.window
        largest = np.where(full, np.maximum(states[:, 0], means), states[:, 0])
        kept = np.concatenate(
            [largest[:, None], counts[:, None], states[:, 3:], newest[:, None]], 1
        )
        return kept, np.where(full, largest, means)


class Attention(Pool, frozen=True, tag="attention"):
    """Attention probe: s_t = sum over heads h of sum_i softmax_i(q_ih) v_ih over rows i <= t. Of
    2 H outputs the first H are q, the others v (arXiv 2601.11516)."""

    @property
    def wants(self) -> str:
        """An even number."""
        return "an even number of outputs: a query score and a value for each head"

    def takes(self, outputs: int) -> bool:
        """Half of them are query scores."""
        return outputs > 0 and outputs % 2 == 0

    def start(self, outputs: int) -> State:
        """Sums of e^q, and of e^q v over positive and over negative values, of each head, as
        logarithms: no score is too large for them."""
        return np.full(3 * (outputs // 2), -np.inf)

    def run(self, state: State, numbers: np.ndarray) -> tuple[State, np.ndarray]:
        """Add up logarithms."""
        sums = np.logaddexp.accumulate(np.concatenate([state[None], _terms(numbers)]))[1:]
        return sums[-1], _attended(sums)

    def advance(self, states: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add one."""
        sums = np.logaddexp(states, _terms(numbers))
        return sums, _attended(sums)


def _terms(numbers: np.ndarray) -> np.ndarray:
    """Logarithms of what a row adds to the sums of attention, [n, 3 * heads]."""
    q, v = np.split(numbers, 2, axis=1)
    with np.errstate(divide="ignore"):  # the logarithm of 0 is right
        return np.concatenate([q, q + np.log(np.maximum(v, 0)), q + np.log(np.maximum(-v, 0))], 1)


def _attended(sums: np.ndarray) -> np.ndarray:
    """Scores, [n], of sums [n, 3 * heads]."""
    total, positive, negative = np.split(sums, 3, axis=1)
    scores: np.ndarray = (np.exp(positive - total) - np.exp(negative - total)).sum(1)
    return scores


AnyPool = Each | Mean | Max | MultiMax | Exponential | RollingMax | Attention
