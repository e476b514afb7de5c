# SPDX-License-Identifier: Apache-2.0
"""What a waiting request needs before it may start: room in every pool, and its turn."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm.v1.interventions.messages import StepInterventions
from vllm.v1.interventions.plan import Plan

MAX_STEP_BYTES = 8 << 20
"""Vectors sent to the workers in one step: a scheduler message over 16 MB leaves the
shared-memory ring and would stall every request of the step. A single larger plan goes alone."""

MAX_SKIPS = 256
"""Steps a request may be passed over by later ones before what gets free is kept for it."""


class Pool(Protocol):
    """Places in a table of the workers. A request reserves all it will ever need when it is
    admitted and keeps it until it ends; requests that need the same share it."""

    size: int
    """Places there are for requests."""

    @property
    def in_use(self) -> int:
        """Places that admitted requests hold."""

    def fits(self, plan: Plan) -> bool:
        """Whether all that `plan` needs here is free now, and can be sent in the coming step."""

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take what `fits` promised; nothing where `plan` needs nothing here."""

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds; nothing if it was never admitted."""

    def upload(self, step: StepInterventions) -> None:
        """Put into the coming step's message what the workers do not have yet."""

    def restore(self) -> None:
        """Send everything again with the coming step: the workers have lost it."""


@dataclass
class _Waiting:
    """A request that was refused."""

    number: int
    """Counts the requests by their first refusal."""
    skips: int = 0
    """How often it was refused."""


class StarvationGuard:
    """Lets later requests pass one that does not fit, but not for ever."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._starved: list[tuple[int, str]] = []
        """Those that were passed over too often, as (number, request id), sorted."""
        self._count = 0

    def try_admit(self, request_id: str, fits: Callable[[], bool]) -> bool:
        """Whether a request that wants room may start. A refusal is remembered.

        Args:
            fits: whether there is room; asked only where the request may have it.
        """
        # Sharers too: a sum that keeps finding new users never frees its slot.
        if (not self._starved or self._starved[0][1] == request_id) and fits():
            return True
        waiting = self._waiting.get(request_id)
        if waiting is None:
            waiting = self._waiting[request_id] = _Waiting(self._count)
            self._count += 1
        waiting.skips += 1
        if waiting.skips == MAX_SKIPS + 1:
            insort(self._starved, (waiting.number, request_id))
        return False

    def leave(self, request_id: str) -> None:
        """Forget the skips of a request that started, or ended."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.skips > MAX_SKIPS:
            self._starved.remove((waiting.number, request_id))
