# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in which all decode, which are told without looking at each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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


def budget() -> RowBudget:
    shape = SimpleNamespace(row_bytes=4, senders=1, whole_prompts=False)
    config: Any = SimpleNamespace(
        speculative_config=None,
        model_config=None,
        tap_shape=shape,
        capture_config=SimpleNamespace(capture_buffer_bytes=4 * 64),
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
