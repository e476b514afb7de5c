# SPDX-License-Identifier: Apache-2.0
"""Answers that are cut, or steered otherwise, and go on in the same stream.

The engine may be far ahead of what the frontend has seen of an answer. So the frontend drops the
engine's request, and sends it anew under another id, with what it keeps of the answer as if that
had been generated. Nothing that the old request still does can reach the answer, and all that
depends on positions, phases or penalties is as for a request that was preempted. What a seed draws
begins anew.
"""

import copy
import weakref
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from vllm.config.steering import SteeringConfig
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.joined import Joined
from vllm.v1.interventions.frontend.results.hold import OutputHold
from vllm.v1.interventions.plan import Begun, Plan

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.interventions.frontend.results.link import CaptureLink

CLIENT: ContextVar[bytes] = ContextVar("client", default=b"")
"""Digest of what the client of the HTTP request that is being answered shows of itself; b"" outside
of a server."""


class NewSteering:
    """Steering that the completions of a running request are to have from some position on.

    Args:
        samples: the indices of the completions.
    """

    def __init__(self, samples: set[int]) -> None:
        self.future: Future[dict[int, int]] = Future()
        """Completion -> the position from which it acts, without those that ended before."""
        self._waiting = samples
        self._positions: dict[int, int] = {}

    @property
    def is_wanted(self) -> bool:
        """True while somebody waits for it."""
        return not self.future.done()

    def acts(self, sample: int, position: int) -> None:
        """Note from which position on a completion has it."""
        self._positions[sample] = position
        self.ended(sample)

    def refuse(self, error: Exception) -> None:
        """Tell who waits that a completion does not have it: it goes on as it was, or ends."""
        if self.is_wanted:
            self.future.set_exception(error)

    def ended(self, sample: int) -> None:
        """Wait no more for a completion."""
        self._waiting.discard(sample)
        if self._waiting or not self.is_wanted:
            return
        if self._positions:
            self.future.set_result(self._positions)
        else:
            self.future.set_exception(LookupError("the answer ended before it could be changed"))


class SentRequest:
    """The request of a completion that may be sent again.

    Args:
        state: of the completion, with the queue that its outputs go to first: the id there is what
            a client that hangs up aborts by.
        modules: those that requests may name now.
    """

    def __init__(
        self, state: "RequestState", request: EngineCoreRequest, modules: ModuleCatalog
    ) -> None:
        self._queue = None if isinstance(state.queue, OutputHold) else state.queue
        self.has_media = bool(request.mm_features) or request.prompt_embeds is not None
        self._request = request
        if self.has_media:  # they are large, and it cannot be sent again
            self._request = msgspec.structs.replace(request, mm_features=None, prompt_embeds=None)
        self.client, self._modules, self._times = CLIENT.get(), modules, 0
        self._module_sets = modules.sets_of(self.plan.steering)
        """Vector sets of modules that the plan refers to."""
        self._is_queued = False
        """True if the engine is still to say that it has the request."""
        self.asked: tuple[Joined, NewSteering] | None = None
        """Steering that it is to have and has not yet, and who waits for that."""
        self._end: weakref.finalize[..., SentRequest] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the request as it was sent last."""
        return self._request.plan or Plan()

    @property
    def params(self) -> "SamplingParams":
        """The parameters that it was sent with, without what a plan carries."""
        assert self._request.sampling_params is not None
        return self._request.sampling_params

    def again(self, output_token_ids: list[int], rows: int) -> EngineCoreRequest:
        """Return the request with a part of its answer, under a new id.

        Args:
            output_token_ids: of the answer, all that is kept.
            rows: the position before which all rows came.
        """
        self._times += 1
        self._is_queued = True
        params, plan = copy.copy(self.params), self.plan
        params.prompt_logprobs = None  # those of the prompt came
        if plan.steering is not None:
            # The engine core may have forgotten what a name meant when the request came.
            known = self._modules.sets_of(plan.steering)
            gone = [self._module_sets[digest] for digest in self._module_sets.keys() - known]
            steering = msgspec.structs.replace(plan.steering, sets=[*plan.steering.sets, *gone])
            plan = msgspec.structs.replace(plan, steering=steering)
        return msgspec.structs.replace(
            self._request,
            request_id=f"{self._request.request_id}~{self._times}",
            sampling_params=params,
            plan=msgspec.structs.replace(plan, begun=Begun([*output_token_ids], rows)),
        )

    def ask(self, joined: Joined, change: NewSteering, sample: int) -> None:
        """Steer the request otherwise, from its next output on."""
        self.asked = joined, change
        self._end = weakref.finalize(self, change.ended, sample)
        self._end.atexit = False

    def fail(self, error: Exception) -> None:
        """Tell who waits for a change that there will be none."""
        if self.asked is not None:
            self.asked[1].refuse(error)

    def changes(self, state: "RequestState", config: SteeringConfig) -> int | None:
        """If it is to be steered otherwise, change its plan and return the position from which on
        it is: that of the last token that was given out."""
        asked, self.asked = self.asked, None
        if asked is None:
            return None
        joined, change = asked
        assert self._end is not None and state.detokenizer is not None
        self._end.detach()
        if not change.is_wanted:
            return None
        position = state.prompt_len + state.detokenizer.num_output_tokens() - 1
        try:
            steering = joined.at(position, config)
        except InterventionError as error:
            change.refuse(error)
            return None
        self._request = msgspec.structs.replace(
            self._request, plan=msgspec.structs.replace(self.plan, steering=steering)
        )
        of_modules = self._module_sets | joined.module_sets
        self._module_sets = {d: of_modules[d] for d in steering.module_digests & of_modules.keys()}
        change.acts(state.request_index, position)
        return position

    def came(self, output: EngineCoreOutput) -> None:
        """Leave out of an output that the engine queued the request: it was queued before."""
        if self._is_queued and output.events is not None:
            self._is_queued = False
            queued = EngineCoreEventType.QUEUED
            output.events = [event for event in output.events if event.type != queued]

    def rename(self, processor: "OutputProcessor", state: "RequestState", new: str) -> None:
        """Change the completion's id in all that `processor` keeps of it."""
        old, state.request_id = state.request_id, new
        if self._queue is not None and self._queue.request_id == old:
            self._queue.request_id = new
        processor.request_states[new] = processor.request_states.pop(old)
        ids = processor.external_req_ids[state.external_req_id]
        ids[ids.index(old)] = new
        processor.lora_states.request_finished(old, state.lora_name)
        if state.parent_req is not None:
            state.parent_req.child_requests.remove(old)
            state.parent_req.child_requests.add(new)
        if state.stats is not None and state.detokenizer is not None:
            state.stats.num_generation_tokens = state.detokenizer.num_output_tokens()


class SentRequests:
    """Requests of one frontend that may be sent again.

    Args:
        link: to the engine core.
        modules: those that requests may name.
        config: what the engine has room for.
    """

    def __init__(self, link: "CaptureLink", modules: ModuleCatalog, config: SteeringConfig) -> None:
        self._link, self._modules, self._config = link, modules, config
        self._sent: weakref.WeakValueDictionary[str, SentRequest] = weakref.WeakValueDictionary()

    def open(self, state: "RequestState", request: EngineCoreRequest) -> None:
        """Keep the request of a completion that is about to start, if anything may change it."""
        capture = None if request.plan is None else request.plan.capture
        may_change = self._config.enable_steering or (capture is not None and capture.forces)
        if may_change and request.sampling_params is not None:
            state.sent = self._sent[request.request_id] = SentRequest(state, request, self._modules)

    def came(self, output: EngineCoreOutput) -> None:
        """Take note of an output with events."""
        if (sent := self._sent.get(output.request_id)) is not None:
            sent.came(output)

    def fail(self, error: Exception) -> None:
        """Tell who waits for a change that the engine is gone."""
        for sent in [*self._sent.values()]:
            sent.fail(error)

    def goes_on(self, processor: "OutputProcessor", state: "RequestState") -> int | None:
        """Send the request of an answer anew, under another id, if the answer was cut or is to be
        steered otherwise from here on.

        Returns:
            The position before which its rows came; None if nothing changes.
        """
        if (sent := state.sent) is None or state.detokenizer is None:
            return None
        rows = None if state.rules is None else state.rules.goes_on()
        if rows is None and sent.asked is not None:
            rows = sent.changes(state, self._config)
        if rows is None:
            return None
        old, request = state.request_id, sent.again(state.detokenizer.output_token_ids, rows)
        new = request.request_id
        self._sent[new] = self._sent.pop(old)
        sent.rename(processor, state, new)
        self._link.add(request, lambda: new in processor.request_states)
        return rows
