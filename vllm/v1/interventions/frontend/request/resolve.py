# SPDX-License-Identifier: Apache-2.0
"""Frontend: from `SamplingParams` to a `Plan`, once per request. It raises all user errors."""

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.capture import NO_TOKEN
from vllm.v1.capture.registry import is_inline
from vllm.v1.capture.transport.feed import prompt_tokens, request_info, reserved_bytes
from vllm.v1.capture.transport.selected import Selected
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.capture import (
    TOKENS,
    NumberedCapture,
    parse_capture,
)
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.chat import KEY as TURNS
from vllm.v1.interventions.frontend.request.doses import need_known_doses
from vllm.v1.interventions.frontend.request.media import NOWHERE, Media
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.rules import parse_rules, refuse_beside_forcing
from vllm.v1.interventions.frontend.request.steering import steering_plan
from vllm.v1.interventions.frontend.request.unanswered import need_no_answer
from vllm.v1.interventions.frontend.request.written_text import written_text
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, STEERING_FIELDS, CapturePlan, Plan
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_captured_points, needs_whole_items

if TYPE_CHECKING:
    from vllm.config import VllmConfig


MOST_TOKENS = 1 << 31
"""The largest `max_tokens`: positions are 64-bit numbers, and no model has as many."""


RESOLVED = "resolved"
"""Key of an engine input whose request was `checked`."""


class _Resolved(NamedTuple):
    plan: Plan | None
    params: SamplingParams
    max_tokens: int | None
    applied: int
    """Number of changes that the catalog had gone through."""


def checked(
    params: SamplingParams,
    given: dict[str, Any],
    config: "VllmConfig",
    tokenizer: TokenizerLike | None,
    modules: ModuleCatalog,
    num_prompts: int,
) -> Plan | None:
    """`resolve`, ahead of the engine, which finds the plan in the engine input."""
    applied = modules.applied
    plan = resolve(params, params, given, False, config, tokenizer, modules, num_prompts)
    given[RESOLVED] = _Resolved(plan, params, params.max_tokens, applied)
    return plan


def without_plan_fields(params: SamplingParams) -> SamplingParams:
    """`params` without what a plan carries, so that it is neither copied nor sent twice.

    The caller's object is not changed.
    """
    stripped = copy.copy(params)
    for field in PLAN_FIELDS:
        setattr(stripped, field, None)
    return stripped


def refuse_beam_search(
    params: SamplingParams | BeamSearchParams, config: "VllmConfig", modules: ModuleCatalog
) -> None:
    """Raise ValueError for a beam search in an engine with steering, or with rules for all
    requests: a beam is sent anew at each token, its generated ones as prompt."""
    if not isinstance(params, BeamSearchParams):
        return
    if modules.rules:
        reject(
            "beam_search",
            "is not supported while the operator's rules hold: they would take generated positions "
            "for the prompt's",
        )
    if config.steering_config.enable_steering:
        reject(
            "beam_search",
            "is not supported by an engine with steering: global tiers would take generated "
            "positions for the prompt's. Start without enable_steering",
        )


def need_steering(config: "VllmConfig", path: str) -> TapShape:
    """Layers, points and widths of a model that is steered; raises ValueError, naming `path`, if
    steering is not enabled."""
    if not config.steering_config.enable_steering or config.tap_shape is None:
        reject(
            path,
            "steering is not enabled; start the engine with enable_steering=True "
            "(--enable-steering)",
        )
    return config.tap_shape


def resolve(
    params: SamplingParams | PoolingParams,
    final_params: SamplingParams | None,
    given: dict[str, Any],
    resumable: bool,
    config: "VllmConfig",
    tokenizer: TokenizerLike | None,
    modules: ModuleCatalog,
    num_prompts: int = 1,
) -> Plan | None:
    """Return the plan, checked and composed, of what `params` and the engine's defaults ask for;
    None if they ask for nothing.

    Args:
        params: as the user gave them.
        final_params: the engine's copy, `max_tokens` resolved.
        given: the prompt as the renderer made it, upstream's `EngineInput`: tokens or embeddings,
            where its images, videos and sounds stand, its turns if it is a chat, and the plan if
            the request was `checked` and nothing has changed since.
        resumable: whether the prompt is a session that grows.
        config: of the engine; `tap_shape` says what the model offers.
        tokenizer: None with `skip_tokenizer_init`.
        modules: what the names in `steering_modules` mean now.
        num_prompts: how many prompts came in the same body; limits are for all of them.

    Raises:
        ValueError: with the path of the field, see docs/errors.md.
    """
    if not isinstance(params, SamplingParams):
        return None
    if config.capture_config.capture_stop_after is not None:
        need_no_answer(params, final_params, config.capture_config)
    known: _Resolved | None = given.get(RESOLVED)
    if known is not None and known.params is params and known.applied == modules.applied:
        assert final_params is not None
        if known.max_tokens == final_params.max_tokens and not resumable:
            given[RESOLVED] = None  # an input lives as long as its answer
            return known.plan
    if resumable and config.steering_config.enable_steering:
        reject(
            "steering",
            "an engine started with enable_steering takes no streaming input sessions: its global "
            "tiers could not act on them exactly; send the whole prompt",
        )
    field = next((f for f in PLAN_FIELDS if getattr(params, f) is not None), None)
    defaults, judged = modules.defaults(), params.rules is not None or bool(modules.rules)
    if field is None and defaults:
        field = defaults[0][0]
    if field is None and config.capture_config.captures_all:
        field = "capture"
    if field is None and judged:
        field = "rules"
    if field is None:
        return None
    if resumable:
        reject(field, "is not supported for streaming input sessions; send the whole prompt")
    assert final_params is not None and final_params.max_tokens is not None
    if final_params.max_tokens > MOST_TOKENS:
        reject("max_tokens", f"with {field}, must be at most {MOST_TOKENS}")
    max_tokens, acts = final_params.max_tokens, (bool(defaults), judged)
    asked = params, max_tokens, given, field, acts, config, tokenizer, modules, num_prompts
    if params.capture is not None or config.capture_config.captures_all or judged:
        return _made(*asked)
    make = partial(_made, *asked)
    state, acting = modules.state, modules.acting
    return modules.plans.plan(params, given, max_tokens, num_prompts, state, acting, make)


def _made(
    params: SamplingParams,
    max_tokens: int,
    given: dict[str, Any],
    field: str,
    acts: tuple[bool, bool],
    config: "VllmConfig",
    tokenizer: TokenizerLike | None,
    modules: ModuleCatalog,
    num_prompts: int,
) -> Plan:
    """Make the plan, as of `resolve`.

    Args:
        field: what asks for it, for errors.
        acts: whether modules act that the request does not name, and whether any rule does.
    """
    n = params.n or 1
    work = Work(config.steering_config.max_request_work, n, num_prompts)
    embeds, embedded = given.get("prompt_embeds"), NOWHERE
    token_ids = prompt_tokens(given.get("prompt_token_ids"), embeds, given.get("is_token_ids"))
    if embeds is not None:
        embedded = Positions.of(i for i, token_id in enumerate(token_ids) if token_id == NO_TOKEN)
    media = Media(given.get("mm_placeholders") or {}, embedded)
    prompt = Prompt(
        token_ids,
        max_tokens,
        tokenizer,
        work,
        given.get(TURNS),
        media,
        written_text(given),
    )
    shape = config.tap_shape
    steering = capture = None
    asked = any(getattr(params, name) is not None for name in (*STEERING_FIELDS, INHERIT))
    by_default, judged = acts
    if asked or by_default:
        steered = need_steering(config, field)
        steering = steering_plan(params, prompt, config.steering_config, steered, modules)
    if params.capture is not None or judged or config.capture_config.captures_all:
        if not config.capture_config.enabled or shape is None:
            reject(
                "rules" if judged and params.capture is None else "capture",
                "capture is not enabled; start the engine with capture_consumers=['inline'] "
                "(--capture-consumers inline)",
            )
        make = partial(_capture, params, prompt, config, shape, modules, judged)
        if judged or config.capture_config.captures_all:
            capture = make()
        else:
            capture = modules.captures.plan(params.capture, prompt, make)
        if capture is not None and isinstance(params.capture, NumberedCapture):
            capture = msgspec.structs.replace(capture, prompt=params.capture.prompt)
        if capture is not None and params.output_kind == RequestOutputKind.DELTA:
            _charge_chunks(capture, prompt)
        if capture is not None:
            _charge_texts(capture, prompt)
            need_known_doses(capture, [] if steering is None else steering.op_sites)
    plan = Plan(steering=steering, capture=capture)
    # Each completion is sent its own. All that is in it counts, whichever field it is of.
    work.charge(n * _encoded_size(plan) >> 10, Unit.KILOBYTE, field)
    return plan


def _encoded_size(plan: Plan) -> int:
    """Bytes of a plan's message, without a copy of its vectors."""
    steering, size = plan.steering, 0
    if steering is not None and steering.sets:
        lengths = [len(each.data) for each in steering.sets]
        # Before bytes stands how many they are, in 1, 2 or 4 bytes; 1 says that there are none.
        size = sum(n + (0 if n < 1 << 8 else 1 if n < 1 << 16 else 3) for n in lengths)
        bare = [msgspec.structs.replace(each, data=b"") for each in steering.sets]
        steering = msgspec.structs.replace(steering, sets=bare)
        plan = msgspec.structs.replace(plan, steering=steering)
    return size + len(msgspec.msgpack.encode(plan))


def _charge_chunks(plan: CapturePlan, prompt: Prompt) -> None:
    """Count what each chunk takes of a capture: for each completion as much as four sites, and each
    site where generated tokens have rows."""
    for name, selection in plan.consumers.items():
        if is_inline(name):
            goes_on = selection.runs[-1] > len(prompt.token_ids)
            number = (4 + len(selection.sites) * goes_on) * prompt.work.n
            prompt.work.charge(number, Unit.WRITTEN, f"capture.{name}")


def _charge_texts(plan: CapturePlan, prompt: Prompt) -> None:
    """Count the prompt's tokens whose texts are looked up, for all completions."""
    for name, selection in plan.consumers.items():
        if is_inline(name) and selection.fields.get(TOKENS):
            rows = len(Positions.from_flat(selection.runs).below(len(prompt.token_ids)))
            prompt.work.charge(rows * prompt.work.n, Unit.DECODED, f"capture.{name}.{TOKENS}")


def _capture(
    params: SamplingParams,
    prompt: Prompt,
    config: "VllmConfig",
    shape: TapShape,
    modules: ModuleCatalog,
    judged: bool,
) -> CapturePlan | None:
    specs = config.capture_config.consumers
    rules = parse_rules(params.rules, "rules", shape, prompt, modules) if judged else []
    own = [asked.rule for asked in rules if not asked.rule.for_all]
    for i, rule in enumerate(own):
        need_captured_points(rule.sites, f"rules[{i}]", config.capture_config)
    plan = parse_capture(params.capture, "capture", shape, prompt, specs, modules, rules)
    if plan is None:
        return None
    refuse_beside_forcing(plan, params, prompt, config)
    for name, selection in plan.consumers.items():
        making, path = selection.making, f"capture.{name}.{selection.making.sites_field}"
        need_captured_points(making.needed(selection.sites), path, config.capture_config)
    num_prompt_tokens = len(prompt.token_ids)
    at_once = 1
    if config.speculative_config is not None and plan.runs[-1] > num_prompt_tokens:
        # The scheduler takes all of a request's draft rows into one step, or none.
        at_once += config.speculative_config.num_speculative_tokens
    if shape.whole_prompts or needs_whole_items(config):
        wanted = Positions.from_flat(plan.runs)
        at_once = max([at_once, *(len(wanted.between(*item.span)) for item in prompt.media.items)])
        if shape.whole_prompts:  # with what was generated, should it be computed again
            at_once = max(at_once, len(wanted))
    needed = at_once * plan.arena_rows * shape.row_bytes
    if needed > config.capture_config.capture_buffer_bytes:
        reject(
            "capture" if plan.consumers else "rules",
            f"{at_once} position{'s' if at_once > 1 else ''} at once need {needed} bytes, the "
            f"engine has capture_buffer_bytes={config.capture_config.capture_buffer_bytes}",
        )
    hold, inline_bytes = bool(params.stop) or plan.cuts, 0
    for name, selection in plan.consumers.items():
        position_bytes = plan.row_bytes(name)
        row_bytes = position_bytes // len(selection.sites)  # on average
        if is_inline(name):
            limit = config.capture_config.capture_inline_max_bytes
            max_rows = Selected(selection, num_prompt_tokens).max_rows
            inline_bytes += position_bytes * max_rows * prompt.work.completions
            _need_room(name, inline_bytes, row_bytes, "capture_inline_max_bytes", limit)
            continue
        info, limits = request_info("", plan, name, prompt.token_ids), specs[name].limits
        _need_room(name, info.max_bytes, row_bytes, "max_request_bytes", limits.max_request_bytes)
        reserved = reserved_bytes(info, plan, name, hold)
        _need_room(name, reserved, row_bytes, "pending_bytes", limits.pending_bytes)
    return plan


def _need_room(name: str, num_bytes: int, row_bytes: int, option: str, limit: int) -> None:
    if num_bytes > limit:
        rows = num_bytes // row_bytes
        reject(
            f"capture.{name}",
            f"up to {rows} rows are {num_bytes} bytes, the engine allows {option}={limit} a "
            "request; choose fewer positions or layers, or a lower max_tokens or n",
        )
