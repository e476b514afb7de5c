# SPDX-License-Identifier: Apache-2.0
"""Rows as a worker makes them and as a frontend gets them, without an engine."""

from __future__ import annotations

import torch

from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions import capture_groups
from vllm.v1.interventions.frontend.results.collector import RowCollector
from vllm.v1.interventions.frontend.results.pieces import Run
from vllm.v1.interventions.messages import CapturedChunk, WorkerRequest
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.step_rows import Blocks, StepRows
from vllm.v1.interventions.worker.making.maker import Captured, Material
from vllm.v1.interventions.worker.making.shards import Shards
from vllm.v1.interventions.worker.rows.outbox import Outbox
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable


def step_rows(
    version: int,
    blocks: Blocks,
    arena: torch.Tensor,
    positions: torch.Tensor,
    table: ProjectionTable | None = None,
    landing: Landing | None = None,
) -> StepRows:
    """The rows of a step that its forward left in `arena`; in ordinary memory without a landing."""
    hidden = arena.shape[1]
    table = table or ProjectionTable(hidden, torch.device("cpu"))
    rows = StepRows(version, blocks, hidden, arena.dtype)
    Outbox(landing or Landing(0), Material(arena, table, {}, Shards())).send(
        rows, Captured(positions, positions)
    )
    return rows


def taps_of(request: WorkerRequest) -> set[Site]:
    """The sites that are copied for a request."""
    return {
        tap
        for s in request.streams
        for tap in (*capture_groups.taps_of(s), *capture_groups.minus_of(s))
    }


def give(collector: RowCollector, *chunks: CapturedChunk) -> None:
    """Rows of steps, each of which has no rows of others."""
    for chunk in chunks:
        run = Run(chunk.owners)
        [(name, _)] = chunk.owners
        collector.add(run, name)
        run.chunks.append(chunk)
