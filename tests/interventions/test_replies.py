# SPDX-License-Identifier: Apache-2.0
"""Workers that reply to a step: all of them where its rows are split, else one. Upstream's executor
runs here, over queues that answer at once."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.interventions.startup import StageRows
from vllm.v1.outputs import ModelRunnerOutput

pytestmark = pytest.mark.quick

RANKS, REPLIES = 3, 2
"""Workers, and the rank whose tokens count."""


class Rows:
    """Stands for the rows of one rank."""

    def __init__(self, rank: int) -> None:
        self.ranks = [rank]

    def join(self, later: Rows) -> None:
        """As `StepRows`."""
        self.ranks += later.ranks


class Workers:
    """Both ends of the queues: what was sent, and a reply of each rank that is asked for one."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int | None]] = []
        """Method, and the only rank to reply; None for all."""
        self.read: list[int] = []
        """Ranks whose replies were read."""

    def enqueue(self, message: tuple[Any, ...]) -> None:
        """Take a call."""
        self.sent.append((message[0], message[-1]))

    def replies_of(self, rank: int) -> Any:
        """The queue of one rank's replies."""

        def dequeue(timeout: float | None) -> tuple[Any, Any]:
            self.read.append(rank)
            output: Any = None
            if self.sent[-1][0] == "sample_tokens":
                output = ModelRunnerOutput([], {}, captured=Rows(rank))  # type: ignore[arg-type]
            return WorkerProc.ResponseStatus.SUCCESS, output

        return SimpleNamespace(dequeue=dequeue)


def started() -> tuple[Any, Workers]:
    executor, workers = MultiprocExecutor.__new__(MultiprocExecutor), Workers()
    executor.is_failed, executor.output_rank = False, REPLIES
    executor.kv_output_aggregator = executor.ec_output_aggregator = None
    executor.futures_queue = deque()
    rows: Any = workers
    executor.rpc_broadcast_mq = rows
    executor.response_mqs = [workers.replies_of(rank) for rank in range(RANKS)]
    return executor, workers


def ranks_of_step(executor: Any, workers: Workers, split: bool | None) -> list[int]:
    """The ranks whose rows come with a step.

    Args:
        split: whether its rows are split; None for a step without interventions.
    """
    workers.sent.clear()
    workers.read.clear()
    step = None if split is None else SimpleNamespace(split=split)
    assert executor.execute_model(SimpleNamespace(interventions=step)) is None
    output = executor.sample_tokens(None)
    assert [method for method, _ in workers.sent] == ["execute_model", "sample_tokens"]
    asked = [[*range(RANKS)] if only is None else [only] for _, only in workers.sent]
    due = [rank for ranks in asked for rank in ranks]
    assert workers.read == due, "a reply that nobody reads would be the next step's"
    assert output.captured.ranks == asked[-1]
    return asked[-1]


def test_all_workers_reply_to_a_step_that_is_split() -> None:
    """Both of its calls: with an aggregator upstream's executor has all ranks reply, and gives it
    what they said. Between split steps one replies, so that those stay as fast as they are."""
    executor, workers = started()
    for split in (None, False, True, True, False, None, True):
        found = ranks_of_step(executor, workers, split)
        assert found == ([*range(RANKS)] if split else [REPLIES]), (
            "executors have other workers reply than startup.step_aggregator says"
        )
    assert executor.kv_output_aggregator is None, "it is upstream's"


def test_with_stages_all_reply_to_every_step() -> None:
    executor, workers = started()
    executor.kv_output_aggregator = StageRows()
    for split in (None, False, True):
        assert ranks_of_step(executor, workers, split) == [*range(RANKS)]
