# SPDX-License-Identifier: Apache-2.0
"""Rows of a step on their way from the worker to frontends and consumers."""

from collections import defaultdict
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.capture.transport.landing import Places, RowEncoder
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.scheduler.consumers import CaptureSessions
from vllm.v1.interventions.scheduler.kept_rows import KeptRows

if TYPE_CHECKING:
    from vllm.v1.interventions.step_rows import StepRows
    from vllm.v1.request import Request


class RowRelay:
    """Hands out the rows of a step, when its tokens have been given to the requests.

    Most requests take all they captured in the step. Those rows are not cut for each of them: they
    go to a frontend as they lie, ahead of the step's outputs. Each buffer of a message costs both
    processes time, whatever its size, and so does each tensor that is cut.

    Args:
        kept: rows of cached blocks; None if none are kept.
    """

    def __init__(self, captures: CaptureSessions, kept: KeptRows | None) -> None:
        self._captures, self._kept = captures, kept
        self.encoder = RowEncoder(None if kept is None else kept.memory)
        """Passes on where rows lie, to frontends that are processes of this host."""
        self._places = Places()
        """Places of the rows of workers that run in processes of their own."""
        self._step: StepRows | None = None
        self._whole: defaultdict[int, list[str]] = defaultdict(list)
        """Client -> requests that take all their rows of `_step`."""
        self._cut: defaultdict[int, list[CapturedChunk]] = defaultdict(list)
        """Client -> rows of those that take some."""
        self._found: defaultdict[int, list[CapturedChunk]] = defaultdict(list)
        """Client -> rows of requests that started, which were kept."""

    def accept(self, request: "Request", captured: "StepRows | None", stale: bool = False) -> None:
        """Accept a request's rows of a step, and pass them on.

        Args:
            captured: the rows of all requests; None if nobody captured.
            stale: the request was taken out after the step began. Its blocks may have other hashes
                since, so these rows are not kept.
        """
        ours = request.interventions
        if captured is None:
            return
        self._begin(captured)
        chunk = captured.of(request.request_id)
        accepted = chunk and ours.accept(chunk, request.num_tokens)
        if not accepted:
            return
        if self._kept is not None and not stale:
            self._kept.keep(request, accepted)
        if accepted is chunk and ours.relays_all and captured.packs:
            self._whole[request.client_index].append(request.request_id)
        elif relayed := ours.relayed(accepted):
            self._cut[request.client_index].append(relayed)
        if not ours.relays_all:  # what consumers of this process get is not relayed
            self._captures.route_rows(request, accepted)

    def _begin(self, captured: "StepRows") -> None:
        if captured is not self._step:
            captured.receive(self._places)
            self._step = captured
            self.encoder.steps = captured.places or self.encoder.steps

    def _accept_decoded(self, came: "Mapping[str, Request]", captured: "StepRows") -> set[str]:
        """Accept the only row of each request whose last token came from it, without a call for
        each; return these requests."""
        names, positions = captured.singles()
        requests = [*came.values()]
        if names != [*came]:
            at = [i for i, name in enumerate(names) if name in came]
            names, positions = [names[i] for i in at], [positions[i] for i in at]
            requests = [came[name] for name in names]
        lengths = map(len, map(attrgetter("_all_token_ids"), requests))
        others = set[str]()
        for request, position, length in zip(requests, positions, lengths, strict=True):
            ours = request.interventions
            start, stop = ours.last_run
            if ours.next_row <= position == length - 2 and start <= position < stop:
                ours.next_row = length - 1
            else:
                others |= {request.request_id}
        if others:
            requests = [request for request in requests if request.request_id not in others]
        for client in {*map(attrgetter("client_index"), requests)}:
            self._whole[client] += [r.request_id for r in requests if r.client_index == client]
        return {*names} - others

    def deliver_kept(self, request: "Request", num_cached: int, version: int) -> None:
        """Pass on the rows of a request's cached positions.

        Args:
            num_cached: number of these positions.
            version: of the global steering.
        """
        ours = request.interventions
        if ours.kept is None:
            return
        for chunk in ours.kept.take(request, num_cached, version):
            accepted = ours.accept(chunk, request.num_tokens)
            assert accepted is chunk
            if relayed := ours.relayed(chunk):
                self._found[request.client_index].append(relayed)
            if not ours.relays_all:
                self._captures.route_rows(request, chunk)

    def join(
        self,
        outputs: dict[int, EngineCoreOutputs],
        came: "Mapping[str, Request]",
        captured: "StepRows | None",
    ) -> None:
        """Put the step's rows ahead of the outputs of their requests, and before them those that
        were kept, which are of earlier positions.

        Args:
            came: the requests that got an output of the step and have yet to `accept` its rows;
                all of them `comes_at_end`.
            captured: as for `accept`.
        """
        if came and captured is not None:
            self._begin(captured)
            accepted = self._accept_decoded(came, captured)
            if len(accepted) < len(came):
                for name in captured.names & came.keys() - accepted:
                    self.accept(came[name], captured)
        if self._step is None and not self._found:
            return
        for client in self._found.keys() | self._whole.keys() | self._cut.keys():
            names = self._whole[client]
            packed = self._step.packed(names) if self._step is not None and names else []
            chunks = [*self._found[client], *packed, *self._cut[client]]
            rows = EngineCoreOutput("", [], captured=chunks)
            outputs.setdefault(client, EngineCoreOutputs()).outputs.insert(0, rows)
        self._step = None
        self._found.clear()
        self._whole.clear()
        self._cut.clear()
