# SPDX-License-Identifier: Apache-2.0
"""Frontend: from `SamplingParams` to a `Plan`, once per request. It raises all user errors."""

import copy
from typing import TYPE_CHECKING

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.capture.spec import parse_capture
from vllm.v1.interventions import (
    PLAN_FIELDS,
    STEERING_FIELDS,
    UNSTEERED,
    CapturePlan,
    Content,
    Plan,
    TapShape,
)
from vllm.v1.positions import Positions
from vllm.v1.selectors import Prompt
from vllm.v1.sites import need_mapping, reject, show, show_key
from vllm.v1.steering.plan import compose
from vllm.v1.steering.spec import Vectors, parse_vectors

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def strip(params: SamplingParams) -> SamplingParams:
    """`params` without what a plan carries, so that it is neither copied nor sent twice.

    The caller's object is not changed.
    """
    stripped = copy.copy(params)
    for field in PLAN_FIELDS:
        setattr(stripped, field, None)
    return stripped


def resolve(
    params: SamplingParams | PoolingParams,
    final_params: SamplingParams | None,
    prompt_token_ids: list[int] | None,
    resumable: bool,
    config: "VllmConfig",
    tokenizer: TokenizerLike | None,
) -> Plan | None:
    """What `params` asks for, checked and composed; None if it asks for nothing.

    Args:
        params: as the user gave them.
        final_params: the engine's copy, `max_tokens` resolved.
        prompt_token_ids: None if the prompt is given as embeddings only.
        resumable: whether the prompt is a session that grows.
        config: of the engine; `tap_shape` says what the model offers.
        tokenizer: None with `skip_tokenizer_init`.

    Raises:
        ValueError: with the path of the field, see docs/errors.md.
    """
    if not isinstance(params, SamplingParams):
        return None
    steers = any(getattr(params, field) is not None for field in STEERING_FIELDS)
    if not steers and params.capture is None:
        return None
    field = next(f for f in PLAN_FIELDS if getattr(params, f) is not None)
    if resumable:
        reject(field, "is not supported for streaming input sessions; send the whole prompt")
    if prompt_token_ids is None:
        reject(field, "is not supported for prompts given as embeddings; send tokens or text")
    assert final_params is not None and final_params.max_tokens is not None
    prompt = Prompt(prompt_token_ids, final_params.max_tokens, tokenizer)
    shape = config.tap_shape
    prefill = decode = None
    if steers:
        if not config.steering_config.enable_steering or shape is None:
            reject(
                field,
                "steering is not enabled; start the engine with enable_steering=True "
                "(--enable-steering)",
            )
        prefill, decode = _contents(params, prompt.max_tokens, config, shape)
    capture = None
    if params.capture is not None:
        if not config.capture_config.enabled or shape is None:
            reject(
                "capture",
                "capture is not enabled; start the engine with capture_consumers=['inline'] "
                "(--capture-consumers inline)",
            )
        capture = _capture(params, prompt, config, shape)
    contents = {c.digest: c for c in (prefill, decode) if c is not None}
    return Plan(
        contents=list(contents.values()),
        prefill=prefill.digest if prefill else UNSTEERED,
        decode=decode.digest if decode else UNSTEERED,
        capture=capture,
    )


def _contents(
    params: SamplingParams, max_tokens: int, config: "VllmConfig", shape: TapShape
) -> tuple[Content | None, Content | None]:
    allowed = config.steering_config.steering_points
    tiers: dict[str, Vectors] = {}
    for field in STEERING_FIELDS:
        value = getattr(params, field)
        tiers[field] = {} if value is None else parse_vectors(value, field, shape)
        for point, _ in tiers[field]:
            if point not in allowed:
                reject(
                    f"{field}.{point}",
                    f"the engine was started with steering_points={list(allowed)}",
                )
    base, only_prefill, only_decode = (tiers[field] for field in STEERING_FIELDS)
    if only_decode and max_tokens == 1 and not base:
        reject(
            "decode_steering_vectors",
            "can act on no position: with max_tokens=1 no generated token is fed back",
        )
    prefill = compose([base, only_prefill], _given(params, *STEERING_FIELDS[:2]), shape)
    decode = compose([base, only_decode], _given(params, *STEERING_FIELDS[::2]), shape)
    needed = len({c.digest for c in (prefill, decode) if c is not None})
    if needed > config.steering_config.max_steering_configs:
        reject(
            _given(params, *STEERING_FIELDS),
            f"the request needs {needed} slots, the engine has max_steering_configs="
            f"{config.steering_config.max_steering_configs}",
        )
    return prefill, decode


def _given(params: SamplingParams, *fields: str) -> str:
    """A path for what several fields say together."""
    return " + ".join(field for field in fields if getattr(params, field) is not None)


def _capture(
    params: SamplingParams, prompt: Prompt, config: "VllmConfig", shape: TapShape
) -> CapturePlan:
    known = config.capture_config.capture_consumers
    for name in need_mapping(params.capture, "capture"):
        if name not in known:
            reject(f"capture.{show_key(name)}", f"unknown consumer {show(name)}; known are {known}")
    plan = parse_capture(params.capture, "capture", shape, prompt)
    num_prompt_tokens = len(prompt.token_ids)
    at_once = 1
    if config.speculative_config is not None and plan.runs[-1] > num_prompt_tokens:
        # The scheduler takes all of a request's draft rows into one step, or none.
        at_once += config.speculative_config.num_speculative_tokens
    needed = at_once * len(plan.sites) * shape.row_bytes
    if needed > config.capture_config.capture_buffer_bytes:
        reject(
            "capture",
            f"{at_once} position{'s' if at_once > 1 else ''} at once need {needed} bytes, the "
            f"engine has capture_buffer_bytes={config.capture_config.capture_buffer_bytes}",
        )
    inline = plan.consumers.get("inline")
    if inline is not None:
        rows = len(Positions.from_flat(inline.runs)) * len(inline.sites)
        if inline.last_generated:
            of_prompt = Positions.from_flat(inline.runs).below(num_prompt_tokens)
            rows = (len(of_prompt | Positions.from_flat(inline.named)) + 1) * len(inline.sites)
        limit = config.capture_config.capture_inline_max_bytes
        if rows * shape.row_bytes > limit:
            reject(
                "capture.inline",
                f"up to {rows} rows are {rows * shape.row_bytes} bytes, the engine allows "
                f"capture_inline_max_bytes={limit} a request; choose fewer positions or layers, "
                "or a lower max_tokens",
            )
    return plan
