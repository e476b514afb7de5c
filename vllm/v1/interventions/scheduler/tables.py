# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the workers' tables: the rows that requests hold, and what is sent of them."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.config.capture import PROJECTION_ROWS
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.focus import FocusOp
from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GLOBALS_ALONE,
    NOTHING,
    PlacedProgram,
    PlacedTerm,
    StepInterventions,
    TableName,
    WorkerRequest,
    table_row,
)
from vllm.v1.interventions.plan import (
    UNSTEERED,
    CapturePlan,
    Plan,
    Program,
    Site,
    Stream,
    VectorSum,
    plain_plan,
)
from vllm.v1.interventions.scheduler.pools import Pool, VectorSets
from vllm.v1.interventions.terms import Term

_Wanted = list[tuple[Pool[Any], Mapping[str, Any]]]


class _Program(NamedTuple):
    """A program of one request."""

    program: Program
    op_sites: list[tuple[Site, list[int]]]
    gate_owner: str
    """The key of the request's program that decides gates; `UNSTEERED` if none does."""
    latch_owner: str
    """The key of a program of the request at which a gate begins to latch, likewise."""


class _Asked(NamedTuple):
    request_id: str
    plan: Plan
    wanted: _Wanted


class Tables:
    """A pool for each table of the workers, and what a plan needs of each.

    Args:
        hidden_size: the model's; 0 in an engine with neither steering nor capture.
    """

    def __init__(self, steering: SteeringConfig, hidden_size: int) -> None:
        slots = steering.max_steering_configs
        rows = steering.max_steering_rows if steering.has_ops else 0
        self.sums = Pool[tuple[VectorSum, bool]](slots, keeps=True, first=FIRST_SLOT)
        self.terms = Pool[Term](rows, num_bytes=lambda term: len(term.vector))
        # Rows of one program are of one request: gates that are decided once are kept by row, and
        # by their row of focus it is known whose keys are meant.
        self.programs = Pool[_Program](rows)
        self.focus = Pool[list[FocusOp]](slots if steering.focuses else 0)
        self.matrices = Pool[bytes](
            PROJECTION_ROWS, lambda matrix: len(matrix) // (4 * hidden_size), len, first=0
        )
        self._pools = self.sums, self.terms, self.programs, self.focus, self.matrices
        self._sets = VectorSets()
        self._sums_alone = lru_cache(256)(_sums_alone)  # many are alike, and share one
        self._has_new = False
        self._asked: _Asked | None = None
        """The last request that was asked about: as a rule it is admitted next."""

    def _wanted(self, request_id: str, plan: Plan) -> _Wanted:
        """Return the contents that a plan needs of each pool, digest -> content."""
        asked = self._asked
        if asked is None or asked.plan is not plan or asked.request_id != request_id:
            asked = _Asked(request_id, plan, list(self._wanted_of(request_id, plan)))
            self._asked = asked
        return asked.wanted

    def _wanted_of(
        self, request_id: str, plan: Plan
    ) -> Iterator[tuple[Pool[Any], Mapping[str, Any]]]:
        steering, capture = plan.steering, plan.capture
        if steering is not None and steering.sums:
            inherit = steering.inherit
            yield self.sums, {_sum_key(s.digest, inherit): (s, inherit) for s in steering.sums}
        if steering is not None and steering.programs:
            yield self.terms, {each.digest: each for t in steering.terms for each in t.contents()}
            decides = next((p.digest for p in steering.programs if p.decides), UNSTEERED)
            begins = next((p.digest for p in steering.programs if p.begins), UNSTEERED)
            owners = _own_key(request_id, decides), _own_key(request_id, begins)
            programs = [_Program(p, steering.op_sites, *owners) for p in steering.programs]
            yield self.programs, {_own_key(request_id, p.program.digest): p for p in programs}
        if steering is not None and steering.focus_programs:
            ops, sets = steering.focus_ops, steering.focus_programs
            focus = {_own_key(request_id, p.digest): [ops[i] for i in p.ops] for p in sets}
            yield self.focus, focus
        if capture is not None and capture.projections:
            yield self.matrices, capture.projections

    def fits(self, request_id: str, plan: Plan) -> bool:
        """Tell whether all that a plan needs has rows now, and can be sent in the coming step."""
        wanted = self._wanted(request_id, plan)
        if all(pool.has(contents) for pool, contents in wanted):
            return True
        if plan.steering is not None and not self._sets.fits(plan.steering.sets):
            return False
        return all(pool.fits(contents) for pool, contents in wanted)

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the rows that `fits` promised."""
        self._has_new = True
        new = [pool.reserve(request_id, own) for pool, own in self._wanted(request_id, plan)]
        self._asked = None
        if any(new) and plan.steering is not None and plan.steering.sums:
            sets = {each.digest: each for each in plan.steering.sets}
            for vector_sum in plan.steering.sums:
                slot = self.sums.row(_sum_key(vector_sum.digest, plan.steering.inherit))
                self._sets.hold(slot, [sets[digest] for digest, _ in vector_sum.sets])

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds, whether or not it was ever admitted."""
        self._asked = None
        for pool in self._pools:
            pool.release(request_id)

    def worker_request(
        self, request_id: str, plan: Plan, num_prompt_tokens: int, tiers: bool
    ) -> WorkerRequest:
        """An admitted request, as its workers are told.

        Args:
            tiers: whether there are global tiers.
        """
        steering, capture = plan.steering or plain_plan(num_prompt_tokens), plan.capture
        segments, inherit = steering.segments, steering.inherit
        alone = GLOBALS_ALONE if inherit and tiers else NOTHING
        firsts, rows = [], []
        for s in segments:
            slot = self.sums.row(_sum_key(s.vector_sum, inherit)) if s.vector_sum else alone
            firsts.append(s.first)
            rows.append(table_row(slot, generated=s.first >= num_prompt_tokens))
        if capture is None and not (steering.programs or steering.focus_programs):
            return self._sums_alone(tuple(firsts), tuple(rows))
        return WorkerRequest(
            firsts=np.array(firsts, dtype=np.int64),
            table_rows=np.array(rows, dtype=np.int32),
            programs=np.array(
                [self.programs.row(_own_key(request_id, s.program)) for s in segments],
                dtype=np.int32,
            ),
            streams=self._streams(capture) if capture else (),
            focus=tuple(self.focus.row(_own_key(request_id, s.focus)) for s in segments)
            if steering.focus_programs
            else (),
            latches=any(program.begins for program in steering.programs),
        )

    def _streams(self, plan: CapturePlan) -> tuple[Stream, ...]:
        """The streams of an admitted request, as its workers are told."""
        row = self.matrices.row
        return tuple(
            msgspec.structs.replace(s, relayed=False, runs=(), making=s.making.placed(row))
            for s in plan.streams
        )

    def put_new(self, step: StepInterventions) -> None:
        """Put into the coming step's message what the workers do not have yet."""
        if not self._has_new:
            return
        self._has_new = False
        step.new_sets, step.dropped_sets = self._sets.pop_changes()
        row, program_row = self.terms.row, self.programs.row
        placed: dict[TableName, list[tuple[int, Any]]] = {
            "sums": self.sums.pop_new(),
            "terms": [
                (
                    at,
                    PlacedTerm(t.vector, t.scalars, row(t.probe_digest), row(t.encoder_digest)),
                )
                for at, t in self.terms.pop_new()
            ],
            "programs": [
                (at, PlacedProgram(sites, list(map(row, p.terms)), *map(program_row, owners)))
                for at, (p, sites, *owners) in self.programs.pop_new()
            ],
            "focus": self.focus.pop_new(),
            "matrices": self.matrices.pop_new(),
        }
        step.placed = {name: new for name, new in placed.items() if new}

    def restore(self) -> None:
        """Send all contents again with the coming step: the workers have lost them."""
        self._has_new = True
        self._sets.restore()
        for pool in self._pools:
            pool.restore()


def _sums_alone(firsts: tuple[int, ...], table_rows: tuple[int, ...]) -> WorkerRequest:
    """A request without operations and captures."""
    return WorkerRequest(
        firsts=np.array(firsts, dtype=np.int64),
        table_rows=np.array(table_rows, dtype=np.int32),
        programs=np.zeros(len(firsts), dtype=np.int32),
    )


def _sum_key(digest: str, inherit: bool) -> str:
    """The digest of a slot's content: the sum's, and whether the global tiers are added."""
    return f"{digest}+" if inherit else digest


def _own_key(request_id: str, digest: str) -> str:
    """The digest of a content that is the request's own."""
    return f"{request_id}:{digest}" if digest != UNSTEERED else UNSTEERED
