# SPDX-License-Identifier: Apache-2.0
"""What the engine core remembers of one request: cache identity and capture cursor."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, VECTOR, plan_of, vector_sum
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import UNSTEERED, Plan, Segment, SteeringPlan
from vllm.v1.interventions.scheduler.request import RequestInterventions
from vllm.v1.request import Request

pytestmark = pytest.mark.quick

BLOCK = 4
VERSION = 3
DIGESTS = st.sampled_from([UNSTEERED, "a", "b"])


def steered(prompt: int, prefill: str = UNSTEERED, decode: str = UNSTEERED) -> RequestInterventions:
    """Of a plan that only names its sums."""
    steering = SteeringPlan(
        segments=[Segment(0, prefill, UNSTEERED), Segment(prompt, decode, UNSTEERED)],
        inherit=True,
        sums=[vector_sum(digest) for digest in {prefill, decode} - {UNSTEERED}],
    )
    return RequestInterventions(Plan(steering), prompt, None)


def text(digest: str) -> str:
    """In a key: the sum, and no ops, no global tiers, no nonce."""
    return f"{digest}//" if digest else UNSTEERED


def key(*segments: tuple[int, str]) -> list[tuple[str, str]]:
    """Of a block that has these sums from these offsets on."""
    return [("steer", f"{offset}:{text(digest)}") for offset, digest in segments]


def keys(interventions: RequestInterventions, blocks: int = 6) -> list[list[tuple[str, str]]]:
    return [interventions.blocks.keys(i * BLOCK, (i + 1) * BLOCK) for i in range(blocks)]


# -- block keys ---------------------------------------------------------------------------------


def digest_at(interventions: RequestInterventions, position: int) -> str:
    """What acts at one position, read off the key of the block of that position alone."""
    found = interventions.blocks.keys(position, position + 1)
    return found[0][1].partition(":")[2] if found else UNSTEERED


@given(st.integers(1, 20), DIGESTS, DIGESTS)
def test_the_phase_is_a_property_of_the_position(prompt: int, prefill: str, decode: str) -> None:
    interventions = steered(prompt, prefill, decode)
    acting = [digest_at(interventions, p) for p in range(24)]
    assert acting == [text(prefill if p < prompt else decode) for p in range(24)]


@given(st.integers(1, 20), DIGESTS, DIGESTS, st.integers(1, 20), DIGESTS, DIGESTS)
def test_keys_are_equal_exactly_when_the_steering_of_the_block_is(
    prompt: int, prefill: str, decode: str, prompt2: int, prefill2: str, decode2: str
) -> None:
    one, two = steered(prompt, prefill, decode), steered(prompt2, prefill2, decode2)
    for start in range(0, 24, BLOCK):
        span = range(start, start + BLOCK)
        acts_one = [prefill if p < prompt else decode for p in span]
        acts_two = [prefill2 if p < prompt2 else decode2 for p in span]
        keys_one = one.blocks.keys(start, start + BLOCK)
        keys_two = two.blocks.keys(start, start + BLOCK)
        assert (keys_one == keys_two) == (acts_one == acts_two)
        assert (keys_one == []) == all(a == UNSTEERED for a in acts_one)


def test_keys_are_a_pure_function() -> None:
    interventions = steered(6, "a", "b")
    first = keys(interventions)
    accept(interventions, chunk([0]), 7)
    assert interventions.blocks.keys(8, 12) == first[2]
    assert keys(interventions) == first == keys(steered(6, "a", "b"))
    assert first != keys(steered(7, "a", "b"))


def test_nothing_for_the_unsteered() -> None:
    assert keys(RequestInterventions(None, 6, None)) == [[]] * 6
    only_capture = plan_of(capture={"inline": {"hooks": {"pre_attn": [0]}}})
    assert keys(RequestInterventions(only_capture, 5, None)) == [[]] * 6
    nothing = plan_of(steering_vectors={})
    assert keys(RequestInterventions(nothing, 5, None)) == [[]] * 6
    assert keys(steered(6, "a", "a")) != [[]] * 6


def test_equal_phases_are_one_segment() -> None:
    # Else a prompt and its continuation (prompt + output sent again) would never share blocks.
    assert keys(steered(6, "a", "a")) == keys(steered(17, "a", "a")) == [key((0, "a"))] * 6
    assert keys(steered(6, "a", "b")) != keys(steered(17, "a", "b"))


def test_decode_only_leaves_the_prompts_blocks_alone() -> None:
    assert keys(steered(10, decode="b"), 4) == [
        [],
        [],
        key((0, ""), (2, "b")),
        key((0, "b")),
    ]


def test_prefill_only() -> None:
    assert keys(steered(10, prefill="a"), 4) == [
        key((0, "a")),
        key((0, "a")),
        key((0, "a"), (2, "")),
        [],  # the parent's hash is chained in
    ]


def test_a_prompt_that_ends_with_its_block() -> None:
    found = keys(steered(8, "a", "b"), 4)
    assert found == [key((0, "a"))] * 2 + [key((0, "b"))] * 2


def request_of(prompt: int, **fields: Any) -> Request:
    plan = plan_of(prompt=prompt, **fields)
    params = SamplingParams(max_tokens=4)
    return Request("id", list(range(prompt)), params, None, plan=plan)


def test_the_keys_reach_the_block_hash() -> None:
    vectors = {"pre_attn": {0: VECTOR}}
    plain = generate_block_hash_extra_keys(request_of(8), 0, 4, 0)[0]
    same = generate_block_hash_extra_keys(request_of(8, steering_vectors=vectors), 0, 4, 0)[0]
    again = generate_block_hash_extra_keys(request_of(9, steering_vectors=vectors), 0, 4, 0)[0]
    later = generate_block_hash_extra_keys(request_of(8, decode_steering_vectors=vectors), 0, 4, 0)[
        0
    ]
    assert plain is None
    assert later is None
    assert same is not None
    assert same == again


# -- the capture cursor -------------------------------------------------------------------------


def capturing(positions: Any, prompt: int = 5, max_tokens: int = 8) -> RequestInterventions:
    value = {"inline": {"hooks": {"pre_attn": [0], "post_block": [1]}, "positions": positions}}
    plan = plan_of(capture=value, prompt=prompt, max_tokens=max_tokens)
    return RequestInterventions(plan, prompt, None)


def chunk(positions: list[int], mark: float = 0.0) -> CapturedChunk:
    at = np.array(positions, dtype=np.int64)
    values = torch.from_numpy(at)[:, None, None].repeat(1, 2, HIDDEN) + mark
    return CapturedChunk(at, [values.float()], VERSION, [("r", len(at))])


def accept(interventions: RequestInterventions, rows: CapturedChunk, num_tokens: int) -> list[int]:
    """The positions that go on to the frontend."""
    taken = interventions.accept(rows, num_tokens)
    taken = taken and interventions.relayed(taken)
    if taken is None:
        return []
    assert taken.owners == [("r", len(taken.positions))] and taken.version == VERSION
    assert taken.values[0].shape == (len(taken.positions), 2, HIDDEN)
    assert torch.equal(taken.values[0][:, 0, 0], torch.from_numpy(taken.positions).float())
    return [int(p) for p in taken.positions]


def test_only_wanted_rows_are_taken() -> None:
    interventions = capturing([1, 3, 6])
    assert accept(interventions, chunk([0, 1, 2, 3, 4]), 6) == [1, 3]
    assert accept(interventions, chunk([5]), 7) == []
    assert accept(interventions, chunk([6]), 8) == [6]


def test_rows_computed_again_are_not_taken_again() -> None:
    interventions = capturing("all")
    assert accept(interventions, chunk([0, 1, 2, 3, 4]), 6) == [0, 1, 2, 3, 4]
    assert accept(interventions, chunk([5]), 7) == [5]
    # A preemption: the whole request is computed again, in other pieces.
    assert accept(interventions, chunk([0, 1, 2]), 7) == []
    assert accept(interventions, chunk([3, 4, 5, 6]), 8) == [6]


def test_rows_of_rejected_drafts_are_dropped() -> None:
    interventions = capturing("all")
    accept(interventions, chunk([0, 1, 2, 3, 4]), 6)
    # Drafts at 6-8; one was accepted, so tokens 5-7 are known and token 7 was not fed back.
    assert accept(interventions, chunk([5, 6, 7, 8]), 8) == [5, 6]
    assert accept(interventions, chunk([7, 8]), 10) == [7, 8]


@pytest.mark.parametrize(("wanted", "stays"), [([2, 3], True), ([1, 3], False)])
def test_neighbours_stay_where_they_lie(wanted: list[int], stays: bool) -> None:
    step = chunk(list(range(5)))
    taken = capturing(wanted).accept(step, 6)
    assert taken is not None and taken.positions.tolist() == wanted
    step.values[0].zero_()
    assert bool((taken.values[0] == 0).all()) == stays


WANTED = st.sets(st.integers(0, 11), min_size=1)


STEPS = st.lists(st.tuples(st.integers(1, 13), st.booleans()), max_size=20)
"""(tokens of a step at most, whether the request is preempted before it)."""


@given(WANTED, STEPS)
def test_each_wanted_row_once_whatever_the_steps(
    wanted: set[int], steps: list[tuple[int, bool]]
) -> None:
    interventions = capturing(sorted(wanted))
    tokens, computed = 5, 0
    got: list[int] = []
    for most, preempted in [*steps, *[(13, False)] * 10]:
        if tokens > 12:
            break
        computed = 0 if preempted else computed
        stop = min(computed + most, tokens)
        at, computed = list(range(computed, stop)), stop
        sampled = computed == tokens
        tokens += sampled
        got += accept(interventions, chunk(at), tokens)
    assert tokens == 13
    assert got == sorted(wanted)


@given(WANTED, st.integers(0, 12))
def test_cache_hits_end_before_the_next_wanted_row(wanted: set[int], done: int) -> None:
    interventions = capturing(sorted(wanted))
    if done:
        accept(interventions, chunk(list(range(done))), 14)
    delivered = {p for p in wanted if p < done}
    rest = wanted - delivered
    assert interventions.cache_hit_limit() == min(rest, default=sys.maxsize)


def test_a_request_without_capture_takes_any_hit() -> None:
    assert steered(5, "a", "a").cache_hit_limit() == sys.maxsize
    assert RequestInterventions(None, 5, None).cache_hit_limit() == sys.maxsize
    assert capturing("all_generated").cache_hit_limit() == 5
    assert capturing("all").cache_hit_limit() == 0
    offered = [(0, 5), (4, 1), (0, 6), (5, 1), (0, 0), (9, None)]
    of_answer = capturing("all_generated")
    assert [of_answer.needs_computed(*o) for o in offered] == [False, False, True, True] + [
        False
    ] * 2
    assert not steered(5, "a", "a").needs_computed(0, 5)


# -- around the frontend ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        "steering_vectors",
        "prefill_steering_vectors",
        "decode_steering_vectors",
        "steering_modules",
        "steering",
        "steering_inherit_global",
        "capture",
    ],
)
def test_raw_fields_never_reach_the_engine_core(field: str) -> None:
    params = SamplingParams(max_tokens=4)
    RequestInterventions(None, 5, params)
    setattr(params, field, {})
    with pytest.raises(ValueError, match="did not pass the input processor"):
        RequestInterventions(None, 5, params)
