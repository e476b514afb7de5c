# SPDX-License-Identifier: Apache-2.0
"""Where matrices lie in a worker's table: what the scheduler sends of them, and when."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.plans import HIDDEN, SHAPE
from tests.support.projections import matrix, parse
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.makings import Scores
from vllm.v1.interventions.messages import StepInterventions
from vllm.v1.interventions.plan import CapturePlan, Plan
from vllm.v1.interventions.scheduler import tables
from vllm.v1.interventions.scheduler.pools import MAX_STEP_BYTES
from vllm.v1.interventions.scheduler.tables import Tables
from vllm.v1.interventions.shape import TapShape

pytestmark = pytest.mark.quick


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tables]:
    """Makes tables with so many rows for matrices."""

    def made(size: int, hidden: int = HIDDEN) -> Tables:
        monkeypatch.setattr(tables, "PROJECTION_ROWS", size)
        return Tables(SteeringConfig(), hidden)

    return made


def matrices_sent(pool: Tables) -> list[tuple[int, bytes]]:
    """(first row, data) of what the coming step's message has."""
    step = StepInterventions(version=0)
    pool.put_new(step)
    return step.placed.get("matrices", [])


def test_matrices_come_and_go(room: Callable[..., Tables]) -> None:
    """A worker that replays the messages has every matrix of every admitted request."""
    chance = random.Random(5)
    pool, held = room(9), dict[str, CapturePlan]()
    table = torch.zeros(9, HIDDEN)
    matrices = [matrix(1 + i % 4, seed=i) for i in range(7)]
    refused = shared = restored = layered = 0
    for step in range(2000):
        if chance.random() < 0.02:
            table.zero_()
            pool.restore()
            restored += 1
        if held and chance.random() < 0.5:
            name = chance.choice(sorted(held))
            del held[name]
            pool.release(name)
        one, two = chance.sample(matrices, 2)
        plan = parse(inline={"project": one}, one={"project": two})
        if len(one) == len(two):
            by_layer = {"post_block": {0: one, "1-2": two}}
            plan = parse(inline={"project": by_layer, "hooks": {"post_block": [0, 1, 2]}})
            layered += 1
        new = [
            d
            for d in plan.projections
            if d not in {d for p in held.values() for d in p.projections}
        ]
        if pool.fits("", Plan(capture=plan)):
            shared += len(new) < 2
            held[f"r{step}"] = plan
            pool.reserve(f"r{step}", Plan(capture=plan))
        else:
            refused += 1
            assert held and new
        for first, data in matrices_sent(pool):
            rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, HIDDEN)
            table[first : first + len(rows)] = rows
        distinct = {d: data for p in held.values() for d, data in p.projections.items()}
        assert pool.matrices.in_use == sum(len(data) // (4 * HIDDEN) for data in distinct.values())
        for name, held_plan in held.items():
            told = pool.worker_request(name, Plan(capture=held_plan), 9, tiers=False)
            for stream, worker in zip(held_plan.streams, told.streams, strict=True):
                assert isinstance(worker.making, Scores) and isinstance(stream.making, Scores)
                firsts, size = worker.making.places, worker.making.size
                for first, digest in zip(firsts, stream.making.digests, strict=True):
                    want = held_plan.projections[digest]
                    assert table[first : first + size].numpy().tobytes() == want
    assert refused > 100 and shared > 100 and restored > 10 and layered > 100
    pool.release("nobody")


def test_a_step_sends_no_more_than_fits_a_message(room: Callable[..., Tables]) -> None:
    hidden = MAX_STEP_BYTES // 4 // 3
    shape = TapShape(hidden_size=hidden, dtype="float32", layers=SHAPE.layers)
    pool = room(16, hidden)
    plans = [
        parse(shape, inline={"project": np.full((k, hidden), k, np.float32)}) for k in (1, 2, 4)
    ]
    pool.reserve("one", Plan(capture=plans[0]))
    assert pool.fits("", Plan(capture=plans[1]))
    pool.reserve("two", Plan(capture=plans[1]))
    assert not pool.fits("", Plan(capture=plans[2]))
    assert len(matrices_sent(pool)) == 2
    assert pool.fits("", Plan(capture=plans[2])), "a single larger one goes alone"


def test_what_ends_before_it_is_sent_is_not(room: Callable[..., Tables]) -> None:
    pool, plan = room(4), parse(inline={"project": matrix(4)})
    pool.reserve("one", Plan(capture=plan))
    pool.reserve("two", Plan(capture=plan))
    pool.release("one")
    assert not pool.fits("", Plan(capture=parse(inline={"project": matrix(1)})))
    pool.release("two")
    assert matrices_sent(pool) == []
    assert pool.fits("", Plan(capture=parse(inline={"project": matrix(1)})))
