# SPDX-License-Identifier: Apache-2.0
"""Fairness: a request that needs much is passed over for a while, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plans import HIDDEN, config_of, plan_of
from vllm import SamplingParams
from vllm.v1.interventions.scheduler import turns
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.turns import MAX_SKIPS
from vllm.v1.request import Request

pytestmark = pytest.mark.quick

CONFIG = config_of(max_steering_configs=2)


def request(name: str, *values: float) -> Request:
    """One that needs a slot for each of `values`, at most two."""
    fields = ("prefill_steering_vectors", "decode_steering_vectors")
    ask: dict[str, Any] = {
        field: {"pre_attn": {0: [value] * HIDDEN}}
        for field, value in zip(fields, values, strict=False)
    }
    plan = plan_of(config=CONFIG, prompt=4, **ask)
    return Request(name, [1, 2, 3, 4], SamplingParams(max_tokens=4), None, plan=plan)


def scheduler() -> SchedulerInterventions:
    return SchedulerInterventions(CONFIG, hash_block_size=4)


def admit(ours: SchedulerInterventions, one: Request) -> bool:
    can = ours.can_admit(one)
    if can:
        ours.admit(one)
    return can


def steps_until_admitted(sharing: bool) -> int | None:
    """How long a request for both slots waits while small ones come every step and stay for two.

    Args:
        sharing: whether all the small ones have the same content, so that its slot is never free.
    """
    ours, patient = scheduler(), request("patient", -1.0, -2.0)
    ends: dict[int, Request] = {}
    for step in range(4 * MAX_SKIPS):
        if step in ends:
            ours.finish(ends.pop(step))
        if step and admit(ours, patient):
            return step
        small = request(f"r{step}", 1.0 if sharing else 1.0 + step)
        if admit(ours, small):
            ends[step + 2] = small
        else:
            ours.finish(small)  # gives up
        ours.message({})
    return None


@pytest.mark.parametrize("sharing", [False, True])
def test_nobody_starves(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = steps_until_admitted(sharing)
    assert waited is not None
    assert MAX_SKIPS < waited <= MAX_SKIPS + 4
    monkeypatch.setattr(turns, "MAX_SKIPS", 10**9)
    assert steps_until_admitted(sharing) is None


def starve(ours: SchedulerInterventions, one: Request) -> None:
    for _ in range(MAX_SKIPS + 2):
        assert not admit(ours, one)
        ours.message({})


def test_a_preempted_request_comes_back_past_a_starved_one() -> None:
    ours, one, patient = scheduler(), request("one", 1.0), request("patient", 2.0, 3.0)
    assert admit(ours, one)
    starve(ours, patient)
    assert not admit(ours, request("two", 1.0))
    ours.preempt(one)
    assert admit(ours, one)
    ours.finish(one)
    assert not admit(ours, request("two", 1.0))
    assert admit(ours, patient)
    ours.finish(patient)
    assert admit(ours, request("two", 1.0))


def test_what_needs_no_slot_waits_for_nobody() -> None:
    ours, one, patient = scheduler(), request("one", 1.0), request("patient", 2.0, 3.0)
    assert admit(ours, one)
    starve(ours, patient)
    assert admit(ours, request("plain"))


def test_an_aborted_request_blocks_nobody() -> None:
    ours, one, patient = scheduler(), request("one", 1.0), request("patient", 2.0, 3.0)
    assert admit(ours, one)
    starve(ours, patient)
    two = request("two", 4.0)
    assert not admit(ours, two)
    ours.finish(patient)
    assert admit(ours, two)


def test_starved_requests_go_in_the_order_in_which_they_were_first_refused() -> None:
    ours, one = scheduler(), request("one", 1.0)
    first, second = request("first", 2.0, 3.0), request("second", 4.0, 5.0)
    assert admit(ours, one)
    for _ in range(MAX_SKIPS + 2):
        assert not admit(ours, first)
        assert not admit(ours, second)
        ours.message({})
    ours.finish(one)
    assert not admit(ours, second)
    assert admit(ours, first)
    ours.finish(first)
    assert admit(ours, second)
