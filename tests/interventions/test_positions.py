# SPDX-License-Identifier: Apache-2.0
"""`Positions` against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.interventions.positions import Positions, Run

pytestmark = pytest.mark.quick

END = 40
RUNS = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=8)
ANYWHERE = st.integers(0, END + 2)


def members(runs: list[Run]) -> set[int]:
    return {p for start, stop in runs for p in range(start, stop)}


@given(RUNS)
def test_holds_what_its_runs_hold(runs: list[Run]) -> None:
    ours, theirs = Positions(runs), members(runs)
    assert ours.array().tolist() == sorted(theirs)
    assert ours.array().dtype == np.int64
    assert len(ours) == len(theirs)
    assert ours.stop == max(theirs, default=-1) + 1
    assert ours == Positions.of(theirs)
    assert hash(ours) == hash(Positions.of(theirs))


@given(RUNS)
def test_runs_are_sorted_disjoint_and_apart(runs: list[Run]) -> None:
    kept = Positions(runs).runs()
    assert all(start < stop for start, stop in kept)
    # Touching runs are one run: equal sets have one form, which is what is sent and compared.
    assert all(left[1] < right[0] for left, right in pairwise(kept))


@given(RUNS)
def test_survives_being_sent(runs: list[Run]) -> None:
    flat = Positions(runs).flat()
    assert all(type(x) is int for x in flat)
    assert Positions.from_flat(flat) == Positions(runs)


@given(RUNS, RUNS)
def test_union(left: list[Run], right: list[Run]) -> None:
    union = Positions(left) | Positions(right)
    assert union.array().tolist() == sorted(members(left) | members(right))


@given(RUNS, RUNS)
def test_difference(left: list[Run], right: list[Run]) -> None:
    difference = Positions(left) - Positions(right)
    assert difference.array().tolist() == sorted(members(left) - members(right))
    assert difference == Positions.of(members(left) - members(right))


@given(RUNS, RUNS)
def test_equal_exactly_when_the_members_are(left: list[Run], right: list[Run]) -> None:
    assert (Positions(left) == Positions(right)) == (members(left) == members(right))


@given(RUNS, st.lists(ANYWHERE, max_size=20))
def test_mask(runs: list[Run], asked: list[int]) -> None:
    mask = Positions(runs).mask(np.array(asked, dtype=np.int64))
    assert mask.dtype == bool
    assert mask.tolist() == [p in members(runs) for p in asked]


@given(RUNS, ANYWHERE, ANYWHERE)
def test_between(runs: list[Run], first: int, stop: int) -> None:
    between = Positions(runs).between(first, stop)
    assert between.dtype == np.int64
    assert between.tolist() == sorted(p for p in members(runs) if first <= p < stop)


@given(RUNS, ANYWHERE)
def test_first_from(runs: list[Run], position: int) -> None:
    later = [p for p in members(runs) if p >= position]
    assert Positions(runs).first_from(position) == min(later, default=None)


@given(RUNS, ANYWHERE)
def test_below(runs: list[Run], stop: int) -> None:
    assert Positions(runs).below(stop) == Positions.of(p for p in members(runs) if p < stop)


def test_a_long_run_stays_one_run() -> None:
    assert (Positions([(0, 10**6)]) | Positions([(10**6, 2 * 10**6)])).flat() == [0, 2 * 10**6]
    assert len(Positions([(0, 10**6)]) | Positions([(10**6 + 1, 2 * 10**6)])) == 2 * 10**6 - 1


def test_refuses_half_a_run() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Positions.from_flat([0, 1, 2])
