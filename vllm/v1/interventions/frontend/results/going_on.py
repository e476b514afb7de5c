# SPDX-License-Identifier: Apache-2.0
"""Answers that are cut and go on in the same stream.

The engine may be far ahead of what the frontend has seen of an answer. So the frontend drops the
engine's request, and sends it anew under another id, with what it keeps of the answer as if that
had been generated. Nothing that the old request still does can reach the answer, and all that
depends on positions, phases, penalties or seeds is as for a request that was preempted.
"""

import copy
from typing import TYPE_CHECKING

import msgspec

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.interventions.plan import Begun

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import (
        OutputProcessor,
        RequestOutputCollector,
        RequestState,
    )


class SentRequest:
    """The request of a completion that may be sent again.

    Args:
        queue: where its outputs go first; its id is what a client that hangs up aborts by.
    """

    def __init__(self, request: EngineCoreRequest, queue: "RequestOutputCollector | None") -> None:
        self._request, self._queue, self._times = request, queue, 0
        self._is_queued = False
        """True if the engine is still to say that it has the request."""

    def again(self, output_token_ids: list[int], rows: int) -> EngineCoreRequest:
        """Return the request with a part of its answer, under a new id.

        Args:
            output_token_ids: of the answer, all that is kept.
            rows: the position before which all rows came.
        """
        self._times += 1
        self._is_queued = True
        params, plan = copy.copy(self._request.sampling_params), self._request.plan
        assert params is not None and plan is not None  # it has a rule that forces
        params.prompt_logprobs = None  # those of the prompt came
        return msgspec.structs.replace(
            self._request,
            request_id=f"{self._request.request_id}~{self._times}",
            sampling_params=params,
            plan=msgspec.structs.replace(plan, begun=Begun([*output_token_ids], rows)),
        )

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
