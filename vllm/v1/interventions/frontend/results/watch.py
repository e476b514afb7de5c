# SPDX-License-Identifier: Apache-2.0
"""Rules are decided here, row by row, before an output with later tokens goes on.

The rows of a step come ahead of the tokens that it sampled: when a token arrives, so have the
scores of all rows before it. A rule that fires at a token's row therefore ends the answer with that
token by its position, however many tokens came in the step and whatever the engine does meanwhile.
"""

import time
from collections.abc import Callable, Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from vllm.v1.capture.rules import RULE, RULES_DO, RuleResult
from vllm.v1.engine import EngineCoreOutput, FinishReason
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


Tell = Callable[[dict[str, Any]], None]
"""Takes what is told of a rule that fired."""


def _event(rule: Rule, position: int, score: float, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "rule": rule.name,
        "then": RULES_DO[rule.stops],
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
        stats: gets what the rules saw, when it has ended.
        panels: those in use, by `panel_key`.
        tell: told the first time that each rule of the operator fires; None if nobody listens.
    """

    def __init__(
        self,
        plan: CapturePlan,
        num_prompt_tokens: int,
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
        self._tell, self._told = tell, set[str]()
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
        texts: Callable[[], dict[str, Any]] = dict,
    ) -> RuleWatch | None:
        """Make the watch of a completion, which gets its rows while it is in use; None without
        rules.

        Args:
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
            plan, num_prompt_tokens, self.stats, self._panels, tell
        )
        return watch

    def add(self, chunks: Iterable[CapturedChunk]) -> None:
        """Take the rows of a message; some of their owners may have no rules."""
        for chunk in chunks if self._watches else ():
            self._add(chunk)

    def _add(self, chunk: CapturedChunk) -> None:
        # Once for all requests of a step: of each by itself takes several times longer.
        products: dict[tuple[int, tuple[int, ...] | None], np.ndarray] = {}
        judged: dict[Panel, Alone] = {}
        positions, start = chunk.positions.tolist(), 0
        for name, count in chunk.owners:
            first, start = start, start + count
            watch = self._watches.get(name)
            if watch is None or not count:
                continue
            for judges in watch.judges:
                panel = judges.panel
                alone = judged.get(panel)
                if alone is None:
                    key = panel.stream, panel.sites
                    if key not in products:
                        made = chunk.stream(panel.stream).double().numpy()
                        products[key] = panel.joined(made)
                    alone = judged[panel] = Alone(panel.judge(products[key]))
                if count == 1:
                    alone.add(judges, positions[first], first)
                else:
                    alone.pool()
                    judges.add(chunk.positions[first:start], alone.judged, slice(first, start))
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
