# SPDX-License-Identifier: Apache-2.0
"""Engine-core side of capture consumers: what is reserved for them, and the rows of those that run
in this process."""

import queue
import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from vllm.v1.capture.consumer import ConsumerResult
from vllm.v1.capture.registry import INLINE
from vllm.v1.capture.transport.feed import prompt_tokens, request_info, reserved_bytes
from vllm.v1.capture.transport.hosted import Feeds, HostedConsumers
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions.calls import CaptureCall
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.scheduler.turns import Turns
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Capture:
    """One request that captures for consumers."""

    def __init__(self, request: Request, names: Iterable[str], hosted: HostedConsumers) -> None:
        plan, sampling = request.interventions.plan.capture, request.sampling_params
        assert plan is not None and sampling is not None
        prompt = prompt_tokens(
            request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids
        )
        self.client_index = request.client_index
        hold = bool(sampling.stop) or plan.cuts
        self.feeds = Feeds(hosted, request.request_id, plan, prompt, hold)
        self.admitted = False
        infos = {name: request_info(request.request_id, plan, name, prompt) for name in names}
        self.needs = {name: reserved_bytes(info, plan, name, hold) for name, info in infos.items()}
        """Consumer -> the most bytes of rows that may wait for it."""
        self.reserved_bytes = dict.fromkeys(names, 0)
        """Consumer whose result is not in -> bytes reserved."""


class CaptureSessions:
    """The consumers of this engine and the requests that capture for them."""

    def __init__(self, config: "VllmConfig") -> None:
        self.results: queue.Queue[tuple[int, EngineCoreOutputs] | bytes] = queue.Queue()
        """Messages for the frontends: (client, results). A process of its own puts its output queue
        in the place of this one, so that an idle engine delivers too."""
        self._drop = config.capture_config.capture_overload_policy == "drop"
        self._lock = threading.Lock()
        consumers = config.capture_config.consumers.items()
        self._free = {n: spec.limits.pending_bytes for n, spec in consumers if n != INLINE}
        by_priority = config.scheduler_config.policy == "priority"
        self.turns = {
            name: Turns(partial(self._has_room, name), partial(self._need, name), by_priority)
            for name in self._free
        }
        """Consumer -> the turns of those that wait for room for their rows."""
        self._captures: dict[str, _Capture] = {}
        self.hosted = HostedConsumers("capture")
        self.hosted.start(config, self._report, in_frontend=False)

    # -- a request's life -------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Note a new request, if it captures for consumers."""
        plan = request.interventions.plan.capture
        names = [n for n in plan.consumers if n in self._free] if plan is not None else []
        if names:
            self._captures[request.request_id] = _Capture(request, names, self.hosted)

    def can_admit(self, request: Request) -> bool:
        """Tell whether consumers have room now for all rows that a waiting request can come to.

        Who has waited long for a consumer goes before later ones; requests that do not need it
        are not held up.
        """
        capture = self._captures.get(request.request_id)
        if capture is None or self._drop:
            return True
        return all(self.turns[name].try_admit(request) for name in capture.needs)

    def _need(self, consumer: str, request: Request) -> int:
        capture = self._captures.get(request.request_id)
        return capture.needs[consumer] if capture is not None else 0

    def _has_room(self, consumer: str, request: Request) -> bool:
        with self._lock:
            return self._free[consumer] >= self._need(consumer, request)

    def admit(self, request: Request) -> None:
        """Reserve bytes and open sessions; policy "drop" leaves out a consumer without room."""
        capture = self._captures.get(request.request_id)
        if capture is None:
            return
        for name, size in capture.needs.items():
            self.turns[name].leave(request.request_id)
            with self._lock:
                fits = self._free[name] >= size
                if fits:
                    self._free[name] -= size
                    capture.reserved_bytes[name] = size
            if not fits:
                capture.feeds.drop(name)
                self._report(request.request_id, ConsumerResult(name, "error", dropped=True))
            elif name in self.hosted.hosts:
                capture.feeds.open(name)
        capture.admitted = True

    def route_rows(self, request: Request, chunk: CapturedChunk) -> None:
        """Hand rows that were accepted to the consumers of this process."""
        capture = self._captures.get(request.request_id)
        if capture is not None:
            capture.feeds.deliver(chunk, request.output_token_ids)

    def call(self, call: CaptureCall) -> None:
        """Take a frontend's word that its consumer is done, or where a completion ended."""
        capture = self._captures.get(call.request_id)
        if capture is None:
            return
        if call.released in capture.reserved_bytes:
            self._settle(call.request_id, call.released)
        if call.end is None:
            return
        if capture.admitted:
            capture.feeds.finish(call.end.num_tokens, call.end.aborted, call.end.failed)
            return
        for name in [n for n in capture.reserved_bytes if n in self.hosted.hosts]:
            error = "the request ended before it started, so it has no rows"
            self._report(call.request_id, ConsumerResult(name, "error", error))

    def _report(self, request_id: str, result: ConsumerResult) -> None:
        """Send a result to the request's frontend; from any thread."""
        output = EngineCoreOutput(request_id, [], capture_results=[result])
        message = EngineCoreOutputs(outputs=[output])
        self.results.put((self._captures[request_id].client_index, message))
        self._settle(request_id, result.consumer)

    def _settle(self, request_id: str, consumer: str) -> None:
        """Give back what was reserved for a consumer."""
        with self._lock:
            capture = self._captures[request_id]
            self._free[consumer] += capture.reserved_bytes.pop(consumer)
            if not capture.reserved_bytes:
                del self._captures[request_id]

    # -- the engine's ------------------------------------------------------------------------

    def wait(self) -> EngineCoreOutputs | None:
        """Wait for the next result; None if there is none to come. An engine without a process of
        its own calls it when it has nothing else to do."""
        if not self._captures and self.results.empty():
            return None
        return self._outputs_of(self.results.get())

    def join(self, outputs: dict[int, EngineCoreOutputs] | None) -> dict[int, EngineCoreOutputs]:
        """Put a step's outputs behind the results that are in, for an engine without a process of
        its own. In that order, because word that a consumer has no room for a request must come
        before its rows."""
        waits = any(self.turns.values())
        results: list[EngineCoreOutput] = []
        try:
            # A request that waits for room gets it from a thread, which should get to run.
            message = self.results.get(timeout=0.001) if waits else self.results.get_nowait()
            while True:
                results += self._outputs_of(message).outputs
                message = self.results.get_nowait()
        except queue.Empty:
            pass
        outputs = outputs or {}
        if results:
            step = outputs.setdefault(0, EngineCoreOutputs())
            step.outputs = results + step.outputs
        return outputs

    @staticmethod
    def _outputs_of(message: tuple[int, EngineCoreOutputs] | bytes) -> EngineCoreOutputs:
        assert isinstance(message, tuple)
        return message[1]

    def shutdown(self) -> None:
        """Let the consumers write what is left."""
        self.hosted.shutdown()
