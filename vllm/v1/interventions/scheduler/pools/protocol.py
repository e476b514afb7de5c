# SPDX-License-Identifier: Apache-2.0
"""Room that a waiting request needs in every pool before it may start."""

from typing import Protocol

from vllm.v1.interventions.messages import StepInterventions
from vllm.v1.interventions.plan import Plan

MAX_STEP_BYTES = 8 << 20
"""Vectors sent to the workers in one step: a scheduler message over 16 MB leaves the
shared-memory ring and would stall every request of the step. A single larger plan goes alone."""


class Pool(Protocol):
    """Places in a table of the workers. A request reserves all it will ever need when it is
    admitted and keeps it until it ends; requests that need the same share it."""

    size: int
    """Places there are for requests."""

    @property
    def in_use(self) -> int:
        """Places that admitted requests hold."""

    def fits(self, plan: Plan) -> bool:
        """Tell whether all that `plan` needs here is free now, and can be sent in the coming
        step."""

    def reserve(self, request_id: str, plan: Plan) -> None:
        """Take what `fits` promised; nothing where `plan` needs nothing here."""

    def release(self, request_id: str) -> None:
        """Give back what an ended request holds; nothing if it was never admitted."""

    def upload(self, step: StepInterventions) -> None:
        """Put into the coming step's message what the workers do not have yet."""

    def restore(self) -> None:
        """Send everything again with the coming step: the workers have lost it."""
