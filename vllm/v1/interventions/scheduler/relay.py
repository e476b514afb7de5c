# SPDX-License-Identifier: Apache-2.0
"""Rows of a step on their way from the worker to frontends and consumers."""

from collections import defaultdict
from typing import TYPE_CHECKING

from vllm.v1.capture.transport.landing import Places, RowEncoder
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.scheduler.consumers import CaptureSessions

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
        self.encoder = RowEncoder()
        """Passes on where rows lie, to frontends that are processes of this host."""
        self._places = Places()
        """Places of the rows of workers that run in processes of their own."""
        self._step: StepRows | None = None
        self._singles: dict[str, int] = {}
        self._whole: defaultdict[int, list[str]] = defaultdict(list)
        """Client -> requests that take all their rows of `_step`."""
        self._cut: defaultdict[int, list[CapturedChunk]] = defaultdict(list)
        """Client -> rows of those that take some."""

    def accept(self, request: "Request", captured: "StepRows | None") -> None:
        """Accept a request's rows of a step, and pass them on.

        Args:
            captured: the rows of all requests; None if nobody captured.
        """
        ours = request.interventions
        if captured is None or not ours.arena_rows:
            return
        if captured is not self._step:
            captured.receive(self._places)
            self._step, self._singles = captured, captured.singles()
            self.encoder.places = captured.places or self.encoder.places
        name, num_tokens = request.request_id, request.num_tokens
        client = request.client_index
        if ours.relays_all:  # what consumers of this process get is not relayed
            position = self._singles.get(name)
            if position is not None and ours.accept_one(position, num_tokens):
                self._whole[client].append(name)
                return
        chunk = captured.of(name)
        accepted = chunk and ours.accept(chunk, num_tokens)
        if not accepted:
            return
        if accepted is chunk and ours.relays_all and captured.packs:
            self._whole[client].append(name)
        elif relayed := ours.relayed(accepted):
            self._cut[client].append(relayed)
        if not ours.relays_all:
            self._captures.route_rows(request, accepted)

    def join(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Put the step's rows ahead of the outputs of their requests."""
        if self._step is None:
            return
        for client in self._whole.keys() | self._cut.keys():
            names = self._whole[client]
            chunks = [*(self._step.packed(names) if names else ()), *self._cut[client]]
            rows = EngineCoreOutput("", [], captured=chunks)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.insert(0, rows)
        self._step = None
        self._whole.clear()
        self._cut.clear()
