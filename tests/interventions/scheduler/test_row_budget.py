# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in which all decode, which are told without looking at each request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.scheduler.row_budget import RowBudget

pytestmark = pytest.mark.quick


def request(name: str, *runs: tuple[int, int]) -> Any:
    wanted = Positions(runs)
    ours = SimpleNamespace(arena_rows=1, wanted=wanted, last_run=wanted.runs()[-1])
    return SimpleNamespace(
        request_id=name, interventions=ours, num_prompt_tokens=8, num_tokens=9, mm_features=None
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
