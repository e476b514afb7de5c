# SPDX-License-Identifier: Apache-2.0
"""Takes steering and capture out of bodies that ask for an answer, before it is generated."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vllm.logger import init_logger
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.v1.interventions.errors import printable, reject
from vllm.v1.interventions.frontend.compat.doors import (
    STEERING_KEYS,
    is_asked,
    read_args,
    read_fields,
)
from vllm.v1.interventions.frontend.compat.peers import (
    refuse_peer_args,
    refuse_peer_fields,
    refuse_peer_ops,
)
from vllm.v1.interventions.frontend.request.capture import NumberedCapture
from vllm.v1.interventions.frontend.request.media import sent_again
from vllm.v1.interventions.frontend.request.resolve import checked
from vllm.v1.interventions.plan import PLAN_FIELDS, STEERING_FIELDS, Plan

from .body import XARGS, asked_fields, names_modules, refuse_beams, set_plan_fields
from .packed import read_array

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.inputs import EngineInput
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    Asking = CompletionRequest | ChatCompletionRequest | GenerateRequest

logger = init_logger(__name__)


def args_path(request: "Asking") -> str:
    """Return what stands in errors before a key of what a body says to other tools."""
    has_xargs = XARGS in type(request).model_fields
    return f"{XARGS}." if has_xargs else "sampling_params.extra_args."


async def intervene(
    serving: "GenerateBaseServing",
    request: "Asking",
    request_id: str,
    params: SamplingParams | BeamSearchParams,
    prompt: "EngineInput",
    number: int = 0,
    num_prompts: int = 1,
) -> None:
    """Put what a body asks of steering and capture into `params`; refuse what it asks other tools.

    What is in the fields is looked at in the threads of plans, and not on the event loop.
    Where the response is streamed, all of it is checked here: an error of the engine would come
    after a 200. So it is for several prompts: they have the limits of one together.

    Args:
        number: which prompt of a body with several this is, so that what a consumer writes of each
            gets a name of its own.
        num_prompts: how many the body has.

    Raises:
        ValueError: a field is wrong; the message has its path.
    """
    engine = cast("AsyncLLM", serving.engine_client)
    config, processor = engine.vllm_config, engine.input_processor
    path = args_path(request)
    with sent_again(prompt, processor.renderer):
        refuse_peer_fields(request.model_extra, config)
        asked = asked_fields(request)
        if isinstance(params, BeamSearchParams):
            refuse_peer_args(request.vllm_xargs, config, path)
            if asked:
                refuse_beams(asked)
            await engine.steering.refresh()  # of rules: a beam is refused where some hold for all
            return
        if not asked and not is_asked(params, config):
            refuse_peer_args(params.extra_args, config, path)
            return
        run = processor.plan_threads.run
        if await run(_read, params, asked, config, path, num_prompts):
            await engine.steering.refresh()
        if all(getattr(params, name) is None for name in PLAN_FIELDS):
            return
        if num_prompts > 1 and isinstance(params.capture, Mapping):
            params.capture = NumberedCapture(params.capture, number)
        if request.stream or num_prompts > 1 or serving.request_logger is not None:
            if prompt["type"] != "embeds":  # as the engine does, ahead of who decodes them
                ids = cast("Sequence[int]", prompt.get("prompt_token_ids") or [])
                processor.renderer.validate_token_ids(ids, parameter="prompt")
            plan = await run(
                checked, params, cast("dict[str, Any]", prompt), config, processor.tokenizer,
                processor.modules, num_prompts,
            )  # fmt: skip
            if serving.request_logger is not None and plan is not None:
                logger.info("Request %s: %s", printable(request_id), await run(described, plan))


def _read(
    params: SamplingParams,
    asked: Mapping[str, Any],
    config: "VllmConfig",
    path: str,
    num_prompts: int,
) -> bool:
    """Put the fields of a body into `params`, also those that are in another tool's words.

    Args:
        path: what stands before a key of `extra_args` in errors.

    Returns:
        whether they name modules.
    """
    refuse_peer_ops(asked.get("steering"))
    set_plan_fields(params, read_fields(asked, config, num_prompts, read_array))
    opened = read_args(params, config, path, num_prompts)
    for name in (*PLAN_FIELDS, "extra_args", "skip_reading_prefix_cache"):
        setattr(params, name, getattr(opened, name))
    return names_modules({name: getattr(params, name) for name in PLAN_FIELDS})


def need_finite(
    request: "Asking",
    answer: "RequestOutput",
    output: "CompletionOutput",
) -> None:
    """Refuse to answer with log-probabilities that steering has made NaN: there is no such number
    in JSON, and the text is drawn from nothing.

    Raises:
        ValueError: the message names the field that steers, or `logprobs` where only the global
            tiers do; a streamed answer ends with it.
    """
    total, prompt = output.cumulative_logprob, answer.prompt_logprobs or ()
    if total is None and not prompt:
        return
    field = _steers(request)
    looked_at = prompt if field else prompt[-1:]  # a global vector acts on all positions
    of_prompt = any(
        one.logprob != one.logprob for each in looked_at for one in (each or {}).values()
    )
    if of_prompt or (total is not None and not total < inf):
        reject(
            field or ("prompt_logprobs" if of_prompt else "logprobs"),
            f"the log-probabilities of the {'prompt' if of_prompt else 'answer'} are not finite, "
            "since the stream is not; use smaller vectors or scales, here or in the global tiers",
        )


def _steers(request: "Asking") -> str | None:
    """The first field of a body that steers; None if none does."""
    extra, args = request.model_extra or {}, request.vllm_xargs or {}
    for field in STEERING_FIELDS:
        if extra.get(field) is not None:
            return field
    return next((f"{args_path(request)}{key}" for key in STEERING_KEYS if args.get(key)), None)


def described(plan: Plan) -> str:
    """Describe a plan for the log: digests, norms and counts, never values."""
    said = []
    if (steering := plan.steering) is not None:
        vectors = [
            f"{one.digest[:12]} ({len(one.sites)} vectors, largest norm "
            f"{max(np.linalg.norm(row.astype(np.float64)) for row in one.rows):.4g})"
            for one in steering.sets
        ]
        named = {d for c in steering.sums for d, _ in c.sets} - {
            one.digest for one in steering.sets
        }
        said += vectors + [f"{digest[:12]} (of a module)" for digest in sorted(named)]
        said += [f"{program.digest[:12]} (operations)" for program in steering.programs]
        said = [f"steering {', '.join(said) or 'without the global tiers'}"]
    if (capture := plan.capture) is not None:
        read = [*capture.consumers, *(f"rule {rule.name}" for rule in capture.rules)]
        said.append(f"capture for {', '.join(read)} at {len(capture.sites)} sites")
    return "; ".join(said)
