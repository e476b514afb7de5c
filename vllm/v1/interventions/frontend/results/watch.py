# SPDX-License-Identifier: Apache-2.0
"""Rules are decided here, row by row, before an output with later tokens goes on.

The rows of a step come ahead of the tokens that it sampled: when a token arrives, so have the
scores of all rows before it. A rule that fires at a token's row therefore ends the answer with that
token by its position, however many tokens came in the step and whatever the engine does meanwhile.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from vllm.v1.capture.rules import FLAG, RULE, STOP, RuleResult
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.interventions.frontend.results.collector import ALL_ROWS
from vllm.v1.interventions.frontend.results.judges import (
    Alone,
    Judges,
    Panel,
    among,
    panel_key,
)
from vllm.v1.interventions.frontend.results.webhook import Webhook
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Rule, Site
from vllm.v1.metrics.capture_stats import RuleStats

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState


_BROKEN_OFF = (FinishReason.ABORT, FinishReason.ERROR)
"""Reasons of answers that cannot go on."""

Tell = Callable[[dict[str, Any]], None]
"""Takes what is told of a rule that fired."""


def _event(rule: Rule, position: int, score: float, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "rule": rule.name,
        "then": rule.then,
        "position": position,
        "prompt_tokens": num_prompt_tokens,
        "score": score if isfinite(score) else None,
        "threshold": rule.threshold,
        "below": rule.below,
        "time": time.time(),
    }


class RuleWatch:
    """The rules of one completion.

    Args:
        plan: of its capture.
        num_prompt_tokens: of its prompt.
        most_tokens: that its answer can have.
        stats: gets what the rules saw, when it has ended.
        panels: those in use, by `panel_key`.
        tell: told the first time that each rule of the operator fires; None if nobody listens.
    """

    def __init__(
        self,
        plan: CapturePlan,
        num_prompt_tokens: int,
        most_tokens: int,
        stats: RuleStats,
        panels: WeakValueDictionary[object, Panel],
        tell: Tell | None = None,
    ) -> None:
        self._stats = stats
        groups: dict[tuple[int, tuple[Site, ...], tuple[int, ...]], list[Rule]] = {}
        for rule in plan.rules:
            groups.setdefault((rule.stream, tuple(rule.sites), tuple(rule.runs)), []).append(rule)
        self.judges = []
        for rules in groups.values():
            sites = among(rules[0], plan)
            key = panel_key(rules, sites)
            if (panel := panels.get(key)) is None:
                panel = panels[key] = Panel(rules, sites)
            self.judges.append(Judges(rules, panel))
        self._num_tokens = self._num_prompt_tokens = num_prompt_tokens
        self._most_tokens = num_prompt_tokens + most_tokens
        self._forces = plan.forces
        self._tell, self._told = tell, set[str]()
        self._stop: tuple[int, str] | None = None
        """The position of the row that ends the answer, and the rule's name."""
        self._forced: dict[str, int] = {}
        """Rule that forced tokens -> the position of the first of them."""
        self._goes_on = False
        """True if the answer, cut, waits for what follows the tokens that were forced."""
        self._rows = 0
        """The position before which the rows of an answer that was cut came; what fired there cuts
        nothing more."""
        self.most_rows = ALL_ROWS
        """The position from which on no rows come."""
        self._order = {rule.name: (rule.then != STOP, i) for i, rule in enumerate(plan.rules)}
        """Turn of a rule among those that fire at one row: those that stop first."""

    def take(self, positions: np.ndarray, first: int, alone: Callable[[Panel], Alone]) -> None:
        """Take several rows, those of drafts one at a time where a rule may cut the answer and have
        it go on: none counts that lies behind the cut.

        Args:
            positions: int64 [n].
            first: the number of the first row among those of the step.
            alone: gives the rows of the step as a panel sees them.
        """
        ends: Iterable[int] = [len(positions)]
        if self._forces:
            given_out = int(np.searchsorted(positions, self._num_tokens))
            ends = range(max(given_out, 1), len(positions) + 1)
        start = 0
        for end in ends:
            for judges in self.judges:
                of_panel = alone(judges.panel)
                of_panel.pool()
                rows = slice(first + start, first + end)
                judges.add(positions[start:end], of_panel.judged, rows)
            if self._forces and self._cut() is not None:
                return
            start = end

    def _cut(self) -> tuple[int, Rule] | None:
        """The first row at which a rule cuts the answer, and the rule; None for none."""
        found = [
            (at, rule)
            for judges in self.judges
            for rule, crossings in zip(judges.rules, judges.crossings, strict=True)
            if rule.then != FLAG and crossings.fired and rule.name not in self._forced
            for at in crossings.since(self._rows)[:1]
        ]
        return min(found, key=lambda cut: (cut[0], self._order[cut[1].name]), default=None)

    def judge(
        self, output: EngineCoreOutput, reason: FinishReason | None
    ) -> tuple[list[int], FinishReason | None]:
        """The tokens of an output that belong to the answer, and `reason`, None where a rule cuts
        it before. The rows before the last of them have come.

        Where a rule forces tokens, they follow those of the answer, in `output`, too; where these
        and one more have no room, the rule ends the answer.
        """
        tokens = output.new_token_ids
        if (cut := self._cut()) is not None:
            at, rule = cut
            tokens = tokens[: max(at + 1 - self._num_tokens, 0)]
            kept = self._num_tokens + len(tokens)
            fits = reason not in _BROKEN_OFF and kept + len(rule.puts) < self._most_tokens
            reason = None
            if rule.puts and fits:
                self._goes_on, self._rows = True, kept
                self._forced[rule.name] = kept
                output.new_token_ids = tokens = [*tokens, *rule.puts]
            else:
                self._stop = at, rule.name
            if not tokens:
                output.new_sampling_mask = None  # upstream cannot cut it to nothing
        self._num_tokens += len(tokens)
        if self._tell is not None:
            self._tell_of_new(self._tell)
        return tokens, reason

    def _tell_of_new(self, tell: Tell) -> None:
        """Tell of rules of the operator that have fired at a row of what is given out."""
        for judges in self.judges:
            for i, (rule, crossings) in enumerate(zip(judges.rules, judges.crossings, strict=True)):
                at = crossings.fired[0] if rule.for_all and crossings.fired else self._num_tokens
                if at < self._num_tokens and rule.name not in self._told:
                    self._told.add(rule.name)
                    tell(_event(rule, at, judges.score(i, at), self._num_prompt_tokens))

    def stop_reason(self, stop_string: str | None) -> str | None:
        """Return the reason why the answer ends; a stop string in the tokens that were kept comes
        before a rule."""
        if stop_string is not None:
            if self._goes_on:  # it ends in what was forced, or before
                self._goes_on, self.most_rows = False, self._rows
            self._stop = None
        return f"{RULE}{self._stop[1]}" if self._stop is not None else stop_string

    def goes_on(self) -> int | None:
        """If the answer was cut and is to go on, return the position before which its rows came;
        once."""
        goes_on, self._goes_on = self._goes_on, False
        return self._rows if goes_on else None

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
                self._stats.add(result, name, rule.below, rule.then)
                if not rule.for_all:
                    forced = self._forced.get(rule.name, num_tokens)
                    if forced < num_tokens:
                        result = replace(result, forced_at=forced)
                    results[rule.name] = result
                elif result.fired:
                    results[rule.name] = None
        return results


class RuleWatches:
    """The rules of all completions of one frontend."""

    def __init__(self, webhook: Webhook | None = None) -> None:
        self._webhook = webhook
        self._watches: WeakValueDictionary[str, RuleWatch] = WeakValueDictionary()
        self._panels: WeakValueDictionary[object, Panel] = WeakValueDictionary()
        self.stats = RuleStats()
        """Results of rules in completions that ended since the statistics were last taken."""

    def open(
        self,
        request_id: str,
        plan: CapturePlan,
        num_prompt_tokens: int,
        most_tokens: int,
        texts: Callable[[], dict[str, Any]] = dict,
    ) -> RuleWatch | None:
        """Make the watch of a completion, which gets its rows while it is in use; None without
        rules.

        Args:
            most_tokens: that the answer can have.
            texts: gives the texts of prompt and answer so far, for a webhook that is told them.
        """
        if not plan.rules:
            return None
        tell = None
        if (webhook := self._webhook) is not None:

            def tell(event: dict[str, Any]) -> None:
                said = texts() if webhook.settings.text else {}
                webhook.tell({"request": plan.external_id, "sample": plan.sample, **event, **said})

        watch = self._watches[request_id] = RuleWatch(
            plan, num_prompt_tokens, most_tokens, self.stats, self._panels, tell
        )
        return watch

    def rename(self, old: str, new: str) -> None:
        """Change a completion's id: what still comes under the old one is not its."""
        self._watches[new] = self._watches.pop(old)

    def add(self, chunks: Iterable[CapturedChunk]) -> None:
        """Take the rows of a message; some of their owners may have no rules."""
        for chunk in chunks if self._watches else ():
            self._add(chunk)

    def _add(self, chunk: CapturedChunk) -> None:
        # Once for all requests of a step: of each by itself takes several times longer.
        products: dict[tuple[int, tuple[int, ...] | None], np.ndarray] = {}
        judged: dict[Panel, Alone] = {}

        def alone_of(panel: Panel) -> Alone:
            if (alone := judged.get(panel)) is None:
                key = panel.stream, panel.sites
                if key not in products:
                    made = chunk.stream(panel.stream).double().numpy()
                    products[key] = panel.joined(made)
                alone = judged[panel] = Alone(panel.judge(products[key]))
            return alone

        positions, start = chunk.positions.tolist(), 0
        for name, count in chunk.owners:
            first, start = start, start + count
            watch = self._watches.get(name)
            if watch is None or not count:
                continue
            if count > 1:
                watch.take(chunk.positions[first:start], first, alone_of)
                continue
            for judges in watch.judges:
                alone_of(judges.panel).add(judges, positions[first], first)
        for alone in judged.values():
            alone.pool()


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
