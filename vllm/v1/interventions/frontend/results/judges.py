# SPDX-License-Identifier: Apache-2.0
"""Scores of rows by rules, and where rules fire.

Completions that are judged alike share a `Panel`, which scores the rows of a step for all of them
at once. What is left for each completion is to keep its scores, and its pools.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from vllm.v1.capture.rules import RuleResult
from vllm.v1.interventions.plan import CapturePlan, Rule
from vllm.v1.interventions.positions import Positions
from vllm.v1.probes.heads import Linear
from vllm.v1.probes.pools import Each


class Judged(NamedTuple):
    """Rows of a step as a panel sees them."""

    scores: np.ndarray
    """float64 [n, rules]; NaN of rules that pool."""
    crossed: np.ndarray
    """bool [n, rules]: which cross the threshold of a rule."""
    crosses: list[bool]
    """True for each row that crosses the threshold of any rule."""
    numbers: dict[int, np.ndarray]
    """Number of a rule that pools -> its head's numbers, [n, outputs]."""


class Panel:
    """Rules that read the same rows of a stream.

    Args:
        rules: at least one; their names and positions do not matter here.
        sites: the indices of their sites among those of the stream; None for all.
    """

    def __init__(self, rules: list[Rule], sites: tuple[int, ...] | None) -> None:
        self.stream, self.sites, self._join = rules[0].stream, sites, rules[0].head.joined
        self._size = len(rules)
        self.signs = np.where([rule.below for rule in rules], -1.0, 1.0)
        self.limits = self.signs * [rule.threshold for rule in rules]
        # Most rules: all of them are one addition.
        shifts = {
            i: rule.head.bias[0]
            for i, rule in enumerate(rules)
            if isinstance(rule.head, Linear) and isinstance(rule.pool, Each)
        }
        self._plain, self._shifts = [*shifts], np.array([*shifts.values()])
        self._columns = [rules[i].column for i in shifts]
        self.heads = {
            i: (rule.head, slice(rule.column, rule.column + rule.head.units))
            for i, rule in enumerate(rules)
            if i not in shifts
        }
        """Number of a rule that pools -> its head, and its columns among the products."""
        self.pools = {i: rules[i].pool for i in self.heads}

    def joined(self, products: np.ndarray) -> np.ndarray:
        """Return the products of all its sites joined, [n, columns], of those of a stream, float64
        [n, sites, columns]."""
        with np.errstate(invalid="ignore"):  # a row that is not finite has no score
            return self._join(products if self.sites is None else products[:, self.sites])

    def judge(self, products: np.ndarray) -> Judged:
        """Score rows, of products as `joined` returns them."""
        scores = np.full((len(products), self._size), np.nan)
        scores[:, self._plain] = products[:, self._columns] + self._shifts
        crossed = scores * self.signs > self.limits
        with np.errstate(all="ignore"):
            numbers = {i: head.numbers(products[:, at]) for i, (head, at) in self.heads.items()}
        return Judged(scores, crossed, crossed.any(1).tolist(), numbers)


def panel_key(rules: list[Rule], sites: tuple[int, ...] | None) -> object:
    """Return what is equal for rules that make equal panels."""
    parts = ((r.column, r.head, r.pool, r.below, r.threshold) for r in rules)
    return rules[0].stream, sites, tuple(parts)


def among(rule: Rule, plan: CapturePlan) -> tuple[int, ...] | None:
    """Return the indices of a rule's sites among those of its stream; None for all of them."""
    sites = plan.streams[rule.stream].sites
    found = tuple(sites.index(site) for site in rule.sites)
    return None if found == tuple(range(len(sites))) else found


class Alone:
    """Rows of a step that come alone, as decoding has it, of completions that share a panel."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self._waiting: dict[Judges, tuple[int, int]] = {}
        """Position and row of completions whose pools are still to take them."""

    def add(self, judges: "Judges", position: int, row: int) -> None:
        """Take a row of a completion: row `row` of the step."""
        if position not in judges.wanted:
            return
        judged = self.judged
        if not judges.states:
            crossed = judged.crossed[row : row + 1] if judged.crosses[row] else None
            judges.keep(position, judged.scores[row], crossed)
            return
        if judges in self._waiting:
            self.pool()
        self._waiting[judges] = position, row

    def pool(self) -> None:
        """Advance the pools of all completions by their rows."""
        if not self._waiting:
            return
        waiting, rows = list(self._waiting), [row for _, row in self._waiting.values()]
        panel, scores = waiting[0].panel, self.judged.scores[rows]
        for i, pool in panel.pools.items():
            numbers = self.judged.numbers[i][rows]
            finite = np.isfinite(numbers).all(1)
            before = np.stack([judges.states[i] for judges in waiting])
            states, made = pool.advance(before, np.where(finite[:, None], numbers, 0.0))
            scores[:, i] = np.where(finite, made, np.nan)
            for judges, state in zip(
                waiting, np.where(finite[:, None], states, before), strict=True
            ):
                judges.states[i] = state
        crossed = scores * panel.signs > panel.limits
        crosses = crossed.any(1).tolist()
        for k, (judges, (position, _)) in enumerate(self._waiting.items()):
            judges.keep(position, scores[k], crossed[k : k + 1] if crosses[k] else None)
        self._waiting = {}


class _Crossings:
    """Rows at which one rule fired."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._crossed = np.empty(0, np.int64)
        """The last rows that crossed, `need - 1` of them, counted from the first row."""
        self.fired: list[int] = []
        """The positions at which it fired."""

    def add(self, rows: np.ndarray, at: np.ndarray) -> None:
        """Take the numbers of rows that crossed, and the position of each row so far."""
        need = self._rule.need
        crossed = np.concatenate([self._crossed, rows])
        last = crossed[need - 1 :]
        fires = last[last - crossed[: len(last)] < self._rule.of]
        self.fired += at[fires].tolist()
        self._crossed = crossed[max(len(crossed) - need + 1, 0) :]

    def since(self, position: int) -> list[int]:
        """Return the positions from one on at which it fired."""
        return self.fired[bisect_left(self.fired, position) :]


class Judges:
    """The rules of one completion that read the same rows of a stream at the same positions."""

    def __init__(self, rules: list[Rule], panel: Panel) -> None:
        self.rules, self.panel = rules, panel
        self.wanted = Positions.from_flat(rules[0].runs)
        self.states = {i: pool.start(rules[i].head.outputs) for i, pool in panel.pools.items()}
        """States of rules that pool, by number."""
        self.crossings = [_Crossings(rule) for rule in rules]
        self._rows = 0
        self._at, self._scores = np.empty(8, np.int64), np.empty((8, len(rules)))

    def keep(self, position: int, scores: np.ndarray, crossed: np.ndarray | None) -> None:
        """Take the scores of a wanted row, [rules], and which cross, [1, rules]; None for none."""
        at = self._room(1)
        self._at[at], self._scores[at] = position, scores
        if crossed is not None:
            self._cross(crossed, at)

    def add(self, positions: np.ndarray, judged: Judged, rows: slice) -> None:
        """Take rows, after all earlier ones.

        Args:
            positions: int64 [n].
            judged: rows of some completions.
            rows: which of them are this one's, n.
        """
        keep = self.wanted.mask(positions)
        if not keep.any():
            return
        first = self._room(int(keep.sum()))
        scores, crossed = self._scores[first : self._rows], judged.crossed[rows][keep]
        self._at[first : self._rows], scores[:] = positions[keep], judged.scores[rows][keep]
        for i, pool in self.panel.pools.items():
            numbers = judged.numbers[i][rows][keep]
            # A row that is not finite has no score, and the pool does not count it: no row silences
            # a rule for those after it.
            finite = np.isfinite(numbers).all(1)
            if finite.any():
                self.states[i], scores[finite, i] = pool.run(self.states[i], numbers[finite])
            crossed[:, i] = scores[:, i] * self.panel.signs[i] > self.panel.limits[i]
        if crossed.any():
            self._cross(crossed, first)

    def _room(self, rows: int) -> int:
        """Make room for more rows; return the number of rows before them."""
        first, self._rows = self._rows, self._rows + rows
        if self._rows > len(self._at):
            more = max(self._rows, 2 * len(self._at)) - len(self._at)
            self._at = np.concatenate([self._at, np.empty(more, np.int64)])
            self._scores = np.concatenate([self._scores, np.empty((more, len(self.rules)))])
        return first

    def _cross(self, crossed: np.ndarray, first: int) -> None:
        """Take which rows from `first` on cross, [n, rules]."""
        for i in np.flatnonzero(crossed.any(0)).tolist():
            self.crossings[i].add(np.flatnonzero(crossed[:, i]) + first, self._at)

    def score(self, i: int, position: int) -> float:
        """Return the score of a rule at the row of a position, one that counts."""
        return float(self._scores[np.searchsorted(self._at[: self._rows], position), i])

    def result(self, i: int, stop: int) -> RuleResult:
        """Return what a rule saw of the rows at positions below `stop`."""
        rows = int(np.searchsorted(self._at[: self._rows], stop))
        fired = self.crossings[i].fired[: bisect_left(self.crossings[i].fired, stop)]
        scores = self._scores[:rows, i]
        scores = scores[np.isfinite(scores)]
        first = fired[0] if fired else None
        if not len(scores):
            return RuleResult(first, len(fired), rows, None, None, None)
        most, least, mean = (float(f(scores)) for f in (np.max, np.min, np.mean))
        return RuleResult(first, len(fired), rows, most, least, mean, float(scores[-1]))
