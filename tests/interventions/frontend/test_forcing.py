# SPDX-License-Identifier: Apache-2.0
"""A watch whose rule forces tokens, fed by steps of any size, makes the answer that its definition
makes token by token."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interventions.frontend.test_rule_watch import MOST, PROMPT, chunk, plan_for
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.interventions.frontend.results.link import _AsyncLink
from vllm.v1.interventions.frontend.results.watch import RuleWatches
from vllm.v1.interventions.plan import CapturePlan

pytestmark = pytest.mark.quick

FORCED = [91, 92]


def defined(
    scores: np.ndarray, need: int, of: int, stops: np.ndarray | None
) -> tuple[list[int], int | None, int | None]:
    """The answer, where tokens were forced, and the row at which a rule ended it. What was forced
    stays, wherever a rule fires in it."""
    answer: list[int] = []
    crossed: list[bool] = []
    forced_at = None
    looked = PROMPT
    while len(answer) < MOST:
        for position in range(looked, PROMPT + len(answer)):
            looked = position + 1
            crossed.append(bool(scores[position] > 0))
            fires = crossed[-1] and sum(crossed[-of:]) >= need
            if stops is not None and stops[position] > 0:
                return answer, forced_at, position
            if fires and forced_at is None:
                if len(answer) + len(FORCED) >= MOST:
                    return answer, forced_at, position
                forced_at = PROMPT + len(answer)
                answer += FORCED
                break
        else:
            answer.append(100 + len(answer))
    return answer, forced_at, None


@cache
def planned(need: int, of: int, has_stop: bool) -> CapturePlan:
    forcing = {"need": need, "of": of, "then": {"force": FORCED}}
    return plan_for(forcing, *[{"then": "stop"}] * has_stop)


STEPS: Any = (
    st.lists(st.integers(1, 4), min_size=3 * MOST, max_size=3 * MOST),
    st.lists(st.integers(-2, 1), min_size=2 * (PROMPT + MOST), max_size=2 * (PROMPT + MOST)),
    st.tuples(st.integers(1, 2), st.integers(0, 2)),
    st.booleans(),
)


@given(*STEPS)
def test_steps_of_any_size(
    steps: list[int], numbers: list[int], window: tuple[int, int], has_stop: bool
) -> None:
    need, more = window
    scores = np.array(numbers, dtype=np.float64).reshape(2, -1)
    plan = planned(need, need + more, has_stop)
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, MOST)
    assert watch is not None

    answer: list[int] = []
    first, cuts, ended = 0, 0, False
    for step in steps:
        new = [100 + i for i in range(len(answer), min(len(answer) + step, MOST))]
        stop = PROMPT + len(answer) + len(new) - 1
        at = list(range(first, stop))
        name = "a" if not cuts else f"a{cuts}"
        if at:
            watches.add([chunk(plan, {"x": at, name: at}, scores)])
            if cuts:
                watches.add([chunk(plan, {"a": [PROMPT]}, np.full_like(scores, 9.0))])
        first = stop
        done = len(answer) + len(new) == MOST
        output = EngineCoreOutput(name, new)
        kept, reason = watch.judge(output, FinishReason.LENGTH if done else None)
        answer += kept
        if watch.stop_reason(None) is not None:
            ended = True
            break
        if (rows := watch.goes_on()) is not None:
            assert kept == output.new_token_ids and reason is None
            assert rows + len(FORCED) == PROMPT + len(answer)
            cuts += 1
            watches.rename(name, f"a{cuts}")
            first = rows
        elif done:
            break
    expected, forced_at, ends_at = defined(
        scores[0], need, need + more, scores[1] if has_stop else None
    )
    assert (answer, ended) == (expected, ends_at is not None)
    results: dict[str, Any] = watch.results(PROMPT + len(answer))
    assert results["r0"].forced_at == forced_at
    assert cuts == (forced_at is not None)
    seen = len(answer) - 1 if ends_at is None else ends_at + 1 - PROMPT
    assert results["r0"].rows == seen


def test_a_stop_string_in_what_is_kept_or_forced_ends_the_answer() -> None:
    """No rows come of forced tokens then; what was forced behind it is not there."""
    plan = plan_for({"then": {"force": FORCED}})
    scores = np.full((1, PROMPT + MOST), -1.0)
    scores[0, PROMPT + 1] = 1.0
    for kept, forced_at in ((4, PROMPT + 2), (2, None)):
        watches = RuleWatches()
        watch = watches.open("a", plan, PROMPT, MOST)
        assert watch is not None
        watches.add([chunk(plan, {"a": [*range(PROMPT + 2)]}, scores)])
        tokens, _ = watch.judge(EngineCoreOutput("a", [5, 6, 7]), None)
        assert tokens == [5, 6, *FORCED]
        assert watch.stop_reason("text") == "text"
        assert watch.goes_on() is None and watch.most_rows == PROMPT + 2
        results: dict[str, Any] = watch.results(PROMPT + kept)
        assert results["r0"].forced_at == forced_at


def test_a_rule_that_stops_goes_before_one_that_forces() -> None:
    """Where both fire at a row; of two that force, the first goes, and the other has its turn at
    its next row."""
    scores = np.full((3, PROMPT + MOST), 1.0)
    for rules, why in ((["force", "stop"], "rule:r1"), (["force", "force"], None)):
        thens = {"stop": "stop", "force": {"force": FORCED}}
        plan = plan_for(*[{"then": thens[one]} for one in rules])
        watches = RuleWatches()
        watch = watches.open("a", plan, PROMPT, MOST)
        assert watch is not None
        watches.add([chunk(plan, {"a": [PROMPT]}, scores)])
        tokens, _ = watch.judge(EngineCoreOutput("a", [5, 6]), None)
        assert tokens == ([5] if why else [5, *FORCED])
        assert watch.stop_reason(None) == why
        if why is None:
            rows = watch.goes_on()
            assert rows == PROMPT + 1
            watches.add([chunk(plan, {"a": [PROMPT + 1, PROMPT + 2]}, scores)])
            tokens, _ = watch.judge(EngineCoreOutput("a", [7]), None)
            assert tokens == FORCED
            results: dict[str, Any] = watch.results(PROMPT + 5)
            assert [results[f"r{i}"].forced_at for i in (0, 1)] == [PROMPT + 1, PROMPT + 3]
            assert watch.goes_on() == PROMPT + 3


def test_what_fired_before_a_cut_forces_nothing_after_it() -> None:
    plan = plan_for({"then": {"force": FORCED}}, {"then": {"force": FORCED}})
    scores = np.full((2, PROMPT + MOST), -1.0)
    scores[:, PROMPT] = 1.0
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, MOST)
    assert watch is not None
    watches.add([chunk(plan, {"a": [PROMPT]}, scores)])
    assert watch.judge(EngineCoreOutput("a", [5, 6]), None)[0] == [5, *FORCED]
    assert watch.goes_on() == PROMPT + 1
    watches.add([chunk(plan, {"a": [PROMPT + 1, PROMPT + 2]}, scores)])
    assert watch.judge(EngineCoreOutput("a", [7]), None)[0] == [7]


@pytest.mark.parametrize(("room", "goes_on"), [(0, False), (1, True)])
def test_what_is_forced_has_room_for_a_token_more(room: int, goes_on: bool) -> None:
    plan = plan_for({"then": {"force": FORCED}})
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, 1 + len(FORCED) + room)
    assert watch is not None
    watches.add([chunk(plan, {"a": [PROMPT]}, np.full((1, 40), 1.0))])
    tokens, reason = watch.judge(EngineCoreOutput("a", [5, 6]), FinishReason.LENGTH)
    assert tokens == ([5, *FORCED] if goes_on else [5]) and reason is None
    assert watch.stop_reason(None) == (None if goes_on else "rule:r0")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_answer_that_broke_off_does_not_go_on(reason: FinishReason) -> None:
    plan = plan_for({"then": {"force": FORCED}})
    watches = RuleWatches()
    watch = watches.open("a", plan, PROMPT, MOST)
    assert watch is not None
    watches.add([chunk(plan, {"a": [*range(PROMPT + 2)]}, np.full((1, 40), 1.0))])
    tokens, _ = watch.judge(EngineCoreOutput("a", [5, 6, 7]), reason)
    assert tokens == [5] and watch.goes_on() is None
    assert watch.stop_reason(None) == "rule:r0"


def test_a_request_that_was_aborted_is_not_sent_again() -> None:
    """The abort may reach the engine first, where it would find nothing."""
    sent: list[Any] = []

    class Client:
        async def add_request_async(self, request: Any) -> None:
            sent.append(request)

    async def add() -> None:
        client: Any = Client()
        link = _AsyncLink(client)
        for name, wanted in (("aborted", False), ("goes on", True)):
            request: Any = name
            link.add(request, partial(bool, wanted))
        await asyncio.sleep(0.01)

    asyncio.run(add())
    assert sent == ["goes on"]
