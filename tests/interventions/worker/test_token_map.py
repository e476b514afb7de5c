# SPDX-License-Identifier: Apache-2.0
"""Each token's rows, against a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
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


@given(st.data(), st.lists(requests(), min_size=1, max_size=3))
def test_requests_that_grow_step_by_step(data: st.DataObject, asking: list[Request]) -> None:
    """Prompts in chunks and from the prefix cache, decoding, and preemptions."""
    token_map = TokenMap(MAX_TOKENS, CPU, grows=True)
    at: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 30), label="steps")):
        runs = data.draw(st.permutations(range(len(asking))), label="order")
        runs = runs[: data.draw(st.integers(1, len(asking)), label="how many")]
        for i in list(at):
            if data.draw(st.integers(0, 9), label="preempted") == 0:
                del at[i]
        new = [i for i in runs if i not in at]
        at |= {i: data.draw(st.integers(0, 6), label="cached") for i in new}
        token_map.update(set(), {str(i): asking[i].worker for i in new if asking[i].known})
        size = st.one_of(st.just(1), st.integers(1, 6))
        positions = [list(range(at[i], at[i] + data.draw(size, label="tokens"))) for i in runs]
        run(token_map, [str(i) for i in runs], positions)
        for i, each in zip(runs, positions, strict=True):
            at[i] = each[-1] + 1
        want = [asking[i].at(p) for i, ps in zip(runs, positions, strict=True) for p in ps]
        assert found(token_map) == want + [(0, 0)] * (MAX_TOKENS - len(want))


@pytest.mark.parametrize("grows", [True, False])
def test_a_batch_that_stays_the_same_goes_on_to_its_next_segment(grows: bool) -> None:
    """And back, where drafts may be rejected."""
    token_map = TokenMap(MAX_TOKENS, CPU, grows)
    token_map.update(set(), {"a": one(4)})
    for position in [*range(9), *([] if grows else [3, 8])]:
        run(token_map, ["a", "plain"], [[position], [position]])
        assert found(token_map)[:2] == [(4 if position < 5 else 5, 0), (0, 0)]


@pytest.mark.parametrize("grows", [True, False])
def test_in_their_last_segments_rows_are_written_once(grows: bool) -> None:
    """And a prompt that came from the cache is known to be done some steps later."""
    token_map = TokenMap(MAX_TOKENS, CPU, grows)
    token_map.update(set(), {"a": one(4), "b": one(6)})

    def written(a: int, b: int) -> bool:
        run(token_map, ["a", "b"], [[a], [b]])
        assert found(token_map)[:3] == [(5, 0), (7, 0), (0, 0)]
        token_map.slots[0] = 9
        run(token_map, ["a", "b"], [[a + 1], [b + 1]])
        kept = token_map.slots[0] == 9
        token_map.slots[0] = 5
        return not kept

    run(token_map, ["a", "b"], [[0, 1, 2, 3, 4], [2, 3, 4]])  # two of b's were cached
    assert written(5, 5), "b is at 3 or later, as far as is known"
    assert written(7, 7) != grows
    token_map.update(set(), {"b": one(6)})  # preempted, it begins anew
    run(token_map, ["a", "b"], [[9], [0]])
    assert found(token_map)[:2] == [(5, 0), (6, 0)]
    run(token_map, ["a", "b"], [[10], [1]])
    assert found(token_map)[:2] == [(5, 0), (6, 0)]
    run(token_map, ["a", "b"], [[11], [5]])
    assert found(token_map)[:2] == [(5, 0), (7, 0)]


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


def test_tokens_of_requests_that_latch_follow_each_other() -> None:
    """Those of others, padding and the next batch's are each by itself."""
    token_map = TokenMap(MAX_TOKENS, CPU, ahead=2)
    latches = msgspec.structs.replace(told([0], [0], [3]), latches=True)
    token_map.update(set(), {"a": one(4), "b": latches, "c": latches})
    for start in (7, 8, 9):  # not as many as it keeps positions of
        at = [start, start + 1, start + 2]
        run(token_map, ["b", "a", "plain", "c"], [at, [1, 2], [5], [start + 3]])
        assert token_map.runs[0].tolist() == [3, -1, -1, 0, 0, 0, 1] + [0] * (MAX_TOKENS - 7)
        places = token_map.runs[1].tolist()
        assert places[:3] == [p % 3 + 1 for p in at] and places[6] == places[0]
    run(token_map, ["a", "plain"], [[1, 2], [5]])
    assert not token_map.runs.any()
    run(token_map, ["b"], [[1, 2]])
    run(token_map, ["plain"], [[5]])
    assert not token_map.runs.any()


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


@pytest.mark.parametrize("most", [8, MAX_TOKENS])
def test_kernels_are_loaded_before_there_are_requests(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small steps and of larger ones, as torch has two; nothing of it stays."""
    token_map, sizes = TokenMap(most, CPU), set[int]()
    select = torch.index_select

    def selecting(*args: Any, out: torch.Tensor) -> None:
        sizes.add(len(out))
        select(*args, out=out)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", selecting)
        token_map.load_kernels()
    assert sizes == {1, min(17, most)}
    assert not any(map(any, found(token_map))) and not token_map.focus.any()
    assert not token_map.steers([""])
    token_map.update(set(), {"a": one(4)})
    run(token_map, ["a"], [[4, 5]])
    assert found(token_map) == [(4, 0), (5, 0)] + [(0, 0)] * (most - 2)
