# SPDX-License-Identifier: Apache-2.0
"""Cache identity under changing global tiers: equal histories are equal keys, others are not.

Whatever brought it: a history has the bits that workers add up, of a request and of the tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import HIDDEN, VECTOR, array, config_of, plan_of
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.plan import UNSTEERED, Segment, SteeringPlan, VectorSum
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.identity import BlockIdentity, Era
from vllm.v1.interventions.scheduler.state import GlobalState
from vllm.v1.interventions.vectors import sum_digest, vector_set_of
from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.quick

LENGTH, BLOCK = 24, 4
SETS = {
    name: array.astype(np.float32)
    for name, array in zip("xyz", np.random.default_rng(0).normal(size=(3, 64)), strict=True)
}
OWN = [("x", 1.0)], [("y", 1.0)], [("x", 0.3)], [("x", 1.0), ("z", 1.0)]
FACTORS = [(("z", 0), np.float32(0.7).tobytes())]
SUMS = {
    each.digest: each
    for sets in OWN
    for factors in ([], FACTORS)
    for each in [VectorSum(digest=sum_digest(sets, factors), sets=sets, factors=factors)]
}
NAMES = st.sampled_from([UNSTEERED, *SUMS])
ADDED = st.sampled_from([(), ("x",), ("y",), ("z", "x")])
STATES = st.tuples(ADDED, ADDED)
"""(what is added to the prompt, to generated positions)."""


State = tuple[tuple[str, ...], tuple[str, ...]]


def row_of(name: str, tiers: tuple[str, ...]) -> bytes:
    """What a worker puts into its table, and by what it multiplies, bit for bit."""
    own = SUMS.get(name)
    row, factor = np.zeros(64, np.float32), np.float32(0.7 if own and own.factors else 1)
    for part, scale in own.sets if own else []:
        row += np.float32(scale) * SETS[part]
    for tier in tiers:
        row += factor * SETS[tier]
    return row.tobytes() + factor.tobytes() if own or tiers else b""


@dataclass
class History:
    """A request, position by position."""

    prompt: int
    own: list[tuple[str, str]]
    """(sum, program) of each position."""
    inherits: bool
    state: State
    nonce: str = ""
    ran_under: list[tuple[State, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ran_under = [(self.state, "")] * LENGTH
        segments = [Segment(0, *self.own[0])] + [
            Segment(p, *now)
            for p, (before, now) in enumerate(pairwise(self.own), 1)
            if now != before or p == self.prompt
        ]
        plan = SteeringPlan(segments=segments, inherit=self.inherits, sums=list(SUMS.values()))
        self.blocks = BlockIdentity(plan, self.prompt)
        self.blocks.restart(self.era(0))

    def era(self, first: int, nonce: str = "") -> Era:
        return Era(first, *self.state, nonce)

    def change(self, state: State, computed: int, unsure: int, nonce: str) -> None:
        """Positions from `computed` on run under `state`; `unsure` before it may or may not."""
        self.state = state
        first = max(computed - unsure, 0)
        eras = (
            [self.era(computed)]
            if first == computed
            else [self.era(first, nonce), self.era(computed)]
        )
        self.blocks.change(eras)
        for p in range(first, LENGTH):
            self.ran_under[p] = (state, nonce if p < computed else "")

    def restart(self) -> None:
        """After a preemption all is computed again."""
        self.blocks.restart(self.era(0))
        self.ran_under = [(self.state, "")] * LENGTH

    def at(self, position: int) -> Any:
        """All that the KV of this position depends on; None for nothing."""
        (prefill, decode), nonce = self.ran_under[position]
        added = prefill if position < self.prompt else decode
        if not self.inherits:
            added, nonce = (), ""
        vector_sum, program = self.own[position]
        everything = (row_of(vector_sum, added), program, nonce)
        return everything if any(everything) else None


@st.composite
def histories(draw: st.DrawFn, name: str) -> History:
    prompt = draw(st.integers(1, 20))
    own = [("", "")] * LENGTH
    for start in (0, *draw(st.sets(st.integers(1, LENGTH - 1), max_size=2)), prompt):
        now = (draw(NAMES), draw(st.sampled_from(["", "p"])))
        own = own[:start] + [now] * (LENGTH - start)
    history = History(prompt, own, draw(st.booleans()), draw(STATES))
    computed = 0
    for number in range(draw(st.integers(0, 3))):
        if draw(st.integers(0, 4)) == 0:
            computed = 0
            history.restart()
        computed = draw(st.integers(computed, LENGTH))
        unsure = draw(st.sampled_from([0, 0, 2])) if computed else 0
        history.change(draw(STATES), computed, unsure, f"{name}@{number}")
    return history


@given(histories("one"), histories("two"))
def test_equal_keys_exactly_where_the_history_is_equal(one: History, two: History) -> None:
    for start in range(0, LENGTH, BLOCK):
        span = range(start, start + BLOCK)
        first, second = [one.at(p) for p in span], [two.at(p) for p in span]
        keys, others = (h.blocks.keys(start, start + BLOCK) for h in (one, two))
        assert (keys == others) == (first == second)
        assert (keys == []) == (not any(first))


@given(histories("one"))
def test_a_change_that_changes_nothing_is_told(history: History) -> None:
    keys = [history.blocks.keys(i, i + BLOCK) for i in range(0, LENGTH, BLOCK)]
    before = [history.at(p) for p in range(LENGTH)]
    told = history.blocks.restart(history.era(0))
    history.ran_under = [(history.state, "")] * LENGTH
    after = [history.at(p) for p in range(LENGTH)]
    assert told == (before != after)
    again = [history.blocks.keys(i, i + BLOCK) for i in range(0, LENGTH, BLOCK)]
    if not told:
        assert again == keys
    assert history.blocks.steers == any(a is not None for a in after)


# -- through the scheduler's decisions -----------------------------------------------------------


def state(value: float, tier: str = "base") -> GlobalState:
    before = GlobalState(config_of().tap_shape)
    vector_set = vector_set_of({("pre_attn", 0): array(*[value] * HIDDEN)})
    return before.changed(Change(Globals(tiers={tier: vector_set})))


@pytest.fixture(scope="module", autouse=True)
def none_hash() -> None:
    init_none_hash(sha256_cbor)


def request(name: str, prompt: int = 12, **fields: Any) -> Request:
    """With hashed blocks, as the engine core makes it."""
    return Request(
        name,
        list(range(prompt)),
        SamplingParams(max_tokens=8),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
        plan=plan_of(prompt=prompt, max_tokens=8, **fields),
    )


def scheduler(drafts: int = 0) -> SchedulerInterventions:
    config = config_of()
    if drafts:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts)  # type: ignore[assignment]
    return SchedulerInterventions(config, hash_block_size=BLOCK)


def computed(one: Request, tokens: int) -> Request:
    one.status = RequestStatus.RUNNING
    one.num_computed_tokens = tokens
    return one


def test_a_request_that_was_hashed_before_it_was_known_is_hashed_again() -> None:
    ours, plain = scheduler(), request("plain")
    before = list(plain.block_hashes)
    ours.arrive(plain)
    assert plain.block_hashes == before
    ours.set_state(state(1.0), [])
    late, aside = request("late"), request("aside", steering_inherit_global=False)
    assert late.block_hashes == before
    for one in (late, aside):
        ours.arrive(one)
    assert len(late.block_hashes) == len(before)
    assert not set(late.block_hashes) & set(before)
    assert aside.block_hashes == before


def test_blocks_computed_before_a_change_stay_and_later_ones_do_not() -> None:
    ours, running, waiting = scheduler(), request("running"), request("waiting")
    before = list(running.block_hashes)
    ours.set_state(state(1.0), [computed(running, 4), waiting])
    assert running.block_hashes[0] == before[0]
    assert not set(running.block_hashes[1:]) & set(before)
    assert not set(waiting.block_hashes) & set(before)
    # Partly under the old state, partly under the new: of neither.
    assert not set(running.block_hashes[1:]) & set(waiting.block_hashes)
    step = ours.message({})
    assert step is not None
    assert list(step.admitted) == ["running"]
    ours.set_state(state(1.0).changed(Change(drop=[("tiers", "base")])), [running, waiting])
    assert waiting.block_hashes == before


def test_a_change_in_the_middle_of_a_block_is_a_block_of_its_own() -> None:
    ours, one, two = scheduler(), request("one"), request("two")
    ours.set_state(state(1.0), [computed(one, 5), computed(two, 6)])
    assert one.block_hashes[0] == two.block_hashes[0]
    assert one.block_hashes[1] != two.block_hashes[1]
    assert one.block_hashes[2] != two.block_hashes[2], "the parent is chained in"


def test_preempted_across_a_change_is_computed_under_one_state() -> None:
    ours, one, fresh = scheduler(), request("one"), request("fresh")
    ours.set_state(state(1.0), [computed(one, 6)])
    one.num_computed_tokens = 0
    one.status = RequestStatus.PREEMPTED
    ours.preempt(one)
    ours.arrive(fresh)
    assert one.block_hashes == fresh.block_hashes


def test_positions_of_drafts_in_flight_are_nobody_elses() -> None:
    ours, one, two = scheduler(drafts=2), request("one"), request("two")
    for mine in (one, two):
        computed(mine, 6)
        mine.num_in_flight_tokens = 3
    ours.set_state(state(1.0), [one, two])
    # Positions 3-5 may be computed again: the first block has one of them.
    assert not set(one.block_hashes) & set(two.block_hashes)
    sure, others = scheduler(), [computed(request(name), 6) for name in ("three", "four")]
    for mine in others:
        mine.num_in_flight_tokens = 3
    sure.set_state(state(1.0), others)
    assert others[0].block_hashes == others[1].block_hashes


def test_only_the_phase_that_changed_is_hashed_again() -> None:
    ours, one = scheduler(), request("one", steering_vectors={"pre_attn": {1: VECTOR}})
    before = list(one.block_hashes)
    ours.set_state(state(1.0, "decode"), [one])
    assert one.block_hashes == before
    tiers = {"prefill": ours.state.contents.tiers["decode"]}
    ours.set_state(ours.state.changed(Change(Globals(tiers=tiers))), [one])
    assert not set(one.block_hashes) & set(before)
