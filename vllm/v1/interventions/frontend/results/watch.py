# SPDX-License-Identifier: Apache-2.0
"""Rules are decided here, row by row, before an output with later tokens goes on.

The rows of a step come ahead of the tokens that it sampled: when a token arrives, so have the
scores of all rows before it. A rule that fires at a token's row therefore ends the answer with that
token by its position, however many tokens came in the step and whatever the engine does meanwhile.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from vllm.v1.capture.rules import RULE, RULES_DO, RuleResult
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Rule
from vllm.v1.interventions.positions import Positions
from vllm.v1.metrics.capture_stats import RuleStats

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


class _Judge:
    """One rule of one completion."""

    def __init__(self, rule: Rule, sites: list[int]) -> None:
        self.rule = rule
        self._sites = sites
        """The indices of its sites among those of its stream."""
        self._wanted = Positions.from_flat(rule.runs)
        self._at, self._scores = array("q"), array("d")
        self._crossed = np.empty(0, np.int64)
        """The last rows that crossed, `need - 1` of them, counted from the first row."""
        self.fired: list[int] = []
        """The positions at which it fired."""

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Scores of some rows, float64 [n], of what its stream has of them, [n, sites, columns]: of
        several sites the largest, of those that are numbers."""
        column = self.rule.column
        if len(self._sites) == 1:  # a view
            return rows[:, self._sites[0], column]
        largest: np.ndarray = np.fmax.reduce(rows[:, self._sites, column], axis=1)
        return largest

    def add(self, positions: np.ndarray, scores: np.ndarray) -> None:
        """Take rows: int64 [n] and float64 [n], after all earlier ones."""
        rule, first = self.rule, len(self._at)
        if len(positions) == 1:  # as decoding has it, of each request: arrays would cost more
            position, score = positions.item(), scores.item()
            if position in self._wanted:
                self._at.append(position)
                self._scores.append(score)
                if score < rule.threshold if rule.below else score > rule.threshold:
                    self._cross(np.array([first]))
            return
        keep = self._wanted.mask(positions)
        if not keep.all():
            positions, scores = positions[keep], scores[keep]
        self._at.extend(positions.tolist())
        self._scores.extend(scores.tolist())
        crossed = np.flatnonzero(scores < rule.threshold if rule.below else scores > rule.threshold)
        if len(crossed):
            self._cross(crossed + first)

    def _cross(self, rows: np.ndarray) -> None:
        """Take the numbers of rows that crossed."""
        rule = self.rule
        crossed = np.concatenate([self._crossed, rows])
        last = crossed[rule.need - 1 :]
        fires = last[last - crossed[: len(last)] < rule.of]
        self.fired += [self._at[i] for i in fires.tolist()]
        self._crossed = crossed[max(len(crossed) - rule.need + 1, 0) :]

    def result(self, stop: int) -> RuleResult:
        """Return what the rule saw of the rows at positions below `stop`."""
        rows, fired = bisect_left(self._at, stop), bisect_left(self.fired, stop)
        scores = np.array(self._scores[:rows])
        scores = scores[np.isfinite(scores)]
        made = [float(f(scores)) for f in (np.max, np.min, np.mean)] if len(scores) else [None] * 3
        return RuleResult(self.fired[0] if fired else None, fired, rows, *made)


class RuleWatch:
    """The rules of one completion.

    Args:
        plan: of its capture.
        num_prompt_tokens: of its prompt.
        stats: gets what the rules saw, when it has ended.
    """

    def __init__(self, plan: CapturePlan, num_prompt_tokens: int, stats: RuleStats) -> None:
        self._stats = stats
        self._judges = [
            _Judge(rule, [plan.streams[rule.stream].sites.index(site) for site in rule.sites])
            for rule in plan.rules
        ]
        self.streams = {rule.stream for rule in plan.rules}
        self._num_tokens = num_prompt_tokens
        self._stop: tuple[int, str] | None = None
        """The position of the row that ends the answer, and the rule's name."""

    def add(self, positions: np.ndarray, scores: dict[int, np.ndarray], rows: slice) -> None:
        """Take rows of a step.

        Args:
            positions: int64 [n].
            scores: of the step, by stream: float64 [all rows, sites, rows of the matrix].
            rows: which of them are this completion's.
        """
        for judge in self._judges:
            judge.add(positions, judge.scores(scores[judge.rule.stream][rows]))

    def judge(
        self, output: EngineCoreOutput, reason: FinishReason | None
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens of an output that belong to the answer, and `reason`, None where a rule ends
        it before. The rows before the last of them have come."""
        tokens = output.new_token_ids
        fired = [(j.fired[0], j.rule.name) for j in self._judges if j.rule.stops and j.fired]
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
        for judge in self._judges:
            rule, result = judge.rule, judge.result(stop)
            name = rule.name if rule.for_all else ""
            self._stats.add(result, name, rule.below, RULES_DO[rule.stops])
            if not rule.for_all:
                results[rule.name] = result
            elif result.fired:
                results[rule.name] = None
        return results


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
            scores: dict[int, np.ndarray] = {}
            start = 0
            for name, count in chunk.owners:
                rows = slice(start, start + count)
                start += count
                watch = self._watches.get(name)
                if watch is None or not count:
                    continue
                for i in watch.streams - scores.keys():
                    scores[i] = chunk.stream(i).double().numpy()
                watch.add(chunk.positions[rows], scores, rows)


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
