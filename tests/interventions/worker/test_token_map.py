# SPDX-License-Identifier: Apache-2.0
"""Each token's rows, against a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.worker.token_map import TokenMap

pytestmark = pytest.mark.quick

MAX_TOKENS = 64
CPU = torch.device("cpu")


def told(firsts: list[int], rows: list[int], programs: list[int]) -> WorkerRequest:
    return WorkerRequest(
        firsts=np.array(firsts, np.int64),
        table_rows=np.array(rows, np.int32),
        programs=np.array(programs, np.int32),
        capture_sites=(),
    )


@dataclass
class Request:
    """One of a batch; `known` tells the map of it."""

    worker: WorkerRequest
    positions: list[int]
    known: bool

    def at(self, position: int) -> tuple[int, int]:
        """(table row, program) there."""
        if not self.known:
            return 0, 0
        found = (0, 0)
        told = zip(self.worker.firsts, self.worker.table_rows, self.worker.programs, strict=True)
        for first, row, program in told:
            if first <= position:
                found = int(row), int(program)
        return found


@st.composite
def requests(draw: st.DrawFn) -> Request:
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 30), max_size=4)))]
    rows = draw(st.lists(st.integers(0, 9), min_size=len(firsts), max_size=len(firsts)))
    programs = draw(st.lists(st.integers(0, 4), min_size=len(firsts), max_size=len(firsts)))
    start, count = draw(st.integers(0, 35)), draw(st.integers(1, 7))
    if draw(st.booleans()):
        start += 1 << 31  # a position is not bounded by an int32
    known = draw(st.integers(0, 3)) > 0
    return Request(told(firsts, rows, programs), list(range(start, start + count)), known)


def run(token_map: TokenMap, names: list[str], positions: list[list[int]]) -> None:
    flat = [p for one in positions for p in one]
    # Longer than the step, as the runners' buffers are: what lies behind is anything.
    buffer = torch.full((MAX_TOKENS + 5,), 7, dtype=torch.int64)
    buffer[: len(flat)] = torch.tensor(flat)
    token_map.map(names, np.array([len(p) for p in positions], np.int32), buffer)


def found(token_map: TokenMap) -> list[tuple[int, int]]:
    return list(zip(token_map.slots.tolist(), token_map.program.tolist(), strict=True))


@given(st.lists(st.lists(requests(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_every_token_and_no_padding(batches: list[list[Request]]) -> None:
    token_map = TokenMap(MAX_TOKENS, CPU)
    for number, batch in enumerate(batches):
        names = [f"{number}-{i}" for i in range(len(batch))]
        known = {n: r.worker for n, r in zip(names, batch, strict=True) if r.known}
        gone = {f"{number - 1}-{i}" for i in range(5)}
        token_map.update(gone, known)
        run(token_map, names, [r.positions for r in batch])
        want = [request.at(p) for request in batch for p in request.positions]
        assert found(token_map) == want + [(0, 0)] * (MAX_TOKENS - len(want))


def one(row: int) -> WorkerRequest:
    return told([0, 5], [row, row + 1], [0, 0])


def test_a_step_with_nothing_new_sends_nothing() -> None:
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": one(4)})
    run(token_map, ["a", "b"], [[3], [8]])
    assert found(token_map)[:3] == [(4, 0), (0, 0), (0, 0)]
    uploaded = token_map._batch
    run(token_map, ["a", "b"], [[5], [9]])
    assert token_map._batch is uploaded
    assert found(token_map)[:3] == [(5, 0), (0, 0), (0, 0)]
    run(token_map, ["a", "b"], [[6, 7], [10]])
    assert token_map._batch is not uploaded
    assert found(token_map)[:4] == [(5, 0), (5, 0), (0, 0), (0, 0)]


def test_the_batch_is_not_stale() -> None:
    """The same ids and counts, and yet something else acts."""
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": one(4), "b": one(8)})
    run(token_map, ["a", "b"], [[1], [1]])
    assert found(token_map)[:2] == [(4, 0), (8, 0)]
    token_map.update(set(), {"b": one(10)})  # back after a preemption, or the globals changed
    run(token_map, ["a", "b"], [[2], [2]])
    assert found(token_map)[:2] == [(4, 0), (10, 0)]
    run(token_map, ["b", "a"], [[3], [3]])
    assert found(token_map)[:2] == [(10, 0), (4, 0)]
    # An id that is used again, by a plain request the map is told of, and by one it is not.
    token_map.update({"a"}, {"a": told([0, 5], [0, 0], [0, 0])})
    run(token_map, ["b", "a"], [[4], [4]])
    assert found(token_map)[:2] == [(10, 0), (0, 0)]
    token_map.update({"b"}, {})
    run(token_map, ["b", "a"], [[4], [4]])
    assert found(token_map)[:2] == [(0, 0), (0, 0)]
    token_map.update(set(), {"a": one(4), "b": one(8)})
    run(token_map, ["b", "a"], [[1], [1]])
    token_map.update({"a"}, {})
    run(token_map, ["b", "a"], [[2], [2]])
    assert found(token_map)[:2] == [(8, 0), (0, 0)]


def test_rows_that_no_position_changes_are_written_once() -> None:
    """And again after any other forward."""
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": told([0], [4], [2]), "b": told([0], [6], [0]), "c": one(8)})

    def steady(written: bool) -> None:
        token_map.slots[0] = 9
        run(token_map, ["a", "b"], [[3], [8]])
        assert found(token_map)[:3] == [(4 if written else 9, 2), (6, 0), (0, 0)]
        token_map.slots[0] = 4

    steady(written=True)
    steady(written=False)
    token_map.clear(0)  # a dummy forward
    steady(written=True)
    run(token_map, ["c", "b"], [[4], [9]])
    assert found(token_map)[:3] == [(8, 0), (6, 0), (0, 0)]
    steady(written=True)
    token_map.update(set(), {"a": told([0], [5], [0])})
    run(token_map, ["a", "b"], [[4], [9]])
    assert found(token_map)[:3] == [(5, 0), (6, 0), (0, 0)]
    run(token_map, ["c", "b"], [[4], [9]])
    run(token_map, ["c", "b"], [[5], [10]])  # a second segment, so positions matter
    assert found(token_map)[:3] == [(9, 0), (6, 0), (0, 0)]


def test_an_id_that_ends_and_comes_back_in_one_step_is_the_new_one() -> None:
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": one(4)})
    token_map.update({"a"}, {"a": one(6)})
    run(token_map, ["a"], [[0]])
    assert found(token_map)[:2] == [(6, 0), (0, 0)]


def test_padding_is_cleared_when_the_batch_shrinks_or_is_plain() -> None:
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": one(4)})
    run(token_map, ["a"], [list(range(9))])
    run(token_map, ["a"], [[9]])
    assert found(token_map) == [(5, 0)] + [(0, 0)] * (MAX_TOKENS - 1)
    run(token_map, ["plain"], [[0, 1, 2]])
    assert not any(map(any, found(token_map)))
    run(token_map, ["a"], [[9, 10]])
    token_map.clear(0)  # a dummy forward
    assert not any(map(any, found(token_map)))


def test_requests_are_remembered_over_sleep() -> None:
    token_map = TokenMap(MAX_TOKENS, CPU)
    token_map.update(set(), {"a": one(4)})
    run(token_map, ["a"], [[0]])
    token_map.slots.fill_(99)
    token_map.program.fill_(99)
    token_map.forget()
    assert not any(map(any, found(token_map)))
    run(token_map, ["a"], [[0]])
    assert found(token_map)[:2] == [(4, 0), (0, 0)]
