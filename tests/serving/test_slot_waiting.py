# SPDX-License-Identifier: Apache-2.0
"""More steering contents than slots: requests wait, nobody else does, and slots come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

SLOTS, MANY = 2, 60
PROMPT = prompt_of(17, 70)


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        max_steering_configs=SLOTS,
        capture_consumers=["inline"],
        enable_prefix_caching=False,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def content(seed: int) -> dict[str, Any]:
    """At sites that differ from seed to seed: a slot used again must forget the old ones."""
    point = STREAM_POINTS[seed % len(STREAM_POINTS)]
    return {"steering_vectors": {point: {seed % models.LAYERS: vector(70 + seed)}}}


def slots_in_use(llm: LLM) -> int:
    count: int = serving.scheduler_of(llm).interventions.tables.sums.in_use
    return count


def test_more_contents_than_slots(pair: tuple[LLM, Judge]) -> None:
    """Eight contents and two slots; the plain request among them starts at once."""
    llm, judge = pair
    asks = [Ask(PROMPT, {**content(i), **capture("all")}) for i in range(8)]
    asks.insert(5, Ask(PROMPT, capture("all")))
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    assert len(steps.outputs[0].num_scheduled_tokens) == SLOTS + 1
    assert max(len(o.num_scheduled_tokens) for o in steps.outputs) == SLOTS + 1
    assert len(steps.outputs) == 4 * serving.GENERATED
    assert slots_in_use(llm) == 0


def test_equal_contents_share_a_slot(pair: tuple[LLM, Judge]) -> None:
    llm, judge = pair
    asks = [Ask(prompt_of(9, i), content(i % SLOTS)) for i in range(8)]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    assert len(steps.outputs[0].num_scheduled_tokens) == len(asks), "they waited"


def test_two_contents_a_request(pair: tuple[LLM, Judge]) -> None:
    """A request whose phases differ needs both slots; one with the same two shares them."""
    llm, judge = pair

    def phases(prompt: int, generated: int) -> dict[str, Any]:
        return {
            "prefill_steering_vectors": {"post_block": {1: vector(70 + prompt)}},
            "decode_steering_vectors": {"post_block": {1: vector(70 + generated)}},
            **capture("all"),
        }

    asks = [
        Ask(PROMPT, phases(0, 1)),
        Ask(PROMPT, phases(2, 3)),
        Ask(PROMPT, phases(1, 0)),
        Ask(PROMPT, {**content(4), **capture("all")}),
    ]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    assert set(steps.outputs[0].num_scheduled_tokens) == {steps.ids[0], steps.ids[2]}
    assert slots_in_use(llm) == 0


def test_a_content_is_sent_once(pair: tuple[LLM, Judge]) -> None:
    """A released slot keeps its content for the next request of the same one."""
    llm, _ = pair
    serve(llm, [Ask(PROMPT, content(10))])
    with serving.watching(llm) as steps:
        serve(llm, [Ask(PROMPT, content(10))])
        serve(llm, [Ask(PROMPT, content(11))])
    told = [o.interventions for o in steps.outputs if o.interventions]
    assert len([s for step in told for s in step.placed.get("sums", [])]) == 1


def step_until(llm: LLM, unfinished: int, done: dict[str, Any]) -> None:
    """Step until so many requests are left, and note the final outputs of the others."""
    for _ in range(100):
        if llm.llm_engine.get_num_unfinished_requests() <= unfinished:
            return
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output
    raise AssertionError(f"more than {unfinished} requests are left after 100 steps")


def test_abort_frees_the_slots(pair: tuple[LLM, Judge]) -> None:
    """Aborted while running and while waiting; who waited for the slot gets it."""
    llm, judge = pair
    asks = {
        "running": Ask(PROMPT, {"max_tokens": 60, **content(20), **capture("all")}),
        "staying": Ask(PROMPT, {"max_tokens": 60, **content(21)}),
        "waiting": Ask(PROMPT, {**content(22), **capture("all")}),
        "never": Ask(PROMPT, content(23)),
        "plain": Ask(PROMPT, {"max_tokens": 12, **capture("predicting")}),
    }
    for name, ask in asks.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": ask.prompt}, ask.params())
    for _ in range(4):
        llm.llm_engine.step()
    assert slots_in_use(llm) == SLOTS
    assert len(serving.scheduler_of(llm).running) == SLOTS + 1
    llm.llm_engine.abort_request(["running", "never"])
    assert slots_in_use(llm) == SLOTS - 1
    done: dict[str, Any] = {}
    step_until(llm, 1, done)
    assert done.keys() == {"waiting", "plain"}
    for name, output in done.items():
        judge.check(asks[name], output)
    llm.llm_engine.abort_request(["staying"])
    step_until(llm, 0, done)
    assert slots_in_use(llm) == 0
    (after,) = serve(llm, [asks["waiting"]])
    judge.check(asks["waiting"], after)


def unlike(seed: int) -> dict[str, Any]:
    """Fields of a request whose vector nobody else has."""
    return {"max_tokens": 2, "steering_vectors": {"post_block": {1: vector(10_000 + seed)}}}


def add(llm: LLM, name: str, fields: dict[str, Any], priority: int = 0) -> None:
    params = Ask(PROMPT, fields).params(log_probs=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT}, params, priority=priority)


def run(llm: LLM) -> list[str]:
    """Step until all have ended; returns ids in the order in which they ended."""
    ended = []
    while llm.llm_engine.has_unfinished_requests():
        ended += [o.request_id for o in llm.llm_engine.step() if o.finished]
    return ended


@pytest.mark.parametrize("what", ["slots", "plain"])
def test_a_step_asks_about_few_of_many_that_wait(
    pair: tuple[LLM, Judge], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: as many plain ones are asked about once each."""
    llm, _ = pair
    scheduler = serving.scheduler_of(llm)
    asked = Mock(wraps=scheduler.interventions.can_admit)
    monkeypatch.setattr(scheduler.interventions, "can_admit", asked)
    for i in range(MANY):
        add(llm, f"{i}", unlike(i) if what == "slots" else {"max_tokens": 2})
    llm.llm_engine.step()
    running, waiting = scheduler.get_request_counts()
    assert running + waiting == MANY
    assert (running == SLOTS) == (what == "slots")
    assert scheduler.interventions.num_parked == (waiting if what == "slots" else 0)
    assert [int(name.split("-")[0]) for name in run(llm)] == list(range(MANY))
    assert asked.call_count == (2 * MANY - SLOTS if what == "slots" else MANY)
    assert scheduler.get_request_counts() == (0, 0)


def test_plain_requests_pass_those_that_wait_and_aborted_ones_leave(
    pair: tuple[LLM, Judge],
) -> None:
    llm, _ = pair
    scheduler = serving.scheduler_of(llm)
    for i in range(8):
        add(llm, f"{i}", {**unlike(i), "max_tokens": 20})
    llm.llm_engine.step()
    assert scheduler.interventions.num_parked == 8 - SLOTS
    llm.llm_engine.abort_request(["2", "5"])
    llm.llm_engine.step()
    assert scheduler.get_request_counts() == (SLOTS, 6 - SLOTS)
    add(llm, "plain", {"max_tokens": 2})
    assert run(llm) == ["plain", "0", "1", "3", "4", "6", "7"]
    assert not len(scheduler.requests) and slots_in_use(llm) == 0


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_priorities_hold_among_those_that_wait(tiny_models: TinyModels, policy: str) -> None:
    llm = make_llm(
        tiny_models.path("llama"),
        enable_steering=True,
        max_steering_configs=1,
        scheduling_policy=policy,
    )
    for i, priority in enumerate([0, 5, 3, 1]):
        add(llm, f"{i}", unlike(i), priority)
    llm.llm_engine.step()
    add(llm, "late", unlike(9), -1)
    ended = run(llm)
    shut_down(llm)
    ranked = ["0", "late", "3", "2", "1"]
    assert ended == (ranked if policy == "priority" else ["0", "1", "2", "3", "late"])
