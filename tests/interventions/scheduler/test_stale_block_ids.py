# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks are cleared before a step: those a steered request wrote, for whoever gets them.

`tests/serving/test_stale_blocks.py` has the engines.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.interventions.scheduler.test_decisions import request, scheduler
from tests.support.plans import SHAPE, VECTOR
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.scheduler.decisions import SchedulerInterventions
from vllm.v1.interventions.scheduler.stale_blocks import StaleBlocks
from vllm.v1.interventions.vectors import vector_set_of
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.quick

MULTIPLIES = msgspec.structs.replace(SHAPE, reads_masked=True)
STEERS: dict[str, Any] = {"steering_vectors": {"pre_attn": {0: VECTOR}}}


def step(
    stale: StaleBlocks,
    new: dict[str, list[int]],
    cached: dict[str, list[int]] | None = None,
    unfilled: list[int] | None = None,
) -> list[int] | None:
    """What is cleared for a step whose requests have these blocks; `unfilled` are to be written."""
    cached = cached or {}
    if unfilled is None:
        unfilled = [i for blocks in (*new.values(), *cached.values()) for i in blocks]
    requests = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new.items()]
    others = SimpleNamespace(
        req_ids=[*cached, "none new"], new_block_ids=[*[(b,) for b in cached.values()], None]
    )
    return stale.pop(unfilled or None, requests, others)  # type: ignore[arg-type]


def admitted(ours: SchedulerInterventions, name: str, **fields: Any) -> Any:
    asks = request(name, **fields)
    ours.admit(asks)
    asks.status = RequestStatus.RUNNING
    return asks


def test_only_blocks_that_steered_requests_wrote_are_cleared() -> None:
    ours = scheduler(shape=MULTIPLIES)
    stale = ours.stale_blocks
    steered = admitted(ours, "steered", **STEERS)
    admitted(ours, "plain")
    assert step(stale, {"steered": [1, 2], "plain": [3]}) is None
    assert step(stale, {}, {"steered": [4], "plain": [5]}) is None
    ours.finish(steered)
    assert step(stale, {"plain again": [2, 3, 4, 5]}) == [2, 4]
    assert step(stale, {"another": [1, 2, 4]}) == [1], "the others are clean now"


def test_blocks_found_in_the_cache_are_not_cleared() -> None:
    ours = scheduler(shape=MULTIPLIES)
    ours.finish(steered := admitted(ours, "steered", **STEERS))
    assert step(ours.stale_blocks, {"steered": [1, 2]}) is None, "it writes nothing any more"
    ours.admit(steered)
    assert step(ours.stale_blocks, {"steered": [1, 2]}) is None
    assert step(ours.stale_blocks, {"alike": [1, 2, 3]}, unfilled=[3]) is None
    assert step(ours.stale_blocks, {"other": [1]}) == [1]


def test_steered_requests_get_clean_blocks_too() -> None:
    ours = scheduler(shape=MULTIPLIES)
    admitted(ours, "one", **STEERS)
    admitted(ours, "two", **STEERS)
    step(ours.stale_blocks, {"one": [7]})
    assert step(ours.stale_blocks, {"two": [7]}) == [7]
    assert step(ours.stale_blocks, {"plain": [7]}) == [7], "the second wrote to it again"


def test_global_vectors_make_all_blocks_stale() -> None:
    ours = scheduler(shape=MULTIPLIES)
    ours.stale_blocks = StaleBlocks(6, clears=True)
    running = admitted(ours, "running")
    step(ours.stale_blocks, {"running": [1]})
    row = np.array(VECTOR, dtype=np.float32)
    running.num_computed_tokens = 4
    base = {"base": vector_set_of({("pre_attn", 0): row})}
    ours.set_state(ours.state.changed(Change(Globals(tiers=base))), [running])
    ours.set_state(ours.state.changed(Change(drop=[("tiers", "base")])), [running])
    assert step(ours.stale_blocks, {}, {"running": [2]}) == [2], "it attends to what it wrote"
    assert step(ours.stale_blocks, {"plain": [1, 2, 3]}) == [1, 2, 3]
    assert step(ours.stale_blocks, {"plain": [1, 2, 3]}) is None


@pytest.mark.parametrize("connects", [False, True])
def test_a_request_that_never_ran_may_have_had_blocks_loaded(connects: bool) -> None:
    ours = scheduler(shape=MULTIPLIES)
    ours.stale_blocks = StaleBlocks(6, clears=True)
    ours._loads_blocks = connects
    ours.finish(request("plain"))
    assert step(ours.stale_blocks, {"a": [1]}) is None
    ours.finish(request("steered", **STEERS))
    assert step(ours.stale_blocks, {"b": [1]}) == ([1] if connects else None)


def test_nothing_is_cleared_where_attention_multiplies_nothing_masked() -> None:
    ours = scheduler()
    admitted(ours, "steered", **STEERS)
    step(ours.stale_blocks, {"steered": [1]})
    ours.stale_blocks.suspect_all()
    assert step(ours.stale_blocks, {"plain": [1]}) is None
