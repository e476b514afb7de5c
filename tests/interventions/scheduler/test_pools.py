# SPDX-License-Identifier: Apache-2.0
"""The pool of a table's rows: what a worker that replays the messages finds, and who may start."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm.v1.interventions.scheduler import pools
from vllm.v1.interventions.scheduler.pools import MAX_STEP_BYTES, Pool

pytestmark = pytest.mark.quick

NAMES, OWNERS = "abcdefgh", ("one", "two", "three", "four", "five")


class Content(NamedTuple):
    """What its table writes into each of its rows."""

    name: str
    rows: int
    num_bytes: int


class Serving(RuleBasedStateMachine):
    """A pool, the worker's table, and a model that only counts."""

    @initialize(
        size=st.integers(1, 9),
        first=st.integers(0, 2),
        keeps=st.booleans(),
        rows=st.lists(st.integers(1, 4), min_size=len(NAMES), max_size=len(NAMES)),
        sizes=st.lists(
            st.sampled_from([0, 1, MAX_STEP_BYTES // 2 + 1, MAX_STEP_BYTES + 1]),
            min_size=len(NAMES),
            max_size=len(NAMES),
        ),
    )
    def start(self, size: int, first: int, keeps: bool, rows: list[int], sizes: list[int]) -> None:
        self.contents = {
            name: Content(name, 1 if keeps else number, num_bytes)
            for name, number, num_bytes in zip(NAMES, rows, sizes, strict=True)
        }
        self.pool = Pool[Content](size, lambda c: c.rows, lambda c: c.num_bytes, keeps, first)
        self.size, self.first, self.keeps = size, first, keeps
        self.worker: dict[int, str] = {}
        self.held: dict[str, list[str]] = {}
        self.unused: list[str] = []
        """What the table keeps though nobody uses it, the first to go first."""
        self.waiting: set[str] = set()
        """What is to be sent."""

    @property
    def used(self) -> set[str]:
        return {name for names in self.held.values() for name in names}

    def places(self) -> list[tuple[int, int]]:
        """(first row, end) of each content in use, sorted, between the edges of the table."""
        taken = [(self.pool.row(name), self.contents[name].rows) for name in self.used]
        end = self.first + self.size
        return [(0, self.first), *sorted((row, row + n) for row, n in taken), (end, end)]

    def has_room(self, new: list[str]) -> bool:
        """Whether each in its turn finds neighbours; those of one row only have to be enough."""
        gaps = [[stop, start] for (_, stop), (start, _) in pairwise(self.places())]
        for name in new:
            number = self.contents[name].rows
            gap = next((gap for gap in gaps if gap[1] - gap[0] >= number), None)
            if gap is None:
                return False
            gap[0] += number
        return True

    @rule(
        owner=st.sampled_from(OWNERS),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    )
    def arrive(self, owner: str, names: list[str]) -> None:
        if owner in self.held:
            return
        wanted = {name: self.contents[name] for name in names}
        new = [name for name in names if name not in self.used and name not in self.unused]
        size = sum(self.contents[name].num_bytes for name in new)
        before = sum(self.contents[name].num_bytes for name in self.waiting)
        sends = not (size and before and size + before > MAX_STEP_BYTES)
        coming = [name for name in names if name not in self.used]
        fits = self.pool.fits(wanted)
        assert fits == (sends and self.has_room(coming))
        if not fits:
            return
        self.pool.reserve(owner, wanted)
        self.held[owner] = names
        self.unused = [name for name in self.unused if name not in names]
        room = self.size - sum(self.contents[name].rows for name in self.used)
        while len(self.unused) > room:
            self.waiting.discard(self.unused.pop(0))
        self.waiting.update(new)

    @rule(owner=st.sampled_from((*OWNERS, "nobody")))
    def end(self, owner: str) -> None:
        """Finished, or never admitted."""
        self.pool.release(owner)
        for name in self.held.pop(owner, ()):
            if name not in self.used and self.keeps:
                self.unused.append(name)
            elif name not in self.used:
                self.waiting.discard(name)

    @rule()
    def step(self) -> None:
        """The worker writes what it is told, and finds what each owner reserved."""
        sent = self.pool.pop_new()
        assert len(sent) == len(self.waiting)
        assert {content.name for _, content in sent} == self.waiting
        self.waiting = set()
        for row, content in sent:
            assert self.first <= row <= row + content.rows <= self.first + self.size
            self.worker |= dict.fromkeys(range(row, row + content.rows), content.name)
        for name in (*self.used, *self.unused):
            row = self.pool.row(name)
            rows = range(row, row + self.contents[name].rows)
            assert [self.worker[row] for row in rows] == [name] * len(rows)
        assert self.pool.pop_new() == []

    @rule()
    def sleep(self) -> None:
        """The worker loses everything."""
        self.worker = {}
        self.pool.restore()
        self.waiting = {*self.used, *self.unused}

    @invariant()
    def no_row_is_used_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        places = self.places()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
        assert self.pool.in_use == sum(self.contents[name].rows for name in self.used)
        assert self.pool.row("") == 0


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_neighbours_are_the_lowest_that_fit() -> None:
    pool = Pool[int](8, rows=lambda number: number)
    for owner, number in (("a", 2), ("b", 1), ("c", 3), ("d", 2)):
        assert pool.fits({owner: number})
        pool.reserve(owner, {owner: number})
    assert [pool.row(owner) for owner in "abcd"] == [1, 3, 4, 7]
    pool.release("b")
    pool.release("d")
    assert pool.in_use == 5 and not pool.fits({"e": 3})
    assert pool.fits({"e": 2, "f": 1}) and not pool.fits({"f": 1, "g": 1, "e": 2})
    pool.reserve("two", {"e": 2, "f": 1})
    assert (pool.row("e"), pool.row("f")) == (7, 3)


def test_the_longest_unused_content_goes_first() -> None:
    pool = Pool[str](2, keeps=True)
    for name in "ab":
        pool.reserve(name, {name: name})
    for name in "ba":
        pool.release(name)
    old = pool.row("b")
    pool.pop_new()
    pool.reserve("c", {"c": "c"})
    assert pool.pop_new() == [(old, "c")]
    pool.reserve("a", {"a": "a"})
    assert pool.pop_new() == [] and not pool.fits({"b": "b"})


def test_what_ends_before_it_is_sent_takes_no_room_in_the_message() -> None:
    pool = Pool[str](2, num_bytes=lambda name: MAX_STEP_BYTES)
    pool.reserve("a", {"a": "a"})
    assert not pool.fits({"b": "b"})
    pool.release("a")
    assert pool.fits({"b": "b"}) and pool.pop_new() == []


def test_rows_are_taken_from_a_copy_to_ask() -> None:
    free = [5, 4, 2, 1]
    assert pools._take(free, 2) == 1 and free == [5, 4]
    assert pools._take(free, 3) is None and free == [5, 4]
