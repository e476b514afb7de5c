# SPDX-License-Identifier: Apache-2.0
"""Slots, parts, rows and programs over thousands of requests that come, go and come back.

A worker that replays the messages must find for every running request what the request asked for,
and a model that only counts must agree on who may start.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Hashable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.plans import HIDDEN, config_of, plan_of
from tests.support.told_worker import PROMPT, ROWS, SLOTS, Worker, steering_of
from vllm import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.plan import TIERS, Plan, SteeringPlan
from vllm.v1.interventions.scheduler import turns
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.terms import rows_needed
from vllm.v1.interventions.vectors import vector_set_of
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.quick

FAMILIES = ["add", "ablate", "pin", "replace", "gate"]
CONFIG = config_of(max_steering_configs=SLOTS, max_steering_rows=ROWS, steering_families=FAMILIES)


def axis(i: int) -> list[float]:
    return [float(i % HIDDEN == j) * (1 + i) for j in range(HIDDEN)]


def plans() -> list[Plan | None]:
    """Kinds of requests, few enough that many ask for the same."""
    at = [{"pre_attn": {0: axis(i)}} for i in range(10)]
    ops = [
        {"op": "pin", "point": "post_block", "layers": [1], "direction": axis(i), "value": 1.0}
        for i in range(6)
    ]
    gates = [{"probe": axis(i), "threshold": 0.0, "sharpness": 1.0} for i in range(2)]
    swap = {"op": "replace", "point": "pre_attn", "layers": [3]}
    asks: list[dict[str, Any]] = [{}, {"capture": {"inline": {"hooks": {"pre_attn": [0]}}}}]
    asks += [{"steering_vectors": v} for v in at]
    asks += [{"steering_vectors": v, "steering_inherit_global": False} for v in at[:2]]
    asks += [{"prefill_steering_vectors": v, "decode_steering_vectors": w} for v, w in pairwise(at)]
    asks += [{"decode_steering_vectors": v} for v in at[:2]]
    asks += [
        {"steering_vectors": {"pre_attn": {0: {"vector": axis(i), "positions": [2, 4]}}}}
        for i in range(3)
    ]
    asks += [{"steering": [op]} for op in ops]
    asks += [{"steering": [{**op, "gate": g}]} for op in ops[:2] for g in gates]
    asks += [
        {"steering": [ops[i], {**ops[3], "gate": {**gates[0], "when": "last_prompt"}}]}
        for i in range(3)
    ]
    asks += [
        {"steering": [{**swap, "positions": [1, 3], "values": [axis(i), axis(3)]}]}
        for i in range(3)
    ]
    asks += [{"steering": [ops[i]], "prefill_steering_vectors": at[i]} for i in range(3)]
    asks += [{"steering_inherit_global": False}]
    return [plan_of(config=CONFIG, prompt=PROMPT, max_tokens=8, **ask) for ask in asks]


EVERYTHING = plan_of(
    config=CONFIG,
    prompt=12,
    max_tokens=8,
    steering_vectors={
        "pre_attn": {n: {"vector": axis(n), "positions": [n]} for n in (0, 1, 2, 3)},
        "post_block": {0: {"vector": axis(0), "positions": [5]}},
    },
    steering=[
        {
            "op": "replace",
            "point": "post_block",
            "layers": [2],
            "positions": list(range(ROWS)),
            "values": [[float(i)] * HIDDEN for i in range(ROWS)],
        }
    ],
)


class Counts:
    """What is needed by those who hold it."""

    def __init__(self, holders: list[SteeringPlan]) -> None:
        self.keys = {(c.digest, p.inherit) for p in holders for c in p.sums}
        self.terms = {t.digest: t for p in holders for t in p.terms}
        self.programs = sum(len(p.programs) for p in holders)

    @property
    def rows(self) -> int:
        return rows_needed(list(self.terms.values()))

    def fits(self) -> bool:
        return len(self.keys) <= SLOTS and self.rows <= ROWS and self.programs <= ROWS


class Simulation:
    """A scheduler of our own around the real decisions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ours = SchedulerInterventions(CONFIG, hash_block_size=4)
        self.worker = Worker()
        self.waiting = FCFSRequestQueue()
        self.parked: dict[str, Request] = {}
        self.running: list[Request] = []
        self.ends: dict[str, int] = {}
        self.finished: set[str] = set()
        self.holders: dict[str, SteeringPlan] = {}
        self.step_number = 0
        self.refused: dict[str, int] = {}
        """Request -> step of its first refusal."""
        self.seen: Counter[str] = Counter()

    def arrive(self, plan: Plan | None, name: str) -> None:
        request = Request(name, list(range(PROMPT)), SamplingParams(max_tokens=8), None, plan=plan)
        self.ours.arrive(request)
        self.waiting.append(request)

    @property
    def unstarted(self) -> int:
        return len(self.waiting) + len(self.parked)

    def end(self, request: Request) -> None:
        self.ours.finish(request)
        self.holders.pop(request.request_id, None)
        self.refused.pop(request.request_id, None)
        self.parked.pop(request.request_id, None)
        self.finished.add(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def preempt(self, request: Request) -> None:
        self.seen["preempted"] += 1
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.ours.preempt(request)
        self.running.remove(request)
        self.waiting.prepend_request(request)

    def may_start(self, request: Request) -> bool:
        """What the real decision is, judged by the model."""
        plan, name = steering_of(request), request.request_id
        can = self.ours.can_admit(request)
        if plan is None or name in self.holders or not (plan.sums or plan.programs):
            assert can
            return True
        fits = Counts([*self.holders.values(), plan]).fits()
        assert can == (fits and self.has_turn(request))
        if not can:
            self.refused.setdefault(name, self.step_number)
            self.seen["refused"] += 1
            self.seen["passed over"] += fits
        return can

    def has_turn(self, request: Request) -> bool:
        """Whether nobody is before it for whom all is kept that gets free."""
        longest, since = next(iter(self.refused.items()), ("", self.step_number))
        return self.step_number - since <= turns.MAX_SKIPS or (
            number_of(request.request_id) <= number_of(longest)
        )

    def wake(self) -> None:
        before = len(self.waiting)
        self.ours.wake(self.waiting)
        back = {request.request_id for request in self.waiting} & self.parked.keys()
        self.seen["woken"] += len(back)
        assert len(self.waiting) == before + len(back) <= before + 1
        for name in back:
            del self.parked[name]
        assert len(self.parked) == self.ours.num_parked

    def nobody_is_forgotten(self, tried: Collection[Hashable]) -> None:
        """All of the parked ones that may start now were tried in this step, before somebody came
        with whom they can share."""
        for name, request in self.parked.items():
            plan = steering_of(request)
            assert plan is not None
            if self.has_turn(request) and self.ours._turns.parked[name][2] not in tried:
                assert not Counts([*self.holders.values(), plan]).fits()

    def start_some(self) -> None:
        """What the scheduler's loop over waiting requests does."""
        skipped: deque[Request] = deque()
        while len(self.running) < 10:
            self.wake()
            if not self.waiting:
                self.nobody_is_forgotten(self.ours._turns._failed if self.parked else ())
                break
            request = self.waiting.peek_request()
            if not self.may_start(request):
                skipped.appendleft(self.waiting.pop_request())
            elif self.random.random() < 0.1:
                self.seen["no KV blocks"] += 1
                break
            else:
                self.admit(request)
        left = self.ours.park(skipped)
        assert not left
        self.parked |= {request.request_id: request for request in skipped}

    def admit(self, request: Request) -> None:
        self.ours.admit(request)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        plan = steering_of(request)
        if plan is not None:
            self.holders[request.request_id] = plan
        self.refused.pop(request.request_id, None)
        self.ends.setdefault(request.request_id, self.step_number + self.random.randint(1, 12))

    def step(self) -> None:
        self.step_number += 1
        chance = self.random.random
        for request in [r for r in self.running if self.ends[r.request_id] <= self.step_number]:
            self.end(request)
        for request in [*self.waiting, *self.parked.values(), *self.running]:
            if chance() < 0.01:
                self.seen["aborted"] += 1
                self.end(request)
        for request in list(self.running):
            if chance() < 0.03:
                self.preempt(request)
        if chance() < 0.02:
            self.change_globals()
        if chance() < 0.01:
            self.sleep()
        if not self.waiting:
            self.wake()
            if not self.waiting:  # before anybody could share with a new one
                self.nobody_is_forgotten(())
        self.start_some()
        step = self.ours.message({r.request_id: 1 for r in self.running})
        self.worker.apply(self.finished, step)
        self.seen["sent"] += len(step.new_sets) if step is not None else 0
        self.finished = set()
        for request in self.running:
            request.num_computed_tokens += 1
            self.worker.check(request)
        self.worker.check_apart()
        held = Counts(list(self.holders.values()))
        assert self.ours.tables.sums.in_use == len(held.keys)
        assert self.ours.tables.terms.in_use == held.rows

    def change_globals(self) -> None:
        self.seen["changed globals"] += 1
        change = Change(drop=[("tiers", tier) for tier in TIERS])
        if self.random.random() >= 0.4:
            vector_set = vector_set_of({("pre_attn", 1): np.array(axis(self.random.randrange(4)))})
            tiers = {self.random.choice(["base", "decode"]): vector_set}
            change = Change(Globals(tiers=tiers))
        self.ours.set_state(
            self.ours.state.changed(change), [*self.waiting, *self.parked.values(), *self.running]
        )

    def sleep(self) -> None:
        self.seen["slept"] += 1
        self.ours.restore()
        self.worker = Worker(requests=self.worker.requests)


def number_of(name: str) -> int:
    """When it arrived."""
    return int(name[1:] or 0)


@pytest.mark.parametrize("skips", [turns.MAX_SKIPS, 5])
def test_ten_thousand_requests(skips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_SKIPS", skips)
    kinds, world = plans(), Simulation(seed=skips)
    arrivals = 0
    while arrivals < 5_000:
        for _ in range(world.random.randint(0, 3) if world.unstarted < 12 else 0):
            world.arrive(world.random.choice(kinds), f"r{arrivals}")
            arrivals += 1
        world.step()
    while world.unstarted or world.running:
        world.step()
    for what in (
        "preempted",
        "aborted",
        "changed globals",
        "slept",
        "refused",
        "woken",
        "no KV blocks",
        "sent",
    ):
        assert world.seen[what] > 20, f"the test tried too little: {world.seen}"
    assert (world.seen["passed over"] > 20) == (skips == 5)
    assert world.ours.tables.sums.in_use == world.ours.tables.terms.in_use == 0
    assert world.seen["sent"] < arrivals / 2, "equal contents were not shared"
    # Nothing leaked: one request can have everything there is.
    world.arrive(EVERYTHING, f"r{arrivals}")
    assert world.may_start(world.waiting[0])
    world.admit(world.waiting[0])
    world.step()
    assert (world.ours.tables.sums.in_use, world.ours.tables.terms.in_use) == (SLOTS, ROWS)
