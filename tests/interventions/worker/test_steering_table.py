# SPDX-License-Identifier: Apache-2.0
"""The steering table: what its rows hold after each message, summed apart from the code under
test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN
from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GLOBALS_ALONE,
    GlobalTiers,
    StepInterventions,
    num_table_rows,
    table_row,
)
from vllm.v1.interventions.plan import Site, VectorSet, VectorSum
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.vectors import vector_set_of
from vllm.v1.interventions.worker.tables.sums import SteeringTable

pytestmark = pytest.mark.quick

SITES: list[Site] = [("pre_attn", 0), ("post_block", 0), ("pre_attn", 1)]
ELSEWHERE: Site = ("pre_attn", 9)
"""Of another pipeline stage."""

SLOTS = 3
ONE, TWO, THREE = (FIRST_SLOT + i for i in range(SLOTS))


def table(dtype: torch.dtype = torch.float32) -> SteeringTable:
    shape = TapShape(HIDDEN, str(dtype).removeprefix("torch."), {})
    return SteeringTable(SITES, num_table_rows(SLOTS), shape, torch.device("cpu"))


def vector_set(**at: float) -> VectorSet:
    """Vectors that hold one number; `s0=...` is that of the first site, `far` one of elsewhere."""
    sites = {f"s{i}": site for i, site in enumerate(SITES)} | {"far": ELSEWHERE}
    return vector_set_of({sites[name]: np.full(HIDDEN, x) for name, x in at.items()})


def made_of(*sets: tuple[VectorSet, float]) -> VectorSum:
    named = [(p.digest, scale) for p, scale in sets]
    return VectorSum(digest=repr(named), sets=named)


def apply(
    into: SteeringTable, sums: Sequence[tuple[int, VectorSum, bool]] = (), **fields: Any
) -> None:
    """One message.

    Args:
        sums: (slot, sum, whether the global tiers are added) of each that it writes.
    """
    into.take(StepInterventions(version=0, **fields))
    into.write([(slot, (vector_sum, inherit)) for slot, vector_sum, inherit in sums])


def tiers(**sets: VectorSet) -> GlobalTiers:
    return GlobalTiers(version=1, tiers=sets)


def rows(of: SteeringTable, slot: int) -> list[list[float]]:
    """[prompt, generated] of each site."""
    both = []
    for generated in (False, True):
        row = table_row(slot, generated)
        for site in SITES:
            assert len(of.at[site][row].unique()) == 1, "a row of one number"
        both.append([float(of.at[site][row, 0]) for site in SITES])
    return both


def test_rows_of_slots() -> None:
    used = [
        table_row(slot, generated)
        for slot in range(GLOBALS_ALONE, THREE + 1)
        for generated in (False, True)
    ]
    assert len(set(used)) == len(used)
    assert 0 not in used
    assert max(used) < num_table_rows(SLOTS)
    # Slot 0 has one row: a plain token is known by it.
    assert table_row(0, False) == table_row(0, True) == 0


def test_parts_and_scales_add_up() -> None:
    into, p, q = table(), vector_set(s0=1.0, s1=2.0, far=50.0), vector_set(s1=10.0, s2=20.0)
    apply(into, new_sets=[p, q], sums=[(ONE, made_of((p, 1.0), (q, -0.5)), True)])
    assert rows(into, ONE) == [[1.0, -3.0, -10.0]] * 2
    for slot in (0, GLOBALS_ALONE, TWO):
        assert rows(into, slot) == [[0.0] * 3] * 2
    # A slot that is used again holds nothing of before.
    apply(into, sums=[(ONE, made_of((p, 2.0)), True)], dropped_sets=[q.digest])
    assert rows(into, ONE) == [[2.0, 4.0, 0.0]] * 2


def test_the_same_part_twice_counts_twice() -> None:
    into, p = table(), vector_set(s0=1.0)
    apply(into, new_sets=[p], sums=[(ONE, made_of((p, 2.0), (p, 0.5)), True)])
    assert rows(into, ONE) == [[2.5, 0.0, 0.0]] * 2


def test_global_tiers_by_phase_and_inheritance() -> None:
    into, p = table(), vector_set(s0=1.0)
    base, prefill, decode = (
        vector_set(s0=10.0, far=1.0),
        vector_set(s0=100.0, s1=5.0),
        vector_set(s2=1000.0),
    )
    apply(
        into,
        new_sets=[p],
        tiers=tiers(base=base, prefill=prefill, decode=decode),
        sums=[(ONE, made_of((p, 1.0)), True), (TWO, made_of((p, 1.0)), False)],
    )
    assert rows(into, ONE) == [[111.0, 5.0, 0.0], [11.0, 0.0, 1000.0]]
    assert rows(into, TWO) == [[1.0, 0.0, 0.0]] * 2
    assert rows(into, GLOBALS_ALONE) == [[110.0, 5.0, 0.0], [10.0, 0.0, 1000.0]]
    assert rows(into, 0) == [[0.0] * 3] * 2


def test_whoever_brings_a_vector_rows_are_equal_bit_for_bit() -> None:
    """So blocks are shared: `vllm/v1/interventions/vectors.py:sum_digest`."""
    into, p, q = table(), vector_set(s0=0.1, s1=3.7e5), vector_set(s0=1e-9, s1=-0.3)
    apply(into, new_sets=[p, q], sums=[(ONE, made_of((p, 1.0)), False)])
    apply(into, tiers=tiers(base=p))
    assert rows(into, ONE) == rows(into, GLOBALS_ALONE)
    both = (ONE, made_of((p, 1.0)), True), (TWO, made_of((q, 1.0), (p, 1.0)), False)
    apply(into, tiers=tiers(base=q), sums=list(both))
    assert rows(into, ONE) == rows(into, TWO)
    apply(into, tiers=tiers(prefill=p, decode=p), sums=[(ONE, made_of((q, 1.0)), True)])
    assert rows(into, ONE) == rows(into, TWO) != rows(into, GLOBALS_ALONE)


def test_a_change_of_the_globals_reaches_slots_written_before_and_sends_no_part() -> None:
    into, p = table(), vector_set(s0=1.0)
    apply(
        into,
        new_sets=[p],
        sums=[(ONE, made_of((p, 1.0)), True), (TWO, made_of((p, 3.0)), False)],
    )
    apply(into, tiers=tiers(base=vector_set(s0=10.0)))
    assert rows(into, ONE) == [[11.0, 0.0, 0.0]] * 2
    assert rows(into, TWO) == [[3.0, 0.0, 0.0]] * 2
    apply(into, tiers=tiers(decode=vector_set(s0=20.0)))
    assert rows(into, ONE) == [[1.0, 0.0, 0.0], [21.0, 0.0, 0.0]]
    # And those written later, by a message of their own.
    apply(into, sums=[(THREE, made_of((p, 5.0)), True)])
    assert rows(into, THREE) == [[5.0, 0.0, 0.0], [25.0, 0.0, 0.0]]
    apply(into, tiers=tiers())
    for slot, value in ((ONE, 1.0), (THREE, 5.0), (GLOBALS_ALONE, 0.0)):
        assert rows(into, slot) == [[value, 0.0, 0.0]] * 2


def test_one_message_with_everything() -> None:
    """A slot changes hands, its old vector set goes, a new one comes, and the globals change."""
    into, p, q = table(), vector_set(s0=1.0), vector_set(s0=2.0)
    apply(into, new_sets=[p], sums=[(ONE, made_of((p, 1.0)), True)])
    apply(
        into,
        new_sets=[q],
        tiers=tiers(base=vector_set(s0=10.0)),
        sums=[(ONE, made_of((q, 1.0)), True), (TWO, made_of((q, 3.0)), False)],
        dropped_sets=[p.digest],
    )
    assert rows(into, ONE) == [[12.0, 0.0, 0.0]] * 2
    assert rows(into, TWO) == [[6.0, 0.0, 0.0]] * 2
    # Both directions of a slot's inheritance.
    apply(into, sums=[(ONE, made_of((q, 1.0)), False), (TWO, made_of((q, 3.0)), True)])
    assert rows(into, ONE) == [[2.0, 0.0, 0.0]] * 2
    assert rows(into, TWO) == [[16.0, 0.0, 0.0]] * 2


def test_a_dropped_part_is_gone() -> None:
    into, p, q = table(), vector_set(s0=1.0), vector_set(s0=2.0)
    apply(into, new_sets=[p, q], sums=[(ONE, made_of((p, 1.0)), True)])
    apply(into, dropped_sets=[q.digest])
    with pytest.raises(KeyError):
        apply(into, sums=[(TWO, made_of((q, 1.0)), True)])
    assert rows(into, ONE) == [[1.0, 0.0, 0.0]] * 2


def test_nothing_survives_sleep() -> None:
    into, p = table(), vector_set(s0=1.0)
    apply(
        into,
        new_sets=[p],
        tiers=tiers(base=vector_set(s0=10.0)),
        sums=[(ONE, made_of((p, 1.0)), True)],
    )
    for site in SITES:
        into.at[site].fill_(float("nan"))  # what memory holds after sleep
    into.forget()
    assert rows(into, ONE) == rows(into, GLOBALS_ALONE) == [[0.0] * 3] * 2
    # The scheduler sends all of it again, the vector sets included.
    apply(
        into,
        new_sets=[p],
        tiers=tiers(base=vector_set(s0=10.0)),
        sums=[(ONE, made_of((p, 1.0)), True)],
    )
    assert rows(into, ONE) == [[11.0, 0.0, 0.0]] * 2


def test_summed_in_float32_and_cast_once() -> None:
    into, big, small = table(torch.bfloat16), vector_set(s0=1.0), vector_set(s0=2.0**-9)
    apply(
        into,
        new_sets=[big, small],
        tiers=tiers(base=vector_set(s0=2.0**-9), prefill=vector_set(s0=2.0**-9)),
        sums=[(ONE, made_of((big, 1.0), (small, 2.0)), True)],
    )
    # bfloat16 has 8 bits: each small term alone would be lost, four together are one step.
    assert rows(into, ONE) == [[1.0 + 2.0**-7, 0.0, 0.0], [1.0 + 2.0**-7, 0.0, 0.0]]
    one_by_one = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(4):
        one_by_one += 2.0**-9
    assert one_by_one == 1.0
    apply(into, sums=[(ONE, made_of((big, 1.0), (small, 1.0)), False)])
    assert rows(into, ONE) == [[1.0, 0.0, 0.0]] * 2


NUMBERS = st.integers(-50, 50).map(float)
PARTS = st.dictionaries(st.sampled_from(["s0", "s1", "s2", "far"]), NUMBERS, min_size=1)


@given(
    st.lists(PARTS, min_size=1, max_size=4, unique_by=lambda p: tuple(sorted(p.items()))),
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=SLOTS,
    ),
    st.lists(st.dictionaries(st.sampled_from(["base", "prefill", "decode"]), PARTS), max_size=2),
)
def test_whatever_the_messages_the_rows_are_the_sums(
    given_parts: list[dict[str, float]],
    asked: list[tuple[list[tuple[int, int]], bool]],
    changes: list[dict[str, dict[str, float]]],
) -> None:
    into = table()
    sets = [vector_set(**p) for p in given_parts]
    sums = [
        (FIRST_SLOT + i, made_of(*((sets[n % len(sets)], float(s)) for n, s in chosen)), inherit)
        for i, (chosen, inherit) in enumerate(asked)
    ]
    apply(into, new_sets=sets, sums=sums)
    for change in [*changes, None]:
        current = change or {}
        apply(into, tiers=tiers(**{tier: vector_set(**p) for tier, p in current.items()}))
        for i, (chosen, inherit) in enumerate(asked):
            for generated, phase in ((False, "prefill"), (True, "decode")):
                want = [0.0] * 3
                for site in range(3):
                    for n, scale in chosen:
                        want[site] += scale * given_parts[n % len(sets)].get(f"s{site}", 0.0)
                    if inherit:
                        for tier in ("base", phase):
                            want[site] += current.get(tier, {}).get(f"s{site}", 0.0)
                assert rows(into, FIRST_SLOT + i)[generated] == want
