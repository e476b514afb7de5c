# SPDX-License-Identifier: Apache-2.0
"""Rules are decided here, row by row, before an output with later tokens goes on.

The rows of a step come ahead of the tokens that it sampled: when a token arrives, so have the
scores of all rows before it. A rule that fires at a token's row therefore ends the answer with that
token by its position, however many tokens came in the step and whatever the engine does meanwhile.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from vllm.v1.capture.rules import RULE, RULES_DO, RuleResult
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Rule, Site
from vllm.v1.interventions.positions import Positions
from vllm.v1.metrics.capture_stats import RuleStats
from vllm.v1.probes.heads import Linear
from vllm.v1.probes.pools import Each

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


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


class _Pooled:
    """A rule's pool, of the rows of one completion. A row whose numbers are not finite has no
    score, and the pool does not count it, so no row silences a rule for those after it."""

    def __init__(self, rule: Rule) -> None:
        self._columns = slice(rule.column, rule.column + rule.head.units)
        self._head, self._state = rule.head, rule.pool.state()

    def add(self, products: np.ndarray) -> np.ndarray:
        """Return the scores of rows, [n], of all products of their stream, [n, columns]."""
        with np.errstate(all="ignore"):
            numbers = self._head.numbers(products[:, self._columns])
        finite = np.isfinite(numbers).all(1)
        if finite.all():
            return self._state.add(numbers)
        scores = np.full(len(numbers), np.nan)
        if finite.any():
            scores[finite] = self._state.add(numbers[finite])
        return scores


class _Judges:
    """The rules of one completion that read the same rows of a stream at the same positions."""

    def __init__(self, rules: list[Rule], sites: tuple[int, ...] | None) -> None:
        first = rules[0]
        self.rules, self.stream, self.head = rules, first.stream, first.head
        self.sites = sites
        """The indices of their sites among those of the stream; None for all."""
        self._wanted = Positions.from_flat(first.runs)
        self._signs = np.where([rule.below for rule in rules], -1.0, 1.0)
        self._limits = self._signs * [rule.threshold for rule in rules]
        # Most rules: all of them are one addition.
        shifts = {
            i: rule.head.bias[0]
            for i, rule in enumerate(rules)
            if isinstance(rule.head, Linear) and isinstance(rule.pool, Each)
        }
        self._plain, self._shifts = np.array([*shifts], np.int64), np.array([*shifts.values()])
        self._columns = np.array([rules[i].column for i in shifts], np.int64)
        self._pooled = {i: _Pooled(r) for i, r in enumerate(rules) if i not in shifts}
        self.crossings = [_Crossings(rule) for rule in rules]
        self._rows = 0
        self._at, self._scores = np.empty(8, np.int64), np.empty((8, len(rules)))

    def add(self, positions: np.ndarray, products: np.ndarray) -> None:
        """Take rows, after all earlier ones: int64 [n], and float64 [n, columns] with the products
        of all sites joined."""
        keep = self._wanted.mask(positions)
        if not keep.all():
            positions, products = positions[keep], products[keep]
        if not len(positions):
            return
        first, stop = self._rows, self._rows + len(positions)
        if stop > len(self._at):
            room = max(stop, 2 * len(self._at)) - len(self._at)
            self._at = np.concatenate([self._at, np.empty(room, np.int64)])
            more = np.empty((room, len(self.rules)))
            self._scores = np.concatenate([self._scores, more])
        scores = self._scores[first:stop]
        scores[:, self._plain] = products[:, self._columns] + self._shifts
        for i, pooled in self._pooled.items():
            scores[:, i] = pooled.add(products)
        self._at[first:stop], self._rows = positions, stop
        crossed = scores * self._signs > self._limits
        if crossed.any():
            for i in np.flatnonzero(crossed.any(0)).tolist():
                self.crossings[i].add(np.flatnonzero(crossed[:, i]) + first, self._at)

    def result(self, i: int, stop: int) -> RuleResult:
        """Return what a rule saw of the rows at positions below `stop`."""
        rows = int(np.searchsorted(self._at[: self._rows], stop))
        fired = self.crossings[i].fired[: bisect_left(self.crossings[i].fired, stop)]
        scores = self._scores[:rows, i]
        scores = scores[np.isfinite(scores)]
        of_scores: list[float | None] = [None] * 4
        if len(scores):
            of_scores = [*(float(f(scores)) for f in (np.max, np.min, np.mean)), float(scores[-1])]
        return RuleResult(fired[0] if fired else None, len(fired), rows, *of_scores)


class RuleWatch:
    """The rules of one completion.

    Args:
        plan: of its capture.
        num_prompt_tokens: of its prompt.
        stats: gets what the rules saw, when it has ended.
    """

    def __init__(self, plan: CapturePlan, num_prompt_tokens: int, stats: RuleStats) -> None:
        self._stats = stats
        groups: dict[tuple[int, tuple[Site, ...], tuple[int, ...]], list[Rule]] = {}
        for rule in plan.rules:
            groups.setdefault((rule.stream, tuple(rule.sites), tuple(rule.runs)), []).append(rule)
        self.judges = [_Judges(of, _among(of[0], plan)) for of in groups.values()]
        self._num_tokens = num_prompt_tokens
        self._stop: tuple[int, str] | None = None
        """The position of the row that ends the answer, and the rule's name."""

    def judge(
        self, output: EngineCoreOutput, reason: FinishReason | None
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens of an output that belong to the answer, and `reason`, None where a rule ends
        it before. The rows before the last of them have come."""
        tokens = output.new_token_ids
        fired = [
            (crossings.fired[0], rule.name)
            for judges in self.judges
            for rule, crossings in zip(judges.rules, judges.crossings, strict=True)
            if rule.stops and crossings.fired
        ]
        if fired:
            self._stop = min(fired, key=lambda stop: stop[0])
            tokens, reason = tokens[: max(self._stop[0] + 1 - self._num_tokens, 0)], None
            if not tokens:
                output.new_sampling_mask = None  # upstream cannot cut it to nothing
        self._num_tokens += len(tokens)
        return tokens, reason

    def stop_reason(self, stop_string: str | None) -> str | None:
        """Return the reason why the answer ends; a stop string in the tokens that were kept comes
        before a rule."""
        if stop_string is not None:
            self._stop = None
        return f"{RULE}{self._stop[1]}" if self._stop is not None else stop_string

    def results(self, num_tokens: int) -> dict[str, RuleResult | None]:
        """Return what the rules saw of an answer that ended, by name; None for a rule of the
        operator, which is there only if it fired.

        Args:
            num_tokens: of prompt and answer.
        """
        # The last token has no row, unless that row ended the answer.
        stop = num_tokens - 1 if self._stop is None else self._stop[0] + 1
        results: dict[str, RuleResult | None] = {}
        for judges in self.judges:
            for i, rule in enumerate(judges.rules):
                result = judges.result(i, stop)
                name = rule.name if rule.for_all else ""
                self._stats.add(result, name, rule.below, RULES_DO[rule.stops])
                if not rule.for_all:
                    results[rule.name] = result
                elif result.fired:
                    results[rule.name] = None
        return results


def _among(rule: Rule, plan: CapturePlan) -> tuple[int, ...] | None:
    """Return the indices of a rule's sites among those of its stream; None for all of them."""
    sites = plan.streams[rule.stream].sites
    among = tuple(sites.index(site) for site in rule.sites)
    return None if among == tuple(range(len(sites))) else among


class RuleWatches:
    """The rules of all completions of one frontend."""

    def __init__(self) -> None:
        self._watches: WeakValueDictionary[str, RuleWatch] = WeakValueDictionary()
        self.stats = RuleStats()
        """Results of rules in completions that ended since the statistics were last taken."""

    def open(self, request_id: str, plan: CapturePlan, num_prompt_tokens: int) -> RuleWatch | None:
        """Make the watch of a completion, which gets its rows while it is in use; None without
        rules."""
        if not plan.rules:
            return None
        watch = self._watches[request_id] = RuleWatch(plan, num_prompt_tokens, self.stats)
        return watch

    def add(self, chunks: Iterable[CapturedChunk]) -> None:
        """Take the rows of a message; some of their owners may have no rules."""
        for chunk in chunks if self._watches else ():
            # Once for all requests of a step: of each by itself takes several times longer.
            products: dict[Any, np.ndarray] = {}
            start = 0
            for name, count in chunk.owners:
                rows = slice(start, start + count)
                start += count
                watch = self._watches.get(name)
                if watch is None or not count:
                    continue
                for judges in watch.judges:
                    key = judges.stream, judges.sites
                    joined = products.get(key)
                    if joined is None:
                        made = chunk.stream(judges.stream).double().numpy()
                        of_sites = made if judges.sites is None else made[:, judges.sites]
                        joined = products[key] = judges.head.joined(of_sites)
                    judges.add(chunk.positions[rows], joined[rows])


def rule_results(
    state: "RequestState", finish_reason: FinishReason | None
) -> dict[str, RuleResult | None] | None:
    """Return what the rules saw, for the completion output being made; None if there is nothing to
    say, and before the completion's end."""
    if state.rules is None or finish_reason is None:
        return None
    assert state.detokenizer is not None
    num_tokens = state.prompt_len + state.detokenizer.num_output_tokens()
    return state.rules.results(num_tokens) or None
