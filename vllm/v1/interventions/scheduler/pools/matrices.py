# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of `project`: where each matrix in use lies in the workers' table."""

from itertools import pairwise

from vllm.config.points import POINTS
from vllm.v1.interventions.messages import StepInterventions, WorkerStream
from vllm.v1.interventions.plan import CapturePlan, Plan
from vllm.v1.interventions.scheduler.pools.protocol import MAX_STEP_BYTES


class ProjectionPool:
    """Places in the table of projections, of `size` rows. A matrix lies in consecutive ones.

    A request reserves its matrices at admission and keeps them until it ends. Requests with equal
    matrices share them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._placed: dict[str, tuple[int, int]] = {}
        self._data: dict[str, bytes] = {}
        self._users: dict[str, set[str]] = {}
        self._digests: dict[str, list[str]] = {}
        self._uploads: list[str] = []

    @property
    def in_use(self) -> int:
        """Rows that hold matrices in use."""
        return sum(rows for _, rows in self._placed.values())

    def fits(self, plan: Plan) -> bool:
        """Tell whether all matrices of `plan` have rows now, and can be sent in this step."""
        capture = plan.capture
        if capture is None or not (new := self._new(capture)):
            return True
        size = sum(len(capture.projections[digest]) for digest in new)
        waiting = sum(len(self._data[digest]) for digest in self._uploads)
        if waiting and waiting + size > MAX_STEP_BYTES:
            return False
        return self._places(capture, new) is not None

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take the rows that `fits` promised."""
        if plan.capture is not None:
            self._reserve(request_id, plan.capture)

    def _reserve(self, request_id: str, plan: CapturePlan) -> None:
        new = self._new(plan)
        places = self._places(plan, new)
        assert places is not None
        self._placed |= places
        self._data |= {digest: plan.projections[digest] for digest in new}
        self._uploads += new
        self._digests[request_id] = list(plan.projections)
        for digest in plan.projections:
            self._users.setdefault(digest, set()).add(request_id)

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds, whether or not it was ever admitted."""
        for digest in self._digests.pop(request_id, ()):
            self._users[digest].discard(request_id)
            if not self._users[digest]:
                del self._users[digest], self._placed[digest], self._data[digest]
                if digest in self._uploads:
                    self._uploads.remove(digest)

    def streams(self, plan: CapturePlan) -> tuple[WorkerStream, ...]:
        """The streams of an admitted request, as its workers are told."""
        at = {site: i for i, site in enumerate(plan.sites)}
        streams = []
        for stream in plan.streams:
            firsts = [self._placed[digest][0] for digest in stream.projections]
            if len(firsts) == 1:
                firsts *= len(stream.sites)
            size = stream.width // len([*stream.heads, (0,)][0])
            projection = (tuple(firsts), size) if firsts else None
            sites = tuple(at[POINTS[point].copied[0], n] for point, n in stream.sites)
            minus = tuple(at[POINTS[p].copied[1], n] for p, n in stream.sites if stream.differs)
            heads, summed = tuple(stream.heads), tuple(stream.runs * stream.summed)
            width = stream.width if heads or minus or stream.reads is not None else 0
            streams.append(
                WorkerStream(sites, projection, heads, width, summed, stream.reads, minus)
            )
        return tuple(streams)

    def upload(self, step: StepInterventions) -> None:
        """Put new matrices into the coming step's message."""
        new, self._uploads = self._uploads, []
        step.projections = [(self._placed[digest][0], self._data[digest]) for digest in new]

    def restore(self) -> None:
        """Send all matrices again: the workers have lost them."""
        self._uploads = list(self._placed)

    def _new(self, plan: CapturePlan) -> list[str]:
        return [digest for digest in plan.projections if digest not in self._placed]

    def _places(self, plan: CapturePlan, new: list[str]) -> dict[str, tuple[int, int]] | None:
        """Digest -> (first row, rows) for each of `new`, or None while there is no room."""
        places: dict[str, tuple[int, int]] = {}
        for digest in new:
            rows = len(plan.projections[digest]) // (4 * plan.hidden_size)
            taken = sorted([*self._placed.values(), *places.values()])
            ends = [(0, 0), *taken, (self.size, 0)]
            gap = next((a + n for (a, n), (b, _) in pairwise(ends) if b - a - n >= rows), None)
            if gap is None:
                return None
            places[digest] = (gap, rows)
        return places
