# SPDX-License-Identifier: Apache-2.0
"""A worker that replays the messages and computes nothing: what a forward would find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GLOBALS_ALONE,
    ROWS_PER_SLOT,
    StepInterventions,
    WorkerRequest,
)
from vllm.v1.interventions.plan import UNSTEERED, SteeringPlan, VectorSum
from vllm.v1.request import Request

SLOTS, ROWS, PROMPT = 5, 9, 6
"""Of the engine, and of each prompt."""


def steering_of(request: Request) -> SteeringPlan | None:
    return request.interventions.plan.steering


@dataclass
class Worker:
    """It only writes what it is told."""

    sets: set[str] = field(default_factory=set)
    slots: dict[int, tuple[VectorSum, bool]] = field(default_factory=dict)
    globals: tuple[str, ...] = ()
    terms: dict[int, str] = field(default_factory=dict)
    probes: dict[int, str] = field(default_factory=dict)
    """Row -> the term whose probe it holds."""
    programs: dict[int, Any] = field(default_factory=dict)
    requests: dict[str, WorkerRequest] = field(default_factory=dict)

    def apply(self, finished: set[str], step: StepInterventions | None) -> None:
        for name in finished:
            self.requests.pop(name, None)
        if step is None:
            return
        assert not self.sets & {p.digest for p in step.new_sets}, "sent twice"
        self.sets |= {p.digest for p in step.new_sets}
        if step.tiers is not None:
            self.globals = tuple(sorted(p.digest for p in step.tiers.tiers.values()))
        for slot, vector_sum, inherit in step.sums:
            assert FIRST_SLOT <= slot < FIRST_SLOT + SLOTS
            self.slots[slot] = vector_sum, inherit
        assert self.sets >= set(step.dropped_sets)
        self.sets -= set(step.dropped_sets)
        # Also of idle slots: a change of the global tiers makes them anew.
        assert self.sets == {name for c, _ in self.slots.values() for name, _ in c.sets}
        for placed in step.terms:
            assert 1 <= placed.row <= ROWS
            assert bool(placed.probe_row) == bool(placed.term.probe)
            self.terms[placed.row] = placed.term.digest
            self.probes.pop(placed.row, None)
            if placed.probe_row:
                assert 1 <= placed.probe_row <= ROWS
                self.probes[placed.probe_row] = placed.term.digest
                self.terms.pop(placed.probe_row, None)
        for mine in step.programs:
            for row, terms in zip(mine.rows.tolist(), mine.terms.tolist(), strict=True):
                assert 1 <= row <= ROWS
                self.programs[row] = (mine, terms)
        self.requests |= step.admitted

    def check(self, request: Request) -> None:
        """The forward finds what `request` asked for."""
        mine, plan = self.requests.get(request.request_id), steering_of(request)
        inherits = plan is None or plan.inherit
        if mine is None:
            assert plan is None and not self.globals
            return
        if plan is None:
            rows = [ROWS_PER_SLOT * GLOBALS_ALONE, ROWS_PER_SLOT * GLOBALS_ALONE + 1]
            assert mine.firsts.tolist() == [0, PROMPT]
            # Preempted before the tiers were cleared, it has rows that hold nothing.
            assert mine.table_rows.tolist() in ([rows] if self.globals else [[0, 0], rows])
            assert not mine.programs.any()
            return
        sums = {c.digest: c for c in plan.sums}
        programs = {p.digest: p for p in plan.programs}
        assert mine.firsts.tolist() == [s.first for s in plan.segments]
        told = zip(plan.segments, mine.table_rows, mine.programs, strict=True)
        for segment, row, program in told:
            slot, generated = divmod(int(row), ROWS_PER_SLOT)
            if segment.vector_sum != UNSTEERED:
                assert self.slots[slot] == (sums[segment.vector_sum], inherits)
            else:
                assert slot == (GLOBALS_ALONE if inherits and self.globals else 0)
            assert bool(generated) == (segment.first >= PROMPT and slot > 0)
            if segment.program == UNSTEERED:
                assert program == 0
                continue
            (placed, rows), asked = self.programs[int(program)], programs[segment.program]
            assert placed.op_sites == plan.op_sites
            assert [self.terms.get(row, UNSTEERED) if row else UNSTEERED for row in rows] == (
                asked.terms
            )
            deciders = [i for i, s in enumerate(plan.segments) if self.decides(programs, s.program)]
            assert placed.gate_owner_row == (int(mine.programs[deciders[0]]) if deciders else 0)

    @staticmethod
    def decides(programs: dict[str, Any], digest: str) -> bool:
        return digest != UNSTEERED and programs[digest].decides

    def check_apart(self) -> None:
        """Programs belong to one request each: gates that are decided once are kept by row."""
        owned = [set(r.programs.tolist()) - {0} for r in self.requests.values()]
        assert sum(map(len, owned)) == len(set().union(*owned))
