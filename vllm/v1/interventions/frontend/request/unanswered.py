# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine whose model ends after a layer (`capture_stop_after`): capture alone."""

from typing import Any

from vllm.config.capture import CaptureConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import reject, show

_OF_ANSWERS = ("logprobs", "prompt_logprobs", "structured_outputs", "rules")
"""Fields that ask for what the head says, or for what is done with an answer."""


def need_no_answer(
    params: SamplingParams, final_params: SamplingParams | None, config: CaptureConfig
) -> None:
    """Check that a request wants rows of its prompt, and nothing that needs the rest of the model.

    Args:
        params: as the user gave them.
        final_params: the engine's copy, `max_tokens` resolved.

    Raises:
        ValueError: it captures nothing, or asks for an answer; the message names the field.
    """
    ends = f"the engine ends after layer {config.capture_stop_after} (capture_stop_after)"
    whole = "start one without it to have answers"
    if params.capture is None and not config.captures_all:
        reject("capture", f"{ends} and does nothing but capture; say what, or {whole}")
    most = None if final_params is None else final_params.max_tokens
    asked: dict[str, tuple[Any, Any]] = {"max_tokens": (most, 1), "n": (params.n or 1, 1)}
    for field, (given, only) in asked.items():
        if given != only:
            reject(
                field, f"{ends} and generates nothing: must be {only}, not {show(given)}; {whole}"
            )
    for field in _OF_ANSWERS:
        if getattr(params, field) is not None:
            reject(field, f"{ends} and has no head; leave it out, or {whole}")
