# SPDX-License-Identifier: Apache-2.0
"""Sends requests to the engine core; one that cannot be sent is an error of that request alone."""

from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor


def send(engine: "LLMEngine", request: EngineCoreRequest) -> None:
    """Send a request; if that fails, nobody waits for it any more, and the error is raised."""
    try:
        engine.engine_core.add_request(request)
    except BaseException:
        engine.engine_core.abort_requests(_forget(engine.output_processor, request.request_id))
        raise


async def send_async(engine: "AsyncLLM", request: EngineCoreRequest) -> None:
    """Send a request as `send` does."""
    try:
        await engine.engine_core.add_request_async(request)
    except BaseException:
        forgotten = _forget(engine.output_processor, request.request_id)
        await engine.engine_core.abort_requests_async(forgotten)
        raise


def _forget(outputs: "OutputProcessor", request_id: str) -> list[str]:
    """End a request for its frontend, with all its completions; return their ids."""
    parent, ids = outputs.request_states[request_id].parent_req, [request_id]
    if parent is not None:
        outputs.parent_requests.pop(parent.request_id, None)
        ids = sorted(parent.child_requests)
    for one in ids:
        # Each ends alone: some of its siblings may not be there yet.
        outputs.request_states[one].parent_req = None
    # In error, as then no result of a consumer is waited for: the engine core has no request.
    failed = [EngineCoreOutput(one, [], finish_reason=FinishReason.ERROR) for one in ids]
    outputs.process_outputs(failed)
    return ids
