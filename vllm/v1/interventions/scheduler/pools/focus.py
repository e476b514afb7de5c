# SPDX-License-Identifier: Apache-2.0
"""Pool of the rows of the workers' tables that hold requests' focus programs. Owned by the
scheduler."""

import numpy as np

from vllm.v1.interventions.messages import PlacedFocus, StepInterventions
from vllm.v1.interventions.plan import UNSTEERED, Plan


class FocusPool:
    """Rows 1..`size` of the tables; row 0 means none. A request keeps its own until it ends: rows
    of one program are of one request, by which a kernel knows whose keys they are."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size, 0, -1))
        self._rows: dict[str, dict[str, int]] = {}
        """Request -> digest of a program -> its row."""
        self._placed: dict[str, PlacedFocus] = {}
        self._new: dict[str, PlacedFocus] = {}

    @property
    def in_use(self) -> int:
        """Rows that admitted requests hold."""
        return self.size - len(self._free)

    def fits(self, plan: Plan) -> bool:
        """Tell whether all programs of `plan` have rows now."""
        return plan.steering is None or len(plan.steering.focus_programs) <= len(self._free)

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the rows that `fits` promised."""
        if plan.steering is None or not plan.steering.focus_programs:
            return
        programs = plan.steering.focus_programs
        rows = self._rows[request_id] = {p.digest: self._free.pop() for p in programs}
        self._placed[request_id] = self._new[request_id] = PlacedFocus(
            rows=np.fromiter(rows.values(), np.int64),
            programs=[program.ops for program in programs],
            ops=plan.steering.focus_ops,
        )

    def row(self, request_id: str, digest: str) -> int:
        """The row of a request's program; 0 for `UNSTEERED`."""
        return self._rows[request_id][digest] if digest != UNSTEERED else 0

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds, whether or not it was ever admitted."""
        self._free += self._rows.pop(request_id, {}).values()
        self._placed.pop(request_id, None)
        self._new.pop(request_id, None)

    def upload(self, step: StepInterventions) -> None:
        """Put new programs into the coming step's message."""
        step.focus, self._new = list(self._new.values()), {}

    def restore(self) -> None:
        """Send all programs again: the workers have lost them."""
        self._new = dict(self._placed)
