# SPDX-License-Identifier: Apache-2.0
"""Who gets the rows of a step where not all fit: nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.interventions.scheduler.test_decisions import PROMPT, ROW, request, scheduler
from tests.support import serving
from tests.support.plans import config_of, sees_both_ways
from tests.support.serving import Ask, Judge, Steps, capture, prompt_of, serve
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.interventions.scheduler.row_budget import RowBudget
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

LONG = 80
"""Tokens of a prompt that captures everything: a step takes all it can get."""


def without_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a refusal is forgotten."""
    monkeypatch.setattr(RowBudget, "_refuse", lambda *_: 0)


def step_of(ours: Any, *asked: tuple[Any, int, int]) -> list[int]:
    """Tokens granted to (request, first, count), in a step of its own."""
    granted = [ours.rows.cap_tokens(*one) for one in asked]
    runs = {r.request_id: n for (r, _, _), n in zip(asked, granted, strict=True) if n}
    for one, _, _ in asked:
        if one.request_id in runs:
            one.status = RequestStatus.RUNNING
    ours.message(runs)
    return granted


def test_a_refused_request_comes_first() -> None:
    ours = scheduler(rows=3)
    long, decoding = request("long", "all"), request("d", "all_generated")
    assert step_of(ours, (long, 0, 8), (decoding, 8, 1)) == [3, 0]
    assert step_of(ours, (long, 3, 5), (decoding, 8, 1)) == [2, 1]
    assert step_of(ours, (long, 5, 3), (decoding, 9, 1)) == [3, 0], "no claim is left over"


def test_claims_are_served_in_the_order_of_refusal() -> None:
    ours = scheduler(rows=2)
    long = request("long", "all")
    many = [request(f"d{i}", "all_generated", layers=(0, 1)) for i in range(3)]
    turns = [step_of(ours, (long, 0, 8), *((d, 8, 1) for d in many)) for _ in range(6)]
    assert turns[:4] == [[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert turns[4] == [2, 0, 0, 0], "its claim is the oldest again, so it leaves nothing to others"
    assert turns[5] == [0, 1, 0, 0], "and then it has none"


def test_prompts_that_waited_together_are_not_cut() -> None:
    """Rows of a prompt that come in one step are one piece, which nobody has to put together."""
    ours = scheduler(rows=8)
    prompts = [request(f"p{i}", "all_prompt") for i in range(3)]
    assert step_of(ours, *((p, 0, 8) for p in prompts)) == [8, 0, 0]
    assert step_of(ours, *((p, 0, 8) for p in prompts[1:])) == [8, 0]
    assert step_of(ours, (prompts[2], 0, 8)) == [8]


def test_later_prompts_do_not_cut_those_that_were_not_asked() -> None:
    """Of parked requests few are asked in a step. Others that came meanwhile and were refused are
    not served before them: the twin is one that came last."""
    ours = scheduler(rows=8)
    prompts = [request(f"p{i}", "all_prompt") for i in range(5)]
    for arrived, prompt in enumerate(prompts):
        prompt.arrival_time = arrived
    first, parked, *later, last = prompts
    assert step_of(ours, *((p, 0, 8) for p in (first, *later))) == [8, 0, 0]
    assert step_of(ours, (parked, 0, 8)) == [8]
    assert step_of(ours, *((p, 0, 8) for p in (later[0], later[1]))) == [8, 0]
    assert step_of(ours, (last, 0, 8), (later[1], 0, 8)) == [7, 1]


@pytest.mark.parametrize("gone", ["finish", "preempt", "withdraw"])
def test_a_claim_ends_with_its_request(gone: str) -> None:
    ours, long, decoding = scheduler(rows=2), request("long", "all"), request("d", "all")
    for end in (True, False):
        assert step_of(ours, (long, 0, 8), (decoding, 8, 1)) == [2, 0]
        if end:
            {"finish": ours.finish, "preempt": ours.preempt, "withdraw": ours.rows.withdraw}[gone](
                decoding
            )
        assert ours.rows.cap_tokens(long, 2, 6) == 1 + end
        ours.message({"long": 1 + end})


def test_a_claim_lasts_one_step() -> None:
    """A request that does not ask again, for lack of KV blocks say, keeps nothing from others."""
    ours, long, decoding = scheduler(rows=2), request("long", "all"), request("d", "all")
    assert step_of(ours, (long, 0, 8), (decoding, 8, 1)) == [2, 0]
    assert step_of(ours, (long, 2, 6)) == [1]
    assert step_of(ours, (long, 3, 5)) == [2]


@pytest.mark.parametrize("whole", [True, False])
def test_an_image_is_in_one_step(whole: bool) -> None:
    """Where its tokens see each other both ways; else it is cut like text, which is the twin."""
    ours, long, decoding = scheduler(rows=4), request("long", "all"), request("d", "all")
    if whole:
        ours.rows = RowBudget(sees_both_ways(config_of(capture_buffer_bytes=4 * ROW)))
    image = PlaceholderRange(offset=2, length=4)
    long.mm_features = [Mock(mm_position=image)]
    assert step_of(ours, (long, 0, 8)) == [2 if whole else 4]
    first = 2 if whole else 4
    assert step_of(ours, (decoding, 8, 1), (long, first, 8 - first)) == [1, 0 if whole else 3]
    if whole:
        assert step_of(ours, (decoding, 9, 1), (long, 2, 6)) == [0, 4], "all rows are its claim"
        assert step_of(ours, (long, 6, 2)) == [2]


def test_positions_without_rows_need_no_room() -> None:
    ours = scheduler(rows=1)
    decoding, long = request("d", "all"), request("long", [5])
    assert step_of(ours, (request("first", "all"), 0, 1), (decoding, 8, 1)) == [1, 0]
    assert ours.rows.cap_tokens(long, 0, 8) == 5
    assert ours.rows.cap_tokens(request("plain"), 0, 8) == 8


def test_drafts_claim_all_their_rows() -> None:
    ours = scheduler(rows=4, drafts=2)
    long, drafting = request("long", "all_prompt"), request("d", "all_generated")
    assert step_of(ours, (long, 0, 8), (drafting, 8, 3)) == [4, 0]
    assert step_of(ours, (long, 4, 4), (drafting, 8, 3)) == [1, 3]


def longest_wait(seed: int, can_run: float) -> int:
    """Most steps in a row that a request asked for rows and got none, of random ones."""
    chance = random.Random(seed)
    room = chance.randint(3, 9)
    ours = scheduler(rows=room)
    kinds = [(("all", (0, 1, 3)[: chance.randint(1, 3)]), chance.random() < 0.5) for _ in range(8)]
    asking = [request(f"r{i}", *kind) for i, (kind, _) in enumerate(kinds)]
    waits, worst = [0] * len(asking), 0
    for _ in range(60):
        taken, scheduled = 0, {}
        for i, (one, (_, whole)) in enumerate(zip(asking, kinds, strict=True)):
            if chance.random() >= can_run:
                waits[i] = 0  # has to wait for something else, and then comes anew
                continue
            count = ours.rows.cap_tokens(one, 0 if whole else PROMPT, PROMPT if whole else 1)
            taken += count * len(one.interventions.plan.capture.sites)  # type: ignore[union-attr]
            waits[i] = 0 if count else waits[i] + 1
            worst = max(worst, waits[i])
            if count:
                scheduled[one.request_id] = count
                one.status = RequestStatus.RUNNING
        assert taken <= room, "more rows than fit"
        ours.message(scheduled)
    return worst


@pytest.mark.parametrize("can_run", [1.0, 0.7])
def test_waits_are_bounded(can_run: float) -> None:
    assert max(longest_wait(seed, can_run) for seed in range(60)) <= 2 * 8


def test_waits_are_not_bounded_without_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    without_claims(monkeypatch)
    assert max(longest_wait(seed, 1.0) for seed in range(20)) == 60


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    """Room for the rows of three positions at all sites."""
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        capture_consumers=["inline"],
        enable_prefix_caching=False,
        capture_buffer_bytes=3 * len(STREAM_POINTS) * models.LAYERS * models.HIDDEN * 4,
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def ends_of(steps: Steps) -> list[int]:
    """The step in which each prompt's request was scheduled last."""
    return [
        max(n for n, o in enumerate(steps.outputs) if name in o.num_scheduled_tokens)
        for name in steps.ids
    ]


@pytest.mark.v2
def test_decoding_beside_a_long_prompt(
    pair: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go on together; the twin without claims serves the long prompt alone until it ends."""
    llm, judge = pair
    asks = [Ask(prompt_of(LONG, 90), capture("all"))]
    asks += [Ask(prompt_of(5, 91 + i), capture("all")) for i in range(2)]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    assert steps.largest_row_count == 3 * len(STREAM_POINTS) * models.LAYERS
    long, *short = ends_of(steps)
    prefill = len([n for n in steps.chunks(0) if n > 1])
    assert max(short) < prefill < long, "a decoding request waited for the prompt"
    without_claims(monkeypatch)
    with serving.watching(llm) as starved:
        twins = serve(llm, asks)
    for ask, output in zip(asks, twins, strict=True):
        judge.check(ask, output)
    assert min(ends_of(starved)[1:]) > LONG // 3


def test_a_step_asks_about_few_of_many_that_wait_for_rows(
    pair: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three run in a step, and those behind them are asked about when it may be their turn."""
    llm, judge = pair
    scheduler = serving.scheduler_of(llm)
    asked = Mock(wraps=scheduler.interventions.rows.cap_tokens)
    monkeypatch.setattr(scheduler.interventions.rows, "cap_tokens", asked)
    asks = [Ask(prompt_of(5, 100 + i), {**capture([0]), "max_tokens": 1}) for i in range(45)]
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    for ask, output in zip(asks[:3], outputs[:3], strict=True):
        judge.check(ask, output)
    order = [int(name.split("-")[0]) for o in steps.outputs for name in o.num_scheduled_tokens]
    assert order == sorted(order) and len(order) == 45
    assert len(steps.outputs) == 15
    assert asked.call_count == 45 + 13 * 4 + 3
