# SPDX-License-Identifier: Apache-2.0
"""The slot table: what a worker that replays the uploads finds in each request's slots."""

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

from tests.plans import content
from vllm.v1.interventions import UNSTEERED, Content
from vllm.v1.steering import slots as slots_module
from vllm.v1.steering.slots import MAX_SKIPS, MAX_STEP_BYTES, SlotTable

BIG = MAX_STEP_BYTES // 2 + 1
"""Two of these are more than a step may send."""

CATALOGUE = {name: content(name, BIG if name in "XY" else 16) for name in "abcdefXY"}
ASKS = st.lists(st.sampled_from(sorted(CATALOGUE)), min_size=1, max_size=2, unique=True)


class Serving(RuleBasedStateMachine):
    """A scheduler at work, and a worker that only writes what it is told."""

    waiting: Bundle[str] = Bundle("waiting")
    running: Bundle[str] = Bundle("running")

    @initialize(size=st.integers(2, 4))
    def start(self, size: int) -> None:
        self.table = SlotTable(size)
        self.asks: dict[str, list[Content]] = {}
        self.admitted: set[str] = set()
        self.worker: dict[int, str] = {}
        self.count = 0

    @rule(target=waiting, ask=ASKS)
    def arrive(self, ask: list[str]) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.asks[name] = [CATALOGUE[digest] for digest in ask]
        return name

    @rule(target=running, name=consumes(waiting))
    def try_to_admit(self, name: str) -> str:
        """Admitted or not, it may be asked about again: `running` is "seen"."""
        if self.table.can_reserve(name, self.asks[name]):
            self.table.reserve(name, self.asks[name])
            self.admitted.add(name)
        return name

    @rule(name=running)
    def try_again(self, name: str) -> None:
        """A waiting request, or a running one that was preempted and comes back."""
        if name not in self.asks:
            return
        fits = self.table.can_reserve(name, self.asks[name])
        if fits:
            self.table.reserve(name, self.asks[name])
            self.admitted.add(name)

    @rule(name=running)
    def end(self, name: str) -> None:
        """Finished, or aborted while it waited."""
        if name in self.asks:
            self.table.release(name, self.asks.pop(name))
            self.admitted.discard(name)

    @rule()
    def step(self) -> None:
        """The forward: every admitted request finds its own contents in its slots."""
        uploads = self.table.take_uploads()
        sizes = [len(c.data) for _, c in uploads]
        if len(uploads) > 2:
            assert sum(sizes) <= MAX_STEP_BYTES
        for slot, what in uploads:
            assert 1 <= slot <= self.table.size
            self.worker[slot] = what.digest
        for name in self.admitted:
            for what in self.asks[name]:
                assert self.worker[self.table.slot(what.digest)] == what.digest
        assert self.table.take_uploads() == []

    @invariant()
    def never_more_than_there_is(self) -> None:
        if not hasattr(self, "table"):
            return
        needed = {c.digest for name in self.admitted for c in self.asks[name]}
        assert self.table.in_use == len(needed) <= self.table.size
        assert len({self.table.slot(digest) for digest in needed}) == len(needed)
        assert 0 not in {self.table.slot(digest) for digest in needed}


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def admit(table: SlotTable, name: str, *ask: Content) -> bool:
    fits = table.can_reserve(name, list(ask))
    if fits:
        table.reserve(name, list(ask))
    return fits


A, B, C, D = (content(name) for name in "abcd")


def test_slot_zero_is_for_the_unsteered() -> None:
    assert SlotTable(2).slot(UNSTEERED) == 0


def test_equal_contents_share_a_slot_and_are_sent_once() -> None:
    table = SlotTable(2)
    assert admit(table, "one", A, B)
    assert admit(table, "two", A)
    assert table.in_use == 2
    assert [c.digest for _, c in table.take_uploads()] == ["a", "b"]
    table.release("one", [A, B])
    assert not admit(table, "three", C, D)
    assert admit(table, "four", C)  # b is idle, a is still in use by "two"
    assert table.slot("a") != table.slot("c")


def test_all_of_a_requests_contents_or_none() -> None:
    table = SlotTable(2)
    assert admit(table, "one", A)
    assert not admit(table, "two", B, C)
    assert table.in_use == 1
    assert admit(table, "three", A, B)


def test_admitted_again_is_no_change() -> None:
    table = SlotTable(1)
    assert admit(table, "one", A)
    table.take_uploads()
    assert admit(table, "one", A)  # preempted and back
    assert table.take_uploads() == []
    table.release("one", [A])
    assert table.in_use == 0


def test_a_content_used_again_soon_is_not_sent_again() -> None:
    table = SlotTable(2)
    admit(table, "one", A)
    table.take_uploads()
    table.release("one", [A])
    assert admit(table, "two", A)
    assert table.take_uploads() == []


def test_the_longest_idle_content_goes_first() -> None:
    table = SlotTable(2)
    admit(table, "one", A)
    admit(table, "two", B)
    table.release("two", [B])
    table.release("one", [A])
    old = table.slot("b")
    table.take_uploads()
    admit(table, "three", C)
    assert table.take_uploads() == [(old, C)]
    assert admit(table, "four", A)
    assert table.take_uploads() == []


def test_releasing_a_request_that_never_ran_takes_nothing_from_others() -> None:
    table = SlotTable(1)
    admit(table, "one", A)
    table.release("two", [A])
    table.release("three", [B])
    assert table.in_use == 1
    assert not admit(table, "four", B)


def test_a_step_sends_a_bounded_number_of_bytes() -> None:
    table = SlotTable(4)
    first, second = content("big 1", BIG), content("big 2", BIG)
    assert admit(table, "one", first)
    assert not admit(table, "two", second)
    table.take_uploads()
    assert admit(table, "two", second)
    assert table.take_uploads() == [(table.slot("big 2"), second)]


def test_a_single_larger_content_goes_alone() -> None:
    table = SlotTable(4)
    huge = content("huge", MAX_STEP_BYTES + 1)
    assert admit(table, "one", A)
    assert not admit(table, "two", huge)
    table.take_uploads()
    assert admit(table, "two", huge)
    assert not admit(table, "three", B)
    # What sends nothing need not wait for a step of its own.
    assert admit(table, "four", A)
    table.take_uploads()
    assert admit(table, "three", B)


def steps_until_admitted(sharing: bool) -> int | None:
    """How long a request for both slots waits while small ones come every step and stay for two.

    Args:
        sharing: whether all the small ones have the same content, so that its slot is never free.
    """
    table = SlotTable(2)
    ends: dict[int, tuple[str, Content]] = {}
    for step in range(4 * MAX_SKIPS):
        if step in ends:
            name, done = ends.pop(step)
            table.release(name, [done])
        if step and admit(table, "patient", C, D):
            return step
        small = A if sharing else content(f"small {step}")
        if admit(table, f"r{step}", small):
            ends[step + 2] = (f"r{step}", small)
        table.take_uploads()
    return None


@pytest.mark.parametrize("sharing", [False, True])
def test_nobody_starves(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = steps_until_admitted(sharing)
    assert waited is not None
    assert MAX_SKIPS < waited <= MAX_SKIPS + 4
    monkeypatch.setattr(slots_module, "MAX_SKIPS", 10**9)
    assert steps_until_admitted(sharing) is None


def test_a_preempted_request_comes_back_past_a_starved_one() -> None:
    table = SlotTable(2)
    assert admit(table, "one", A)
    for _ in range(MAX_SKIPS + 2):
        assert not admit(table, "patient", B, C)
    assert not admit(table, "two", A)
    assert admit(table, "one", A)
    table.release("one", [A])
    assert not admit(table, "two", A)
    assert admit(table, "patient", B, C)
    table.release("patient", [B, C])
    assert admit(table, "two", A)


def test_an_aborted_request_blocks_nobody() -> None:
    table = SlotTable(2)
    admit(table, "one", A)
    for _ in range(MAX_SKIPS + 2):
        table.can_reserve("patient", [B, C])
    assert not admit(table, "two", D)
    table.release("patient", [B, C])
    assert admit(table, "two", D)


def test_a_request_does_not_evict_its_own_idle_content() -> None:
    table, idle, other, new = SlotTable(2), content("idle"), content("other"), content("new")
    for one in (idle, other):
        table.reserve(one.digest, [one])
        table.release(one.digest, [one])
    table.take_uploads()
    assert table.can_reserve("both", [new, idle])
    table.reserve("both", [new, idle])
    assert [c.digest for _, c in table.take_uploads()] == ["new"]
    assert not table.can_reserve("evicted", [other])
