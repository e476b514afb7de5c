# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decides for one step: how many tokens, which rows, what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.test_capture_consumers import KeepHere
from tests.support.plans import HIDDEN, SHAPE, VECTOR, config_of, plan_of
from tests.support.rows import step_rows
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.interventions.calls import CaptureCall
from vllm.v1.interventions.capture_groups import (
    CaptureGroup,
    CaptureGroups,
    LocalStream,
    num_senders,
)
from vllm.v1.interventions.messages import FIRST_SLOT, ROWS_PER_SLOT, WorkerRequest
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.turns import MAX_SKIPS
from vllm.v1.interventions.step_rows import Blocks, StepRows
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.quick

ROW = 4 * HIDDEN
PROMPT = 8
VERSION = 5


def scheduler(rows: int = 100, drafts: int = 0, **options: Any) -> SchedulerInterventions:
    """With room for `rows` rows a step."""
    config: VllmConfig = config_of(capture_buffer_bytes=rows * ROW + ROW - 1, **options)
    if drafts:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts)  # type: ignore[assignment]
    return SchedulerInterventions(config, hash_block_size=4)


def request(name: str, positions: Any = None, layers: Any = (0,), **fields: Any) -> Request:
    if positions is not None:
        hooks = {"post_block": list(layers)}
        fields["capture"] = {"inline": {"hooks": hooks, "positions": positions}}
    plan = plan_of(prompt=PROMPT, max_tokens=8, **fields)
    return Request(name, list(range(PROMPT)), SamplingParams(max_tokens=8), None, plan=plan)


def rows_of(step: Any) -> dict[str, list[int]]:
    return {name: offsets.tolist() for name, offsets in step.rows.items()} if step else {}


def test_a_plain_request_is_none_of_our_business() -> None:
    ours, plain = scheduler(rows=0), request("plain")
    assert ours.can_admit(plain)
    assert ours.rows.cap_tokens(plain, 0, 5) == 5
    ours.admit(plain)
    assert ours.message({"plain": 5}) is None


def test_rows_are_offsets_into_the_steps_tokens() -> None:
    ours, asks = scheduler(), request("r", [1, 5, 9])
    assert ours.rows.cap_tokens(asks, 0, 4) == 4
    assert rows_of(ours.message({"r": 4})) == {"r": [1]}
    assert ours.rows.cap_tokens(asks, 4, 4) == 4
    assert rows_of(ours.message({"r": 4})) == {"r": [1]}
    assert ours.rows.cap_tokens(asks, 8, 1) == 1
    assert ours.message({"r": 1}) is None
    assert ours.rows.cap_tokens(asks, 9, 1) == 1
    assert rows_of(ours.message({"r": 1})) == {"r": [0]}


def test_tokens_are_capped_where_the_room_ends() -> None:
    ours, asks = scheduler(rows=3), request("r", [0, 2, 4, 6])
    assert ours.rows.cap_tokens(asks, 0, 8) == 6  # up to the fourth wanted position, without it
    assert rows_of(ours.message({"r": 6})) == {"r": [0, 2, 4]}
    two_sites = request("r", [0, 2, 4, 6], layers=[0, 1])
    assert ours.rows.cap_tokens(two_sites, 0, 8) == 2
    assert rows_of(ours.message({"r": 2})) == {"r": [0]}


def test_a_prompt_that_sees_both_ways_is_not_cut() -> None:
    shape = msgspec.structs.replace(SHAPE, whole_prompts=True)
    asks = request("a", "all_prompt")
    assert scheduler(rows=7, shape=shape).rows.cap_tokens(asks, 0, 8) == 0
    assert scheduler(rows=8, shape=shape).rows.cap_tokens(asks, 0, 8) == 8
    assert scheduler(rows=7).rows.cap_tokens(asks, 0, 8) == 7, "another's is"


def test_room_is_shared_and_given_back() -> None:
    ours = scheduler(rows=3)
    first, second = request("first", "all_prompt"), request("second", "all_prompt")
    assert ours.rows.cap_tokens(first, 0, 2) == 2
    assert ours.rows.cap_tokens(second, 0, 8) == 1
    assert ours.rows.cap_tokens(request("third", "all_prompt"), 0, 8) == 0
    ours.preempt(first)
    assert ours.rows.cap_tokens(second, 0, 8) == 3
    assert rows_of(ours.message({"second": 3})) == {"second": [0, 1, 2]}
    assert ours.rows.cap_tokens(first, 2, 8) == 3  # a new step, and it waits longer than the third
    first.status = RequestStatus.RUNNING
    assert ours.rows.cap_tokens(first, 2, 8) == 2  # now one row is the third's


def test_tokens_the_scheduler_took_back_have_no_rows() -> None:
    ours, asks = scheduler(), request("r", "all_prompt")
    assert ours.rows.cap_tokens(asks, 0, 6) == 6
    assert rows_of(ours.message({"r": 3})) == {"r": [0, 1, 2]}
    assert ours.rows.cap_tokens(asks, 3, 5) == 5
    assert ours.message({"other": 5}) is None


WANTED = st.sets(st.integers(0, PROMPT - 1), min_size=1)
ASKS = st.lists(
    st.tuples(WANTED, st.integers(1, 2), st.integers(1, PROMPT)), min_size=1, max_size=4
)


@given(st.integers(2, 9), ASKS)
def test_a_step_never_has_more_rows_than_room(
    room: int, asks: list[tuple[set[int], int, int]]
) -> None:
    ours = scheduler(rows=room)
    scheduled: dict[str, int] = {}
    total = 0
    for i, (wanted, layers, count) in enumerate(asks):
        fits = ours.rows.cap_tokens(request(f"r{i}", sorted(wanted), list(range(layers))), 0, count)
        assert 0 <= fits <= count
        rows = layers * len([p for p in wanted if p < fits])
        next_is_wanted = fits in wanted
        total += rows
        assert total <= room
        if fits < count:  # capped no earlier than it must be
            assert next_is_wanted
            assert total + layers > room
        if fits:
            scheduled[f"r{i}"] = fits
    found = rows_of(ours.message(scheduled))
    for i, (wanted, _, _) in enumerate(asks):
        kept = sorted(p for p in wanted if p < scheduled.get(f"r{i}", 0))
        assert found.get(f"r{i}", []) == kept


@given(st.integers(2, 9), st.integers(1, 3), ASKS)
def test_no_sender_has_more_rows_than_room(
    room: int, senders: int, asks: list[tuple[set[int], int, int]]
) -> None:
    """Each its share where the step is split, else one all; it is split where one may lack room."""
    shape = msgspec.structs.replace(SHAPE, senders=senders)
    ours, config = scheduler(rows=room, shape=shape), config_of(shape)
    scheduled: dict[str, int] = {}
    for i, (wanted, layers, count) in enumerate(asks):
        one = request(f"r{i}", sorted(wanted), list(range(2 * layers)), config=config)
        if layers * 2 <= room * senders and (fits := ours.rows.cap_tokens(one, 0, count)):
            scheduled[f"r{i}"] = fits
            ours.admit(one)
    step = ours.message(scheduled)
    if step is None:
        return
    sites = {
        site: i for i, site in enumerate((p, n) for n in SHAPE.layers for p in SHAPE.offers(n))
    }
    of_each = [CaptureGroups(sites, shape, n, senders) for n in range(senders)]
    of_one = [CaptureGroups(sites, shape)]
    for groups, holds in ((of_each, step.split), (of_one, not step.split)):
        rows = [
            sum(
                len(at) * (group.num_raw + group.rest_rows)
                for name, at in step.rows.items()
                if (group := of.of(step.admitted[name])) is not None
            )
            for of in groups
        ]
        assert max(rows) <= room or not holds
    assert step.split <= (senders > 1)


def test_who_sends() -> None:
    """All ranks where the engine core has started all workers here; else the first alone."""

    def senders(
        ranks: int = 2, backend: Any = "mp", nnodes: int = 1, connector: Any = None, **options: Any
    ) -> int:
        config = config_of(**options)
        config.parallel_config = SimpleNamespace(  # type: ignore[assignment]
            tensor_parallel_size=ranks, distributed_executor_backend=backend, nnodes=nnodes
        )
        config.kv_transfer_config = connector
        return num_senders(config)

    assert [senders(n) for n in (1, 2, 8)] == [1, 2, 8]
    assert senders(1, "uni") == senders(2, "ray") == senders(2, "external_launcher") == 1
    assert senders(backend=object) == senders(nnodes=2) == senders(connector=object()) == 1
    assert senders(capture_points=["q", "post_block"]) == 2
    assert senders(capture_points=["q", "z"]) == senders(capture_lens=["logit"]) == 1


def test_many_rows_are_split() -> None:
    """As many as one sender has no room for; few are not, nor those of one sender."""
    shape = msgspec.structs.replace(SHAPE, senders=2)
    config = config_of(shape)
    for of, asked, rows, split in (
        (shape, range(4), 8, True),
        (shape, range(2), 8, False),
        (shape, [0], 8, False),
        (SHAPE, range(2), 8, False),
    ):
        ours = scheduler(rows=rows, shape=of)
        one = request("r", "all", asked, config=config if of is shape else None)
        assert ours.rows.cap_tokens(one, 0, 4) == 4
        step = ours.message({"r": 4})
        assert step is not None and step.split == split
        step = ours.message({})
        assert step is None or not step.split, "the next step is another"


def test_with_drafts_every_row_past_the_prompt_is_reserved() -> None:
    ours, asks = scheduler(drafts=2), request("r", [9])
    assert ours.rows.cap_tokens(asks, 8, 3) == 3
    assert rows_of(ours.message({"r": 3})) == {"r": [0, 1, 2]}
    prompt_only = request("r", [2])
    assert ours.rows.cap_tokens(prompt_only, 8, 3) == 3
    assert ours.message({"r": 3}) is None
    without = scheduler()
    assert without.rows.cap_tokens(asks, 8, 3) == 3
    assert rows_of(without.message({"r": 3})) == {"r": [1]}


def test_draft_rows_come_together_or_not_at_all() -> None:
    asks = request("r", "all")
    assert scheduler(rows=2, drafts=2).rows.cap_tokens(asks, 8, 3) == 0
    assert scheduler(rows=3, drafts=2).rows.cap_tokens(asks, 8, 3) == 3
    assert scheduler(rows=2, drafts=2).rows.cap_tokens(asks, 0, 3) == 2


def told(step: Any, name: str) -> tuple[list[int], list[int], list[int]]:
    """(firsts, table rows, programs) of what a worker is told of a request."""
    worker: WorkerRequest = step.admitted[name]
    return worker.firsts.tolist(), worker.table_rows.tolist(), worker.programs.tolist()


def row(slot: int, generated: bool) -> int:
    """Of the table."""
    return ROWS_PER_SLOT * slot + generated


def test_an_admitted_request_is_told_to_the_workers_once() -> None:
    ours = scheduler()
    vectors, other = {"pre_attn": {0: VECTOR}}, {"pre_attn": {1: VECTOR}}
    steers = request("r", "all", prefill_steering_vectors=vectors, decode_steering_vectors=other)
    assert ours.can_admit(steers)
    ours.admit(steers)
    step = ours.message({"r": 8})
    assert step is not None
    slots = (FIRST_SLOT, FIRST_SLOT + 1)
    assert told(step, "r") == ([0, PROMPT], [row(slots[0], False), row(slots[1], True)], [0, 0])
    [stream] = step.admitted["r"].streams
    assert stream.sites == (("post_block", 0),) and not stream.runs
    plan = steers.interventions.plan.steering
    assert plan is not None
    digests = [segment.vector_sum for segment in plan.segments]
    assert [(slot, c.digest, inherit) for slot, (c, inherit) in step.placed["sums"]] == [
        (slots[0], digests[0], True),
        (slots[1], digests[1], True),
    ]
    assert [p.digest for p in step.new_sets] == [p.digest for p in plan.sets]
    assert ours.message({"r": 1}) is None
    ours.admit(steers)  # after a preemption: its slots again, nothing is sent twice
    step = ours.message({"r": 8})
    assert step is not None
    assert (list(step.admitted), step.placed, step.new_sets) == (["r"], {}, [])


def test_an_unsteered_phase_is_row_zero() -> None:
    ours = scheduler()
    ours.admit(request("r", decode_steering_vectors={"pre_attn": {0: VECTOR}}))
    step = ours.message({"r": 8})
    assert step is not None
    assert told(step, "r") == ([0, PROMPT], [0, row(FIRST_SLOT, True)], [0, 0])


def test_requests_wait_for_slots_and_get_them_when_one_ends() -> None:
    ours = scheduler(max_steering_configs=1)
    one, two = (request(n, steering_vectors={"pre_attn": {i: VECTOR}}) for i, n in enumerate("ab"))
    ours.admit(one)
    assert not ours.can_admit(two)
    assert ours.can_admit(request("plain"))
    ours.finish(one)
    assert ours.can_admit(two)
    ours.admit(two)
    step = ours.message({"b": 8})
    assert step is not None
    # Only what is in the slot now is sent: the first one never ran.
    plan = two.interventions.plan.steering
    assert plan is not None
    assert step.placed == {"sums": [(FIRST_SLOT, (plan.sums[0], True))]}
    assert [p.digest for p in step.new_sets] == [p.digest for p in plan.sets]
    rows = [row(FIRST_SLOT, False), row(FIRST_SLOT, True)]
    assert told(step, "b") == ([0, PROMPT], rows, [0, 0])


def test_requests_wait_for_rows_of_ops_too() -> None:
    options: dict[str, Any] = {
        "steering_families": ["add", "ablate", "gate"],
        "max_steering_rows": 3,
    }
    ours, config = scheduler(**options), config_of(**options)
    gate = {"probe": VECTOR, "threshold": 0.0, "sharpness": 1.0}
    op = {"op": "ablate", "point": "post_block", "layers": [0]}
    one = request("one", steering=[{**op, "direction": VECTOR, "gate": gate}], config=config)
    two = request(
        "two", steering=[{**op, "direction": [1.0, 0, 0, 0], "gate": gate}], config=config
    )
    ungated = request("three", steering=[{**op, "direction": VECTOR}], config=config)
    ours.admit(one)
    assert ours.tables.terms.in_use == 2
    assert not ours.can_admit(two)
    assert ours.can_admit(ungated)
    ours.admit(ungated)
    ours.finish(one)
    assert ours.can_admit(two)
    ours.admit(two)
    step = ours.message({"two": 8, "three": 8})
    assert step is not None
    assert len(step.placed["terms"]) == 3, "two terms and the probe of one"
    [three, two_] = (told(step, name)[2] for name in ("three", "two"))
    assert 0 not in three + two_
    assert not set(three) & set(two_)


def captured(name: str, positions: list[int]) -> StepRows:
    """As a worker makes it."""
    layout = CaptureGroup([0], 1, [LocalStream((0,))])
    blocks = Blocks({layout: [(name, np.arange(len(positions)))]})
    arena = torch.tensor(positions).float()[:, None].repeat(1, HIDDEN)
    return step_rows(VERSION, blocks, arena, torch.tensor(positions))


def test_rows_are_handed_to_their_request() -> None:
    ours, asks, other = scheduler(), request("r", "all_prompt"), request("other", "all_prompt")
    asks.append_output_token_ids(7)
    for one in (asks, other):
        ours.relay.accept(one, captured("r", [0, 1, 2]))
    ours.relay.accept(asks, None)
    message: dict[int, EngineCoreOutputs] = {}
    ours.relay.join(message, {}, None)
    ours.relay.accept(request("plain"), captured("plain", [0]))
    ours.relay.join({}, {}, None)
    [output] = message[0].outputs
    chunks = output.captured or []
    assert [c.owners for c in chunks] == [[("r", 3)]]
    assert [c.positions.tolist() for c in chunks] == [[0, 1, 2]]
    assert chunks[0].values[0][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert chunks[0].version == VERSION


def test_who_waits_for_a_slow_consumer_holds_up_nobody_else() -> None:
    """Neither those that steer nor those that capture for another consumer; but later ones of its
    own kind, once it has waited long."""
    room = {"pending_bytes": PROMPT * ROW, "max_request_bytes": PROMPT * ROW}
    names = ("slow", "other")
    consumers = [{"consumer": KeepHere(), "instance_name": n, **room} for n in names]
    config = config_of(capture_consumers=consumers)
    ours = SchedulerInterventions(config, hash_block_size=4)

    def asking_for(name: str, consumer: str, positions: str) -> Request:
        capture = {consumer: {"hooks": {"post_block": [0]}, "positions": positions}}
        plan = plan_of(prompt=PROMPT, max_tokens=8, capture=capture, config=config)
        asks = Request(name, list(range(PROMPT)), SamplingParams(max_tokens=8), None, plan=plan)
        ours.arrive(asks)
        return asks

    vector_set = asking_for("part", "slow", "last_prompt")
    assert ours.can_admit(vector_set)
    ours.admit(vector_set)
    whole, late = asking_for("whole", "slow", "all_prompt"), asking_for("l", "slow", "last_prompt")
    for _ in range(MAX_SKIPS + 1):
        assert not ours.can_admit(whole)
        ours.message({})
    assert not ours.can_admit(late)
    assert ours.can_admit(asking_for("elsewhere", "other", "all_prompt"))
    assert ours.can_admit(request("steers", steering_vectors={"post_block": {0: VECTOR}}))
    assert ours.can_admit(request("inline", "all"))
    ours.captures.call(CaptureCall("part", released="slow"))
    assert not ours.can_admit(late)
    assert ours.can_admit(whole)
    ours.admit(whole)
    ours.finish(whole)
    ours.captures.call(CaptureCall("whole", released="slow"))
    assert ours.can_admit(late)
