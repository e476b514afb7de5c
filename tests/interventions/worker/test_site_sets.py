# SPDX-License-Identifier: Apache-2.0
"""Sets of sites have graphs of their own once steps want them often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.interventions.worker.variants import site_sets
from vllm.v1.interventions.worker.variants.site_sets import SETS, STEPS, SiteSets

pytestmark = pytest.mark.quick

NONE, ALL = frozenset[int](), frozenset(range(6))


def of(*sites: int) -> frozenset[int]:
    return frozenset(sites)


def wanted(sets: SiteSets, sites: frozenset[int], steps: int = STEPS) -> set[frozenset[int]]:
    """What is chosen in so many steps that want these."""
    return {sets.choose(sites, keeps=True) for _ in range(steps)}


def test_a_set_is_kept_once_it_is_wanted_often() -> None:
    sets = SiteSets([ALL, NONE])
    assert wanted(sets, of(1), STEPS - 1) == {ALL}
    assert wanted(sets, of(1), 1) == {of(1)}
    assert wanted(sets, of(1), 1) == {of(1)} and wanted(sets, of(2), 1) == {ALL}
    assert wanted(sets, NONE) == {NONE} and wanted(sets, ALL) == {ALL}
    assert sets.sets == [ALL, NONE, of(1)]
    sets.clear()
    assert sets.sets == [ALL, NONE] and wanted(sets, of(1), 1) == {ALL}


def test_nothing_is_kept_where_it_may_not_be() -> None:
    sets = SiteSets([ALL, NONE])
    assert {sets.choose(of(1), keeps=False) for _ in range(2 * STEPS)} == {ALL}


def test_the_one_not_used_for_longest_goes() -> None:
    sets = SiteSets([ALL, NONE])
    singles = [of(site) for site in range(SETS + 1)]
    for single in singles[:SETS]:
        wanted(sets, single)
    wanted(sets, singles[0], 1)
    wanted(sets, singles[SETS])
    assert set(sets.sets) == {ALL, NONE, *singles} - {singles[1]}


def test_what_is_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever clients ask for."""
    monkeypatch.setattr(site_sets, "_COUNTED", 3)
    sets = SiteSets([frozenset(range(100))])
    for site in range(90):
        wanted(sets, of(site), 1)
        assert len(sets._wanted) <= 3


@given(st.lists(st.frozensets(st.integers(0, 5)), max_size=60))
def test_what_is_chosen_has_what_is_wanted(steps: list[frozenset[int]]) -> None:
    """And no other that there is has fewer sites."""
    sets = SiteSets([ALL, NONE])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_sets, "STEPS", 2)
        for sites in steps:
            chosen = sets.choose(sites, keeps=True)
            assert chosen >= sites and chosen in sets.sets
            assert len(chosen) == min(len(s) for s in sets.sets if s >= sites)
            assert len(sets.sets) <= 2 + SETS
