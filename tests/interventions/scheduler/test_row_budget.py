# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in which all decode, which are granted without a look at each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.scheduler.row_budget import STEP_WEIGHTS, RowBudget
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.quick


def request(name: str, *runs: tuple[int, int], key_weights: int = 0, focus_weights: int = 0) -> Any:
    wanted = Positions(runs)
    ours = SimpleNamespace(
        arena_rows=1,
        key_weights=key_weights,
        wanted=wanted,
        last_run=wanted.runs()[-1],
        focus_weights=focus_weights,
        focused=wanted,
        granted=0,
    )
    return SimpleNamespace(
        request_id=name,
        interventions=ours,
        num_prompt_tokens=8,
        num_tokens=9,
        mm_features=None,
        arrival_time=0.0,
        status=RequestStatus.RUNNING,
    )


def budget(rows: int = 64) -> RowBudget:
    shape = SimpleNamespace(row_bytes=4, senders=1, whole_prompts=False)
    config: Any = SimpleNamespace(
        speculative_config=None,
        model_config=None,
        tap_shape=shape,
        capture_config=SimpleNamespace(capture_buffer_bytes=4 * rows),
    )
    return RowBudget(config)


def test_who_is_not_scheduled_after_all_has_no_rows() -> None:
    """Upstream may give up a request whose rows were granted."""
    rows, one, two = budget(), request("one", (0, 99)), request("two", (0, 99))
    for _ in range(2):
        assert [rows.cap_tokens(r, 20, 1) for r in (one, two)] == [1, 1]
        assert rows.pop_offsets({"one": 1, "plain": 1}).keys() == {"one"}
        assert [rows.cap_tokens(r, 21, 1) for r in (one, two)] == [1, 1]
        assert rows.pop_offsets({"one": 1, "two": 1}).keys() == {"one", "two"}


def test_a_prompt_among_them_is_cut_as_it_was_scheduled() -> None:
    rows, one, two = budget(), request("one", (0, 99)), request("two", (0, 99))
    assert [rows.cap_tokens(one, 20, 1), rows.cap_tokens(two, 0, 8)] == [1, 8]
    kept = rows.pop_offsets({"one": 1, "two": 5})
    assert {name: at.tolist() for name, at in kept.items()} == {"one": [0], "two": [0, 1, 2, 3, 4]}


def test_positions_of_any_run_are_found() -> None:
    """Most are in the last one."""
    rows, some = budget(), request("some", (10, 12), (20, 30))
    for position, wanted in {10: True, 12: False, 19: False, 20: True, 29: True, 30: False}.items():
        assert rows.cap_tokens(some, position, 1) == 1
        assert bool(rows.pop_offsets({"some": 1})) == wanted


def steps_of(rows: RowBudget, prompt: Any, length: int) -> list[int]:
    """In how many tokens a prompt is computed, step by step."""
    done: list[int] = []
    while sum(done) < length:
        done.append(rows.cap_tokens(prompt, sum(done), length - sum(done)))
        rows.pop_offsets({prompt.request_id: done[-1]})
        assert len(done) < 1000
    return done


def test_a_step_makes_a_bounded_number_of_weights() -> None:
    """A prompt is computed in more steps the more is read of its queries, and one query fits
    whatever it costs."""
    length, most = 64, STEP_WEIGHTS // 64
    assert steps_of(budget(), request("rows", (0, length)), length) == [length]
    for key_weights in (most // 64, most // 4, 8 * most):
        prompt = request("weights", (0, length), key_weights=key_weights)
        done = steps_of(budget(), prompt, length)
        stops = [sum(done[: i + 1]) for i in range(len(done))]
        made = [n * stop * key_weights for n, stop in zip(done, stops, strict=True)]
        assert all(n == 1 or one <= 2 * STEP_WEIGHTS for n, one in zip(done, made, strict=True))
        assert len(done) > 1
    rows = budget()
    heavy = [request(name, (0, 99), key_weights=most) for name in ("one", "two")]
    for first, second in ((1, 0), (0, 1)):  # each in its turn
        assert [rows.cap_tokens(r, 62, 1) for r in heavy] == [first, second]
        rows.pop_offsets({"one": 1, "two": 1})
    withdrawn = heavy[0]
    assert rows.cap_tokens(withdrawn, 62, 1) == 1
    rows.withdraw(withdrawn)
    assert rows.cap_tokens(heavy[1], 62, 1) == 1


def test_a_step_focuses_a_bounded_number_of_weights() -> None:
    """A prompt with focus is computed in more steps; where it focuses only its end, the rest is
    not; one token passes whatever it costs, so that nobody waits for ever."""
    length, most = 64, STEP_WEIGHTS // 64
    for focus_weights, steps in ((0, 1), (most // 64, 1), (most // 4, 5), (8 * most, length)):
        prompt = request("prompt", (0, length), focus_weights=focus_weights)
        prompt.num_tokens = length
        done = steps_of(budget(), prompt, length)
        assert (len(done) == 1) == (steps == 1) and steps <= len(done) <= length, done
        stops = [sum(done[: i + 1]) for i in range(len(done))]
        made = [n * stop * focus_weights for n, stop in zip(done, stops, strict=True)]
        assert all(n == 1 or one <= STEP_WEIGHTS for n, one in zip(done, made, strict=True))
    end = request("end", (length - 1, length), focus_weights=8 * most)
    end.num_tokens = length
    assert steps_of(budget(), end, length) == [length - 1, 1]
    rows = budget()
    one, two = (request(name, (0, 64), focus_weights=most) for name in "ab")
    one.num_tokens = two.num_tokens = length
    assert [rows.cap_tokens(r, 0, length) for r in (one, two)] == [1, 1]
    drafts = request("drafts", (0, 99), focus_weights=8 * most)
    assert rows.cap_tokens(drafts, 20, 4) == 4


class Running:
    """A request that computes its positions, in steps of the size that it is given."""

    def __init__(self, name: str, prompt: int, length: int, runs: list[tuple[int, int]]) -> None:
        self.asked = request(name, *runs)
        self.prompt, self.length, self.computed = prompt, length, 0
        self.asked.num_prompt_tokens = prompt
        self.asked.interventions.takes_room = True

    @property
    def next(self) -> int:
        """The tokens of its next step: all of its prompt that is left, or one."""
        return max(self.prompt - self.computed, 1)


RUN = st.tuples(st.integers(0, 30), st.integers(1, 30)).map(lambda run: (run[0], sum(run)))
ASKED = st.tuples(st.integers(1, 12), st.integers(1, 24), st.lists(RUN, min_size=1, max_size=2))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ASKED, min_size=1, max_size=8),
    st.integers(2, 12),
    st.lists(
        st.sampled_from(["run", "run", "run", "skip", "preempt", "drop", "join"]), max_size=90
    ),
)
def test_rows_granted_ahead_are_those_that_are_asked_for(
    asked: list[tuple[int, int, list[tuple[int, int]]]], capacity: int, events: list[str]
) -> None:
    """Whatever is scheduled has exactly its wanted rows, within the capacity, and all end."""
    rows = budget(capacity)
    waiting = [
        Running(str(i), prompt, prompt + more, runs) for i, (prompt, more, runs) in enumerate(asked)
    ]
    running: list[Running] = []
    left, steps = iter(events), 0
    while waiting or running:
        steps += 1
        assert steps < 600, "some request never gets its rows"
        scheduled: dict[str, int] = {}
        if waiting and (not running or next(left, "join") == "join"):
            running.append(waiting.pop(0))
        for one in [*running]:
            event, ours, size = next(left, "run"), one.asked.interventions, one.next
            if event == "preempt":
                rows.withdraw(one.asked)
                one.computed = 0
            if event == "skip" or event == "preempt":
                continue
            if ours.takes_room and size != ours.granted:
                size = rows.cap_tokens(one.asked, one.computed, size)
            if size and event != "drop":  # or it is not scheduled after all
                scheduled[one.asked.request_id] = size
        offsets = rows.pop_offsets(scheduled)
        assert offsets.keys() <= scheduled.keys()
        assert sum(map(len, offsets.values())) <= capacity
        for one in [*running]:
            size = scheduled.get(one.asked.request_id, 0)
            at = np.arange(one.computed, one.computed + size)
            wanted = at[one.asked.interventions.wanted.mask(at)]
            given = offsets.get(one.asked.request_id, np.empty(0, np.int32)) + one.computed
            assert given.tolist() == wanted.tolist()
            one.computed += size
            if one.computed >= one.length:
                running.remove(one)
                rows.withdraw(one.asked)


def test_who_decodes_on_is_not_asked_again() -> None:
    rows, one, two = budget(2), request("one", (0, 25)), request("two", (0, 99))
    both = {"one": 1, "two": 1}
    for position in range(20, 25):
        asked = [r for r in (one, two) if r.interventions.granted != 1]
        assert asked == ([one, two] if position == 20 else [])
        assert [rows.cap_tokens(r, position, 1) for r in asked] == [1] * len(asked)
        assert rows.pop_offsets(both).keys() == both.keys()
    assert [r.interventions.granted for r in (one, two)] == [0, 0], "the run of one is over"
    assert rows.cap_tokens(two, 25, 1) == 1
    rows.pop_offsets(both)
    assert two.interventions.granted
    third = request("third", (0, 99))
    assert rows.cap_tokens(third, 0, 1) == 1
    assert rows.cap_tokens(request("fourth", (0, 99)), 0, 1) == 0
    rows.pop_offsets({"two": 1, "third": 1})
    assert not two.interventions.granted, "somebody waits for rows"


def test_who_is_not_scheduled_holds_no_row_of_the_next_step() -> None:
    rows, one, two = budget(1), request("one", (0, 99)), request("two", (0, 99))
    assert rows.cap_tokens(one, 20, 1) == 1
    rows.pop_offsets({"one": 1})
    assert one.interventions.granted
    assert rows.cap_tokens(two, 20, 1) == 0, "the row is the other's"
    rows.pop_offsets({"one": 1})
    assert rows.cap_tokens(two, 20, 1) == 1
    rows.pop_offsets({"two": 1})
    rows.pop_offsets({})
    assert not two.interventions.granted
    assert rows.cap_tokens(one, 21, 1) == 1


def test_rows_whose_number_grows_are_not_granted_ahead() -> None:
    rows = budget()
    for key_weights in (0, 4):
        some = request(str(key_weights), (0, 99), key_weights=key_weights)
        assert rows.cap_tokens(some, 20, 1) == 1
        rows.pop_offsets({some.request_id: 1})
        assert some.interventions.granted == (not key_weights)
