# SPDX-License-Identifier: Apache-2.0
"""More steering contents than slots: requests wait, nobody else does, and slots come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

SLOTS = 2
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
    point = serving.POINTS[seed % len(serving.POINTS)]
    return {"steering_vectors": {point: {seed % models.LAYERS: vector(70 + seed)}}}


def slots_in_use(llm: LLM) -> int:
    count: int = serving.scheduler_of(llm).interventions.slots.in_use
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
    sent = [s for o in steps.outputs if o.interventions for s in o.interventions.sums]
    assert len(sent) == 1


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
