# SPDX-License-Identifier: Apache-2.0
"""What a waiting request needs before it may start: room in every pool, and its turn."""

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


class StarvationGuard:
    """Lets later requests pass one that does not fit, but not for ever."""

    def __init__(self) -> None:
        self._skips: dict[str, int] = {}

    def try_admit(self, request_id: str, fits: bool) -> bool:
        """Whether a request that wants room may start. A refusal is remembered."""
        starved = next((r for r, skips in self._skips.items() if skips > MAX_SKIPS), None)
        # Sharers too: a sum that keeps finding new users never frees its slot.
        granted = fits and starved in (None, request_id)
        if not granted:
            self._skips[request_id] = self._skips.get(request_id, 0) + 1
        return granted

    def leave(self, request_id: str) -> None:
        """Forget the skips of a request that started, or ended."""
        self._skips.pop(request_id, None)
