# SPDX-License-Identifier: Apache-2.0
"""Rows of a step on their way from the worker to frontends and consumers."""

from collections import defaultdict
from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions.scheduler.capture_sessions import CaptureSessions

if TYPE_CHECKING:
    from vllm.v1.interventions.step_rows import StepRows
    from vllm.v1.request import Request


class RowRelay:
    """Hands out the rows of a step, when its tokens have been given to the requests.

    Most requests take all they captured in the step. Those rows are not cut for each of them: they
    go to a frontend as they lie, ahead of the step's outputs. Each buffer of a message costs both
    processes time, whatever its size, and so does each tensor that is cut.
    """

    def __init__(self, captures: CaptureSessions) -> None:
        self._captures = captures
        self._step: StepRows | None = None
        self._whole: defaultdict[int, list[str]] = defaultdict(list)
        """Client -> requests that take all their rows of `_step`."""

    def accept(self, request: "Request", captured: "StepRows | None", emits: bool) -> None:
        """Accept a request's rows of a step, and pass them on.

        Args:
            captured: the rows of all requests; None if nobody captured.
            emits: whether an output of the request leaves in this step.
        """
        ours = request.interventions
        if captured is None or not ours.num_sites:
            return
        name, num_tokens = request.request_id, request.num_tokens
        packed = emits and ours.can_send_packed and not self._captures.has_local_consumers(name)
        if packed:
            position = captured.position(name)
            if position is not None and ours.accept_one(position, num_tokens):
                self._step = captured
                self._whole[request.client_index].append(name)
                return
        chunk = captured.of(name)
        accepted = chunk and ours.accept(chunk, num_tokens)
        if not accepted:
            return
        if packed and accepted is chunk and captured.packs:
            self._step = captured
            self._whole[request.client_index].append(name)
        else:
            ours.keep(accepted, not emits, self._captures.threads)
        self._captures.route_rows(request, accepted)

    def join(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Put the step's rows ahead of the outputs of their requests."""
        if self._step is None:
            return
        for client, names in self._whole.items():
            rows = EngineCoreOutput("", [], captured=self._step.packed(names))
            outputs[client].outputs.insert(0, rows)
        self._step = None
        self._whole.clear()
