# SPDX-License-Identifier: Apache-2.0
"""A worker that replays the messages and computes nothing: what a forward would find."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.interventions.messages import (
    FIRST_SLOT,
    GLOBALS_ALONE,
    ROWS_PER_SLOT,
    PlacedProgram,
    PlacedTerm,
    StepInterventions,
    WorkerRequest,
)
from vllm.v1.interventions.plan import UNSTEERED, SteeringPlan, VectorSum
from vllm.v1.interventions.terms import make_term
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
    terms: dict[int, PlacedTerm] = field(default_factory=dict)
    programs: dict[int, PlacedProgram] = field(default_factory=dict)
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
        placed = step.placed
        for slot, content in placed.get("sums", []):
            assert FIRST_SLOT <= slot < FIRST_SLOT + SLOTS
            self.slots[slot] = content
        assert self.sets >= set(step.dropped_sets)
        self.sets -= set(step.dropped_sets)
        # Also of idle slots: a change of the global tiers makes them anew.
        assert self.sets == {name for c, _ in self.slots.values() for name, _ in c.sets}
        self.terms |= placed.get("terms", [])
        self.programs |= placed.get("programs", [])
        assert (self.terms.keys() | self.programs.keys()) <= set(range(1, ROWS + 1))
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
            placed, asked = self.programs[int(program)], programs[segment.program]
            assert placed.op_sites == plan.op_sites
            assert [self.term_in(row) for row in placed.terms] == asked.terms
            deciders = [i for i, s in enumerate(plan.segments) if self.decides(programs, s.program)]
            assert placed.gate_owner_row == (int(mine.programs[deciders[0]]) if deciders else 0)

    def term_in(self, row: int) -> str:
        """The digest of the term that a row of the table makes, with the probe that it names."""
        if not row:
            return UNSTEERED
        term = self.terms[row]
        probe = self.terms[term.probe_row].vector if term.probe_row else b""
        return make_term(term.scalars, term.vector, probe).digest

    @staticmethod
    def decides(programs: dict[str, Any], digest: str) -> bool:
        return digest != UNSTEERED and programs[digest].decides

    def check_apart(self) -> None:
        """Programs belong to one request each: gates that are decided once are kept by row."""
        owned = [set(r.programs.tolist()) - {0} for r in self.requests.values()]
        assert sum(map(len, owned)) == len(set().union(*owned))
