# SPDX-License-Identifier: Apache-2.0
"""The rows that a collector gives: whole, trimmed, missing, and in the pieces of a stream."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collecting import (
    MAX_TOKENS,
    PROMPT,
    PROMPT_IDS,
    chunk,
    collect,
    collector_for,
    plan_for,
    results_of,
    texts_of,
)
from tests.support.plans import HIDDEN, SHAPE
from tests.support.rows import give
from vllm.v1.capture import CaptureResult
from vllm.v1.capture.copies import Copies, CopyThreads
from vllm.v1.capture.results import merged
from vllm.v1.interventions.frontend.results.gathered import ResultMaker
from vllm.v1.interventions.frontend.results.inbox import RUN_STEPS, RowInbox
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape

pytestmark = pytest.mark.quick


def positions_of(result: CaptureResult) -> list[int]:
    found = {tuple(site.positions.tolist()) for site in result.payload.values()}
    assert len(found) == 1
    return list(found.pop())


def check_rows(result: CaptureResult, num_output: int) -> None:
    """Every row is the one of its site and position, with the token it has read."""
    token_ids = [*PROMPT_IDS, *range(200, 200 + num_output)]
    expected_sites = [("post_block", 0), ("pre_attn", 1)]
    assert sorted(result.payload) == expected_sites
    for i, site in enumerate(expected_sites):
        got = result.payload[site]
        assert got.positions.dtype == got.token_ids.dtype == np.int64
        assert got.token_ids.tolist() == [token_ids[p] for p in got.positions]
        assert torch.equal(got.values, chunk(got.positions.tolist()).values[0][:, i])


def test_rows_of_a_finished_request() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 2]), chunk([3, 4]))
    give(collector, chunk([5]))
    give(collector, chunk([6]))
    result = collect(collector, 3)
    assert (result.status, result.error) == ("ok", None)
    assert positions_of(result) == list(range(PROMPT + 2))
    check_rows(result, 3)


def test_rows_report_the_version_they_ran_under() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 2], version=0), chunk([3, 4], version=2))
    give(collector, chunk([5], version=3))
    (one, *others) = collect(collector, 2).payload.values()
    assert one.versions.dtype == np.int64
    assert one.versions.tolist() == [0, 0, 0, 2, 2, 3]
    assert all(other.versions.tolist() == one.versions.tolist() for other in others)


def test_rows_past_a_stop_string_are_trimmed() -> None:
    collector = collector_for(plan_for("all_generated"))
    give(collector, chunk([5, 6, 7]))
    result = collect(collector, 2)
    assert result.status == "ok"
    assert positions_of(result) == [5]
    assert positions_of(collect(collector, 4)) == [5, 6, 7]


def test_consumers_get_their_own_rows() -> None:
    collector = collector_for(plan_for("last_prompt", other="all_generated"))
    give(collector, chunk([4]), chunk([5]))
    results = results_of(collector, 2)
    assert positions_of(results["inline"]) == [4]
    assert positions_of(results["other"]) == [5]


@pytest.mark.parametrize("num_output", [1, 2, 4])
def test_last_generated(num_output: int) -> None:
    collector = collector_for(plan_for("last_generated"))
    give(collector, chunk([5, 6, 7]))
    assert positions_of(collect(collector, num_output, end=None)) == []
    result = collect(collector, num_output)
    assert result.status == "ok"
    # After one token there is no generated row: it was never fed back.
    assert positions_of(result) == ([] if num_output == 1 else [PROMPT + num_output - 2])


def test_a_named_position_the_request_did_not_reach() -> None:
    collector = collector_for(plan_for([2, 6]))
    give(collector, chunk([2]))
    result = collect(collector, 2)
    assert result.status == "partial_error"
    assert result.error == "the request ended with 6 rows, before position 6"
    assert positions_of(result) == [2]
    give(collector, chunk([6]))
    assert collect(collector, 3).status == "ok"


def test_a_lost_row_is_an_error() -> None:
    collector = collector_for(plan_for("all"))
    give(collector, chunk([0, 1, 3, 4]))
    result = collect(collector, 1)
    assert result.status == "error"
    assert result.error is not None
    assert "1 of 5 rows, first at position 2" in result.error
    assert positions_of(result) == [0, 1, 3, 4]


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("num_output", [0, 1])
def test_an_abort_says_which_rows_are_missing(num_output: int, only_new: bool) -> None:
    collector = collector_for(plan_for("all_prompt"))
    give(collector, chunk([0, 1]))
    result = collect(collector, num_output, end="abort", only_new=only_new)
    assert result.status == "partial_error"
    assert result.error is not None
    assert "aborted before 3 of 5 rows, first at position 2" in result.error
    assert positions_of(result) == [0, 1]


def test_an_abort_before_the_first_row() -> None:
    result = collect(collector_for(plan_for("last_prompt")), 0, end="abort")
    assert result.status == "partial_error"
    assert positions_of(result) == []


def test_an_abort_that_misses_nothing_is_ok() -> None:
    collector = collector_for(plan_for("last_prompt"))
    give(collector, chunk([4]))
    assert collect(collector, 1, end="abort").status == "ok"


def test_no_rows_have_the_models_width_and_dtype() -> None:
    shape = TapShape(HIDDEN, "bfloat16", SHAPE.layers)
    collector = collector_for(plan_for("all_generated", shape))
    site = collect(collector, 1).payload["pre_attn", 1]
    assert site.values.shape == (0, HIDDEN)
    assert site.values.dtype == torch.bfloat16
    assert site.numpy().shape == (0, HIDDEN)


# -- streams ------------------------------------------------------------------------------------


def stream(
    positions: Any,
    cuts: list[int],
    total: int,
    end: str = "stop",
    moves: frozenset[int] = frozenset(),
) -> tuple[list[CaptureResult], CaptureResult, CaptureResult]:
    """Deltas after each of `cuts` output tokens, the same for a reader who gets all of them at the
    end, and what one final output would have said.

    Rows arrive as the engine sends them: those wanted of the prompt, then of each token fed back.
    """
    plan = plan_for(positions)
    wanted = Positions.from_flat(plan.runs)
    every, collector, unread = (collector_for(plan) for _ in range(3))
    deltas, seen = [], 0
    together: dict[str, CaptureResult] | None = None
    for cut in [*cuts, total]:
        for step in range(seen, cut):
            parts = [[0, 1], [2, 3, 4]] if step == 0 else [[PROMPT + step - 1]]
            new = [chunk(at) for part in parts if (at := [p for p in part if p in wanted])]
            for one in (collector, every, unread):
                give(one, *new)
            if step in moves:
                collector.move()
                unread.move()
        seen = cut
        deltas.append(collect(collector, cut, end=None, only_new=True))
        together = merged(together, results_of(unread, cut, end=None, only_new=True))
    deltas.append(collect(collector, total, end=end, only_new=True))
    together = merged(together, results_of(unread, total, end=end, only_new=True))
    assert together is not None
    final = collect(every, total, end=end)
    counted = [one.num_rows["inline"] for one in (collector, every)]
    assert counted == [sum(len(positions_of(d)) for d in deltas), len(positions_of(final))]
    return deltas, together["inline"], final


POSITIONS = st.sampled_from(
    [
        "all",
        "all_prompt",
        "all_generated",
        "last_generated",
        "predicting",
        [1, 6],
        [-1, "last_generated"],
    ]
)


@given(
    POSITIONS,
    st.integers(1, MAX_TOKENS),
    st.sets(st.integers(1, MAX_TOKENS)),
    st.frozensets(st.integers(0, MAX_TOKENS - 1)),
)
def test_deltas_add_up(positions: Any, total: int, cuts: set[int], moves: frozenset[int]) -> None:
    """Whichever rows were moved to memory of their own on the way."""
    parts = sorted(c for c in cuts if c < total)
    deltas, result, final = stream(positions, parts, total, moves=moves)
    assert (result.status, result.error) == (final.status, final.error)
    assert positions_of(result) == positions_of(final)
    check_rows(result, total)
    assert [d.status for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_a_delta_has_only_what_is_new() -> None:
    deltas, _, _ = stream("all", [1, 2], 4)
    assert [positions_of(d) for d in deltas] == [[0, 1, 2, 3, 4], [5], [6, 7], []]


def test_the_last_generated_row_comes_with_an_end_that_brings_no_token() -> None:
    deltas, _, _ = stream("last_generated", [1, 2], 3, end="abort")
    assert [positions_of(d) for d in deltas] == [[], [], [], [6]]


def test_a_stream_does_not_keep_what_it_delivered() -> None:
    collector = collector_for(plan_for("all"))
    chunks = [chunk([0, 1, 2, 3, 4]), chunk([5]), chunk([6])]
    kept = [weakref.ref(one.values[0]) for one in chunks]
    give(collector, chunks.pop(0))
    collect(collector, 1, end=None, only_new=True)
    gc.collect()
    assert kept[0]() is not None, "its last row may be wanted once more"
    give(collector, *chunks)
    chunks.clear()
    collect(collector, 3, end=None, only_new=True)
    gc.collect()
    assert [values() is not None for values in kept] == [False, False, True]


@pytest.mark.parametrize("moves", [False, True])
def test_rows_that_nobody_reads_are_copied_once(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each output that follows, a client who does not read would have them copied, on the
    event loop; and views of the steps they came in would keep these steps whole."""
    copied: list[int] = []
    follow = CopyThreads.follow

    def count(threads: CopyThreads, copies: Copies) -> list[Future[None]]:
        copied.append(sum(values.nbytes for values in copies[1]))
        return follow(threads, copies)

    collector = collector_for(plan_for("all", max_tokens=40))
    give(collector, chunk([0, 1, 2, 3, 4]))
    monkeypatch.setattr(CopyThreads, "follow", count)
    together = results_of(collector, 1, end=None, only_new=True)
    kept = []
    for number in range(1, 30):
        new = chunk([PROMPT + number - 1])
        kept.append(weakref.ref(new.values[0]))
        give(collector, new)
        if moves:
            collector.move()
        del new
        later = results_of(collector, number + 1, end=None, only_new=True)
        joined = merged(together, later)
        assert joined is not None
        together = joined
        del later
    rows = 2 * HIDDEN * 4
    assert sum(copied) == (5 + 29) * rows * (1 + moves)
    gc.collect()
    assert [values() is not None for values in kept[:-1]] == [False] * 28
    check_rows(together["inline"], 40)
    assert positions_of(together["inline"]) == list(range(5 + 29))


def test_the_texts_of_tokens_are_made_when_somebody_reads_them() -> None:
    """By whoever reads them, and once for all sites: a tokenizer takes its time."""
    asked: list[list[int]] = []

    def texts(token_ids: Sequence[int]) -> list[str]:
        asked.append(list(token_ids))
        return texts_of(token_ids)

    plan = plan_for("all")
    plan.consumers["inline"].fields["tokens"] = True
    collector = collector_for(plan, texts)
    give(collector, chunk([0, 1, 2, 3, 4]))
    first = results_of(collector, 1, end=None, only_new=True)
    give(collector, chunk([5]))
    second = results_of(collector, 2, end=None, only_new=True)
    together = merged(first, second)
    assert together is not None
    sites = list(together["inline"].payload.values())
    assert asked == []
    for rows in sites:
        assert rows.tokens == ["t100", "t101", "t102", "t103", "t104", "t200"]
        assert pickle.loads(pickle.dumps(rows)).tokens == rows.tokens
    assert asked == [[100, 101, 102, 103, 104, 200]]
    plain = collector_for(plan_for("all"))
    give(plain, chunk([0, 1, 2, 3, 4]))
    assert collect(plain, 1).payload["pre_attn", 1].tokens is None


def test_what_a_stream_remembers_of_its_rows_grows_with_them_alone() -> None:
    """Not with the square of its steps, as views of all positions of a run would."""
    steps = 300
    collector = collector_for(plan_for("all", max_tokens=2 * steps))
    inbox = RowInbox(cast("Any", SimpleNamespace(places=[])), frontends=1)
    inbox.open("r", collector)
    for number in range(steps):
        inbox.add([chunk([number])])
        results_of(collector, number + 1, end=None, only_new=True)
        inbox.step()
    kept = sum((at if at.base is None else at.base).nbytes for at in collector._gone)
    assert steps - 10 <= sum(map(len, collector._gone)) and kept <= 8 * steps
    assert len(collector._runs) == 1 and len(collector._runs[0][0].chunks) <= RUN_STEPS


@pytest.mark.parametrize("moves", [False, True])
def test_states_are_gathered_when_they_are_read(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step has all rows so far, which few read; whoever does later sees those of its time."""
    gathered: list[int] = []

    def count(maker: ResultMaker, *given: Any) -> Any:
        gathered.append(len(given[2]))
        return rows(maker, *given)

    rows = ResultMaker.rows
    monkeypatch.setattr(ResultMaker, "rows", count)
    collector = collector_for(plan_for("all", max_tokens=20))
    give(collector, chunk([0, 1, 2, 3, 4]))
    states = [collect(collector, 1, end=None)]
    for number in range(1, 10):
        give(collector, chunk([PROMPT + number - 1]))
        if moves and number % 3 == 0:
            collector.move()
        states.append(collect(collector, number + 1, end=None))
    assert gathered == []
    for number in (4, 9):
        assert positions_of(states[number]) == list(range(PROMPT + number))
        check_rows(states[number], 20)
        assert states[number].status is None
    assert gathered == [PROMPT + 4, PROMPT + 9], "once for all sites"
    assert positions_of(collect(collector, 10)) == list(range(PROMPT + 9))


def test_a_state_that_nobody_read_keeps_no_later_rows() -> None:
    collector = collector_for(plan_for("all", max_tokens=20))
    give(collector, chunk([0, 1, 2, 3, 4]))
    state = collect(collector, 1, end=None)
    new = chunk([5])
    kept, alive = weakref.ref(new.values[0]), weakref.ref(collector)
    give(collector, new)
    del new, collector
    gc.collect()
    assert kept() is None and alive() is None
    assert positions_of(state) == list(range(PROMPT))


def test_merged_in_the_models_dtype() -> None:
    shape = TapShape(HIDDEN, "bfloat16", SHAPE.layers)
    collector = collector_for(plan_for("all_generated", shape))
    empty = collect(collector, 1, end=None, only_new=True)
    give(collector, chunk([5], torch.bfloat16))
    together = merged({"inline": empty}, {"inline": collect(collector, 2, only_new=True)})
    assert together is not None
    values = together["inline"].payload["pre_attn", 1].values
    assert values.dtype == torch.bfloat16
    assert values.shape == (1, HIDDEN)
