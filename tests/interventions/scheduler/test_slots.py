# SPDX-License-Identifier: Apache-2.0
"""Slots of vector sums: what a worker that replays the messages finds in each request's slots."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from tests.support.plans import HIDDEN, asking, vector_sum
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GLOBALS_ALONE,
    NOTHING,
    ROWS_PER_SLOT,
    StepInterventions,
)
from vllm.v1.interventions.plan import UNSTEERED, Plan, Segment, SteeringPlan, VectorSet, VectorSum
from vllm.v1.interventions.scheduler.pools import MAX_STEP_BYTES
from vllm.v1.interventions.scheduler.tables import Tables

pytestmark = pytest.mark.quick

BIG = MAX_STEP_BYTES // 2 + 1
"""Two vector sets of this size are more than a step may send."""

CATALOGUE = {
    **{name: vector_sum(name) for name in "abc"},
    "d": vector_sum("d", "a", "b"),
    "e": vector_sum("e", "c", "shared"),
    "f": vector_sum("f", "shared"),
}
ASKS = st.lists(st.sampled_from(sorted(CATALOGUE)), min_size=1, max_size=2, unique=True)


def slots_of(size: int) -> Tables:
    """Tables with so many slots for requests."""
    return Tables(SteeringConfig(max_steering_configs=size), HIDDEN)


def slot_of(table: Tables, digest: str, inherit: bool) -> int:
    """The slot that a request with a sum is told, or that of nobody's for `UNSTEERED`."""
    plan = Plan(SteeringPlan([Segment(0, digest, UNSTEERED)], inherit))
    [row] = table.worker_request("", plan, num_prompt_tokens=1, tiers=True).table_rows
    return int(row) // ROWS_PER_SLOT


def uploads_of(
    table: Tables,
) -> tuple[list[VectorSet], list[tuple[int, VectorSum, bool]], list[str]]:
    """(new vector sets, (slot, sum, inherit) to write, dropped vector sets) of the coming step."""
    step = StepInterventions(version=0)
    table.put_new(step)
    sums = [(slot, *content) for slot, content in step.placed.get("sums", [])]
    return step.new_sets, sums, step.dropped_sets


class Worker:
    """It only writes what it is told, and keeps vector sets as long as it must."""

    def __init__(self) -> None:
        self.got: list[VectorSet] = []
        self.sets: dict[str, int] = {}
        self.slots: dict[int, tuple[VectorSum, bool]] = {}

    def apply(self, table: Tables) -> list[tuple[int, str, bool]]:
        """(slot, digest, inherit) of what was written."""
        new, uploads, dropped = uploads_of(table)
        for vector_set in new:
            assert vector_set.digest not in self.sets, "sent twice"
            self.sets[vector_set.digest] = len(vector_set.data)
        self.got = new
        for slot, what, inherit in uploads:
            assert FIRST_SLOT <= slot < FIRST_SLOT + table.sums.size
            assert all(name in self.sets for name, _ in what.sets)
            self.slots[slot] = what, inherit
        for name in dropped:
            del self.sets[name]
        # A vector set is kept as long as a slot has it: a change of the global tiers needs it.
        made_of = {name for what, _ in self.slots.values() for name, _ in what.sets}
        assert made_of == self.sets.keys()
        return [(slot, what.digest, inherit) for slot, what, inherit in uploads]


class Serving(RuleBasedStateMachine):
    """A scheduler at work, and a worker."""

    waiting: Bundle[str] = Bundle("waiting")
    seen: Bundle[str] = Bundle("seen")

    @initialize(size=st.integers(2, 4))
    def start(self, size: int) -> None:
        self.table = slots_of(size)
        self.worker = Worker()
        self.asks: dict[str, SteeringPlan] = {}
        self.admitted: set[str] = set()
        self.fresh: list[SteeringPlan] = []
        self.restored = False
        self.count = 0

    @rule(target=waiting, ask=ASKS, inherit=st.booleans(), big=st.booleans())
    def arrive(self, ask: list[str], inherit: bool, big: bool) -> str:
        self.count += 1
        name = f"r{self.count}"
        sums = [CATALOGUE[digest] for digest in ask]
        self.asks[name] = asking(*sums, size=BIG if big else 16, inherit=inherit)
        return name

    @rule(target=seen, name=consumes(waiting))
    def try_to_admit(self, name: str) -> str:
        """Admitted or not, it may be asked about again."""
        self.try_again(name)
        return name

    @rule(name=seen)
    def try_again(self, name: str) -> None:
        ask = self.asks.get(name)
        if ask is not None and name not in self.admitted and self.table.fits(name, Plan(ask)):
            self.table.reserve(name, Plan(ask))
            self.admitted.add(name)
            self.fresh.append(ask)

    @rule(name=seen)
    def end(self, name: str) -> None:
        """Finished, or aborted while it waited."""
        if name in self.asks:
            del self.asks[name]
            self.table.release(name)
            self.admitted.discard(name)

    @rule()
    def step(self) -> None:
        """The forward: every admitted request finds its own sums in its slots."""
        self.worker.apply(self.table)
        sent = {vector_set.digest for vector_set in self.worker.got}
        if (
            sum(len(vector_set.data) for vector_set in self.worker.got) > MAX_STEP_BYTES
            and not self.restored
        ):
            # Only a plan that is larger by itself, and it goes alone.
            assert any(
                sent <= {vector_set.digest for vector_set in plan.sets} for plan in self.fresh
            )
        self.fresh, self.restored = [], False
        for name in self.admitted:
            plan = self.asks[name]
            for what in plan.sums:
                slot = slot_of(self.table, what.digest, plan.inherit)
                assert self.worker.slots[slot] == (what, plan.inherit)
        assert uploads_of(self.table) == ([], [], [])

    @rule()
    def sleep(self) -> None:
        """The worker loses everything."""
        self.worker, self.restored = Worker(), True
        self.table.restore()

    @invariant()
    def never_more_than_there_is(self) -> None:
        if not hasattr(self, "table"):
            return
        plans = [self.asks[name] for name in self.admitted]
        needed = {(c.digest, plan.inherit) for plan in plans for c in plan.sums}
        assert self.table.sums.in_use == len(needed) <= self.table.sums.size
        slots = {slot_of(self.table, *key) for key in needed}
        assert len(slots) == len(needed)
        assert not slots & {NOTHING, GLOBALS_ALONE}


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def admit(table: Tables, name: str, *ask: VectorSum, size: int = 16, inherit: bool = True) -> bool:
    plan = asking(*ask, size=size, inherit=inherit)
    fits = table.fits(name, Plan(plan))
    if fits:
        table.reserve(name, Plan(plan))
    return fits


def written(table: Tables) -> list[str]:
    """What the next step writes into the table."""
    return [c.digest for _, c, _ in uploads_of(table)[1]]


A, B, C, D = (vector_sum(name) for name in "abcd")


def test_two_slots_belong_to_nobody() -> None:
    table = slots_of(2)
    assert slot_of(table, UNSTEERED, inherit=False) == NOTHING
    assert slot_of(table, UNSTEERED, inherit=True) == GLOBALS_ALONE


def test_equal_contents_share_a_slot_and_are_sent_once() -> None:
    table = slots_of(2)
    assert admit(table, "one", A, B)
    assert admit(table, "two", A)
    assert table.sums.in_use == 2
    assert written(table) == ["a", "b"]
    table.release("one")
    assert not admit(table, "three", C, D)
    assert admit(table, "four", C)  # b is idle, a is still in use by "two"
    assert slot_of(table, "a", True) != slot_of(table, "c", True)


def test_with_and_without_the_globals_are_two_slots_of_the_same_parts() -> None:
    table = slots_of(2)
    assert admit(table, "one", A)
    assert admit(table, "two", A, inherit=False)
    assert slot_of(table, "a", True) != slot_of(table, "a", False)
    new, uploads, _ = uploads_of(table)
    assert [p.digest for p in new] == ["a"]
    assert [inherit for _, _, inherit in uploads] == [True, False]
    assert not admit(table, "three", B)


def test_all_of_a_requests_contents_or_none() -> None:
    table = slots_of(2)
    assert admit(table, "one", A)
    assert not admit(table, "two", B, C)
    assert table.sums.in_use == 1
    assert admit(table, "three", A, B)


def test_a_content_used_again_soon_is_not_sent_again() -> None:
    table = slots_of(2)
    admit(table, "one", A)
    assert written(table) == ["a"]
    table.release("one")
    assert table.sums.in_use == 0
    assert admit(table, "two", A)
    assert uploads_of(table) == ([], [], [])


def test_the_longest_idle_content_goes_first() -> None:
    table = slots_of(2)
    admit(table, "one", A)
    admit(table, "two", B)
    table.release("two")
    table.release("one")
    old = slot_of(table, "b", True)
    uploads_of(table)
    admit(table, "three", C)
    new, uploads, dropped = uploads_of(table)
    assert uploads == [(old, C, True)]
    assert ([p.digest for p in new], dropped) == (["c"], ["b"])
    assert admit(table, "four", A)
    assert uploads_of(table) == ([], [], [])


def test_a_part_stays_while_another_content_is_made_of_it() -> None:
    table, both = slots_of(1), vector_sum("both", "a", "b")
    admit(table, "one", A)
    uploads_of(table)
    table.release("one")
    admit(table, "two", both)
    new, _, dropped = uploads_of(table)
    assert ([p.digest for p in new], dropped) == (["b"], [])
    table.release("two")
    admit(table, "three", B)
    new, _, dropped = uploads_of(table)
    assert ([p.digest for p in new], dropped) == ([], ["a"])


def test_what_was_never_sent_is_not_taken_back() -> None:
    table = slots_of(1)
    admit(table, "one", A)
    table.release("one")
    admit(table, "two", B)
    new, uploads, dropped = uploads_of(table)
    assert ([p.digest for p in new], dropped) == (["b"], [])
    assert [c.digest for _, c, _ in uploads] == ["b"]


def test_releasing_a_request_that_never_ran_takes_nothing_from_others() -> None:
    table = slots_of(1)
    admit(table, "one", A)
    table.release("two")
    assert table.sums.in_use == 1
    assert not admit(table, "four", B)


def test_a_step_sends_a_bounded_number_of_bytes() -> None:
    table = slots_of(4)
    assert admit(table, "one", A, size=BIG)
    assert not admit(table, "two", B, size=BIG)
    uploads_of(table)
    assert admit(table, "two", B, size=BIG)
    assert uploads_of(table)[1] == [(slot_of(table, "b", True), B, True)]


def test_a_single_larger_content_goes_alone() -> None:
    table = slots_of(4)
    huge = vector_sum("huge")
    assert admit(table, "one", A)
    assert not admit(table, "two", huge, size=MAX_STEP_BYTES + 1)
    uploads_of(table)
    assert admit(table, "two", huge, size=MAX_STEP_BYTES + 1)
    assert not admit(table, "three", B)
    # What sends nothing need not wait for a step of its own.
    assert admit(table, "four", A)
    uploads_of(table)
    assert admit(table, "three", B)


def test_a_request_does_not_evict_its_own_idle_content() -> None:
    table, idle, other, new = (
        slots_of(2),
        vector_sum("idle"),
        vector_sum("other"),
        vector_sum("new"),
    )
    for one in (idle, other):
        assert admit(table, one.digest, one)
        table.release(one.digest)
    uploads_of(table)
    assert admit(table, "both", new, idle)
    assert written(table) == ["new"]
    assert not admit(table, "evicted", other)


def test_after_sleep_everything_is_sent_again_and_idle_contents_still_count() -> None:
    table = slots_of(3)
    admit(table, "one", A)
    admit(table, "two", B, inherit=False)
    table.release("two")
    uploads_of(table)
    table.restore()
    new, uploads, dropped = uploads_of(table)
    assert sorted(p.digest for p in new) == ["a", "b"]
    assert sorted((c.digest, inherit) for _, c, inherit in uploads) == [("a", True), ("b", False)]
    assert dropped == []
    assert admit(table, "three", B, inherit=False)
    assert uploads_of(table) == ([], [], [])
