# SPDX-License-Identifier: Apache-2.0
"""An engine driven step by step, and what each position of each request ran under.

A `Timeline` keeps its own record of the global tiers and notes, at every step, which positions the
scheduler has computed under which. What an answer must be follows from that record and the ask
alone: cached positions count as computed under the tiers of the moment the request started, for
that is what a prefix cache must not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.models import HIDDEN
from tests.conformance.reference import Forward, Site
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE
from tests.support import serving
from tests.support.serving import Ask, Judge, deltas_of, relative, worst_row
from vllm import LLM

Vectors = Mapping[str, Mapping[int, torch.Tensor]]
"""{point: {layer: vector}}."""

Own = Callable[[int], dict[Site, torch.Tensor]]
"""Length of a sequence -> (point, layer) -> [length, HIDDEN]: what a request adds itself."""

_ids = itertools.count()


@dataclass(frozen=True)
class State:
    """The global tiers between two changes."""

    version: int
    tiers: Mapping[str, Mapping[Site, torch.Tensor]]


class Globals:
    """What the global tiers of an engine are, by what was asked of it."""

    def __init__(self) -> None:
        self.states = [State(0, {})]

    def set(self, version: int, tiers: Mapping[str, Vectors], replace: bool = False) -> None:
        new = {} if replace else {tier: dict(at) for tier, at in self.states[-1].tiers.items()}
        for tier, vectors in tiers.items():
            for point, layers in vectors.items():
                for layer, values in layers.items():
                    new.setdefault(tier, {})[point, layer] = values
        self.states.append(State(version, new))

    def clear(self, version: int, tier: str | None = None) -> None:
        kept = self.states[-1].tiers
        self.states.append(
            State(version, {t: at for t, at in kept.items() if tier not in (None, t)})
        )

    def deltas(self, states: list[int], prompt: int) -> dict[Site, torch.Tensor]:
        """What is added at each position; `states[p]` is the index of the state p ran under."""
        total: dict[Site, torch.Tensor] = {}
        for position, index in enumerate(states):
            phase = "prefill" if position < prompt else "decode"
            for tier, vectors in self.states[index].tiers.items():
                if tier not in ("base", phase):
                    continue
                for site, values in vectors.items():
                    total.setdefault(site, torch.zeros(len(states), HIDDEN))[position] += values
        return total


def added(*all_deltas: Mapping[Site, torch.Tensor]) -> dict[Site, torch.Tensor]:
    """The sum, site by site."""
    total: dict[Site, torch.Tensor] = {}
    for deltas in all_deltas:
        for site, delta in deltas.items():
            total[site] = total[site] + delta if site in total else delta
    return total


@dataclass
class _Run:
    """A request from its start, or its return from a preemption."""

    started: int
    """Index of the state then."""
    states: dict[int, int]
    """Position -> index of the state it was computed under; cached ones are left out."""


class Timeline:
    """Drives an in-process engine. Requests that are over are kept in `outputs`.

    Args:
        llm: its scheduler is watched until `close`.
        judge: holds the reference.
    """

    def __init__(self, llm: LLM, judge: Judge) -> None:
        self.llm = llm
        self.judge = judge
        self.globals = Globals()
        self.asks: dict[str, Ask] = {}
        self.outputs: dict[str, Any] = {}
        self.tokens: dict[str, int] = {}
        """Generated so far."""
        self.preempted: list[str] = []
        """Once per preemption."""
        self._runs: dict[str, list[_Run]] = {}
        self._internal: dict[str, str] = {}
        self._scheduler = serving.scheduler_of(llm)
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._watched
        version = llm.steering.clear()
        self.globals.states = [State(version, {})]

    def close(self) -> None:
        """End what still runs, and leave the engine without global tiers."""
        self.finish()
        self.llm.steering.clear()
        self._scheduler.schedule = self._schedule

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        now = len(self.globals.states) - 1
        self.preempted += sorted(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        begun = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        for req_id, count in output.num_scheduled_tokens.items():
            runs = self._runs.setdefault(req_id, [])
            # The V2 runner gets a resumed request as a new one.
            if req_id in begun:
                runs.append(_Run(now, {}))
            start = starts[req_id]
            runs[-1].states |= dict.fromkeys(range(start, start + count), now)
        return output

    # -- what is asked ----------------------------------------------------------------------

    def add(
        self, prompt: list[int], fields: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Send a request; it starts with a later step.

        Args:
            options: of `LLMEngine.add_request`: a priority, a LoRA.
        """
        ask = Ask(prompt, fields or {})
        name = f"{next(_ids)}-ask"
        self.asks[name] = ask
        params = ask.params()
        internal = self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, params, **options
        )
        self._internal[name] = internal or name
        return name

    def set(self, tier: str, vectors: Vectors, replace: bool = False) -> int:
        return self.set_tiers({tier: vectors}, replace)

    def set_tiers(self, tiers: Mapping[str, Vectors], replace: bool = False) -> int:
        version = self.llm.steering.set_tiers(dict(tiers), replace)
        self.globals.set(version, tiers, replace)
        return version

    def clear(self, tier: str | None = None) -> int:
        version = self.llm.steering.clear(tier)
        self.globals.clear(version, tier)
        return version

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs: list[Any] = self.llm.llm_engine.step()
            for output in outputs:
                self.tokens[output.request_id] = len(output.outputs[0].token_ids)
                if output.finished:
                    self.outputs[output.request_id] = output

    def until(self, name: str, tokens: int) -> None:
        """Step until a request has generated that many tokens."""
        for _ in range(500):
            if self.tokens.get(name, 0) >= tokens:
                return
            self.step()
        raise AssertionError(f"{name} does not get to {tokens} tokens")

    def finish(self) -> None:
        for _ in range(1000):
            if not self.llm.llm_engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("not done after 1000 steps")

    def serve(self, prompt: list[int], fields: Mapping[str, Any] | None = None) -> str:
        name = self.add(prompt, fields)
        self.finish()
        return name

    # -- what came of it --------------------------------------------------------------------

    def sequence(self, name: str) -> list[int]:
        """Prompt and all generated tokens."""
        return [*self.asks[name].prompt, *self.outputs[name].outputs[0].token_ids]

    def cached(self, name: str) -> int:
        """Tokens that came from the prefix cache at the request's first start."""
        count: int = self.outputs[name].num_cached_tokens
        return count

    def runs(self, name: str) -> list[list[int]]:
        """Of each run of a request: the index of the state of each position it got to."""
        rows = len(self.sequence(name)) - 1
        listed = []
        for run in self._runs[self._internal[name]]:
            reached = min(max(run.states) + 1, rows)
            listed.append([run.states.get(p, run.started) for p in range(reached)])
        return listed

    def boundaries(self, name: str) -> list[int]:
        """Positions whose state is not that of the one before, in the last run."""
        states = self.runs(name)[-1]
        return [p for p in range(1, len(states)) if states[p] != states[p - 1]]

    def told(self, name: str) -> list[list[int]]:
        """As `runs`, of a request that captured all and was not preempted: by what its rows say.
        For asynchronous scheduling of drafts, where the scheduler's positions are a guess."""
        rows = next(iter(self.outputs[name].outputs[0].capture_results["inline"].payload.values()))
        index = {state.version: i for i, state in enumerate(self.globals.states)}
        states = [index[version] for version in rows.versions.tolist()]
        assert states == sorted(states)
        return [states]

    def check(self, name: str, own: Own | None = None, runs: list[list[int]] | None = None) -> None:
        """Rows, versions and log-probabilities are those of the record, position by position.

        Args:
            own: what the request adds itself; by default what its three fields of vectors say.
            runs: in place of the record.

        Raises:
            AssertionError: they are not; or the record with a change one position later is as good
                as the record.
        """
        ask, output = self.asks[name], self.outputs[name]
        (completion,) = output.outputs
        sequence = self.sequence(name)[:-1]
        inherit = ask.fields.get("steering_inherit_global", True)
        done = 0
        for states in runs or self.runs(name):
            if len(states) <= done:
                continue
            # What a run computes again was delivered before.
            fresh = range(done, len(states))
            done = len(states)

            def reference(states: list[int]) -> Forward:
                mine = own(len(states)) if own else deltas_of(ask, len(states))
                theirs = self.globals.deltas(states, len(ask.prompt)) if inherit else {}
                return self.judge.reference.run(sequence[: len(states)], added(mine, theirs))

            want = reference(states)
            self._check_log_probs(ask, completion, want, fresh)
            if inherit and self.globals.deltas(states, len(ask.prompt)):
                plain = reference([0] * len(states))
                moved = relative(plain.logits[fresh.start :], want.logits[fresh.start :])
                assert moved >= LEAST_MOVE, f"the global tiers move the logits only {moved}"
            if "capture" not in ask.fields:
                continue
            versions = [self.globals.states[index].version for index in states]
            self._check_rows(completion, want, versions, fresh)
            for at in range(fresh.start + 1, fresh.stop):
                late = [*states[:at], states[at - 1], *states[at + 1 :]]
                if not inherit or self._same_at(at, states, late, len(ask.prompt)):
                    continue
                twin = reference(late).rows
                moved = max(relative(twin[site][at], want.rows[site][at]) for site in twin)
                assert moved >= LEAST_MOVE, f"a change at {at} moves the row only {moved}"
        assert done == len(sequence)

    def _same_at(self, at: int, one: list[int], other: list[int], prompt: int) -> bool:
        """Whether the two records add the same at a position."""
        sums = [self.globals.deltas(states[: at + 1], prompt) for states in (one, other)]
        zero = torch.zeros(at + 1, HIDDEN)
        return all(
            torch.equal(sums[0].get(site, zero)[at], sums[1].get(site, zero)[at])
            for site in sums[0].keys() | sums[1].keys()
        )

    def _check_log_probs(self, ask: Ask, completion: Any, want: Forward, fresh: range) -> None:
        first = max(fresh.start, len(ask.prompt) - 1)
        if completion.logprobs is None or first >= fresh.stop:
            return
        got = serving.log_probs(completion)[first - len(ask.prompt) + 1 :]
        expected = want.logits[first : fresh.stop].log_softmax(-1)
        error = worst_row(got[: len(expected)], expected)
        assert error <= WRITE_TOLERANCE, f"log-probabilities off by {error}"

    @staticmethod
    def _check_rows(completion: Any, want: Forward, versions: list[int], fresh: range) -> None:
        result = completion.capture_results["inline"]
        assert result.status == "ok", result.error
        for site, rows in result.payload.items():
            kept = [i for i, p in enumerate(rows.positions.tolist()) if p in fresh]
            at = rows.positions[kept].tolist()
            assert rows.versions[kept].tolist() == [versions[p] for p in at], site
            error = worst_row(rows.values[kept], want.rows[site][at])
            assert error <= READ_TOLERANCE, f"{site}: rows off by {error}"
