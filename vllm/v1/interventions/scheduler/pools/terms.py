# SPDX-License-Identifier: Apache-2.0
"""Record of the rows of the workers' tables that hold the terms and programs of requests with ops.
Owned by the scheduler."""

from collections import Counter

import numpy as np

from vllm.v1.interventions.messages import PlacedPrograms, PlacedTerm, StepInterventions
from vllm.v1.interventions.plan import UNSTEERED, Plan, SteeringPlan
from vllm.v1.interventions.scheduler.pools.protocol import MAX_STEP_BYTES
from vllm.v1.interventions.terms import rows_needed


class TermPool:
    """Places in the tables of vectors and of programs: rows 1..`size` of each; row 0 means none.

    A request reserves all its rows at admission and keeps them until it ends. Requests share terms
    of equal digest. Programs are each request's own: gates that are decided once are kept by row.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free_rows = list(range(size, 0, -1))
        self._free_programs = list(range(size, 0, -1))
        self._uses: Counter[str] = Counter()
        self._placed: dict[str, PlacedTerm] = {}
        self._programs: dict[str, PlacedPrograms] = {}
        self._program_rows: dict[str, dict[str, int]] = {}
        """Request -> digest of a program -> its row."""
        self._terms: dict[str, list[str]] = {}
        self._new_terms: dict[str, PlacedTerm] = {}
        self._new_programs: dict[str, PlacedPrograms] = {}

    @property
    def in_use(self) -> int:
        """Rows of vectors that admitted requests hold."""
        return self.size - len(self._free_rows)

    def fits(self, plan: Plan) -> bool:
        """Tell whether all terms and programs of `plan` have rows now, and fit in this step."""
        if plan.steering is None:
            return True
        return self._fits(plan.steering)

    def _fits(self, plan: SteeringPlan) -> bool:
        new = [term for term in plan.terms if term.digest not in self._placed]
        if rows_needed(new) > len(self._free_rows) or len(plan.programs) > len(self._free_programs):
            return False
        size = sum(len(t.vector) + len(t.probe) for t in new)
        waiting = sum(len(p.term.vector) + len(p.term.probe) for p in self._new_terms.values())
        return not (size and waiting and waiting + size > MAX_STEP_BYTES)

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the rows that `fits` promised."""
        if plan.steering is not None and plan.steering.programs:
            self._reserve(request_id, plan.steering)

    def _reserve(self, request_id: str, plan: SteeringPlan) -> None:
        self._terms[request_id] = [term.digest for term in plan.terms]
        for term in plan.terms:
            self._uses[term.digest] += 1
            if term.digest not in self._placed:
                row = self._free_rows.pop()
                probe_row = self._free_rows.pop() if term.probe else 0
                placed = PlacedTerm(row=row, probe_row=probe_row, term=term)
                self._placed[term.digest] = self._new_terms[term.digest] = placed
        rows = {program.digest: self._free_programs.pop() for program in plan.programs}
        self._program_rows[request_id] = rows
        terms = [[self._row(digest) for digest in program.terms] for program in plan.programs]
        self._programs[request_id] = self._new_programs[request_id] = PlacedPrograms(
            rows=np.fromiter(rows.values(), np.int64),
            gate_owner_row=next((rows[p.digest] for p in plan.programs if p.decides), 0),
            op_sites=plan.op_sites,
            terms=np.array(terms, dtype=np.int32),
        )

    def _row(self, digest: str) -> int:
        return self._placed[digest].row if digest != UNSTEERED else 0

    def program(self, request_id: str, digest: str) -> int:
        """The row of a request's program; 0 for `UNSTEERED`."""
        return self._program_rows[request_id][digest] if digest != UNSTEERED else 0

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds, whether or not it was ever admitted."""
        for digest in self._terms.pop(request_id, ()):
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
                self._new_terms.pop(digest, None)
                placed = self._placed.pop(digest)
                self._free_rows += [row for row in (placed.row, placed.probe_row) if row]
        self._free_programs += self._program_rows.pop(request_id, {}).values()
        self._programs.pop(request_id, None)
        self._new_programs.pop(request_id, None)

    def upload(self, step: StepInterventions) -> None:
        """Put new terms and programs into the coming step's message."""
        step.terms, self._new_terms = list(self._new_terms.values()), {}
        step.programs, self._new_programs = list(self._new_programs.values()), {}

    def restore(self) -> None:
        """Send all terms and programs again: the workers have lost them."""
        self._new_terms = dict(self._placed)
        self._new_programs = dict(self._programs)
