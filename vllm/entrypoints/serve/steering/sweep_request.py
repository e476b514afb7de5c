# SPDX-License-Identifier: Apache-2.0
"""Parser of a sweep's request: it checks the fields, and counts the cells before it makes anything
of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.config.points import RETURNED, STREAM_POINTS
from vllm.tokenizers import TokenizerLike
from vllm.v1.interventions.errors import InterventionError, reject
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.chat import ChatTurns
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.resolve import need_steering
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.frontend.request.written_text import WrittenText
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import (
    need_captured_points,
    need_point,
    need_steered_points,
    site_order,
)
from vllm.v1.interventions.values import plain_list

from .packed import read_op
from .sweep_places import HeadPlaces, Places, StreamPlaces
from .sweep_plan import SweepPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELDS = (
    "prompt", "clean", "align", "op", "points", "layers", "positions", "scales", "answer", "other",
    "metric",
)  # fmt: skip
METRICS = ("logprob", "diff", "recovered")
MOST_CELLS = 65_536
"""Cells of one sweep, at most: each is a request to the engine."""

_SCALED = ("add", "norm_match")
_AXES = {"point": "points", "layers": "layers", "heads": "layers", "positions": "positions"}


def parse_sweep(
    body: Mapping[str, Any],
    prompt: list[int],
    clean: list[int] | None,
    config: "VllmConfig",
    tokenizer: TokenizerLike | None,
    turns: ChatTurns | None = None,
    written: WrittenText | None = None,
) -> SweepPlan:
    """Check what a sweep asks for. Its cells are counted before anything is made of them.

    Args:
        body: `FIELDS`, of which null ones are as if they were not there.
        prompt, clean: the tokens of these prompts.
        turns: those of `prompt`, if it is a chat.
        written: its text; None if it was given as tokens.

    Raises:
        ValueError: with the path of the field, see docs/errors.md.
    """
    shape = need_steering(config, "op")
    given = Given({name: body[name] for name in FIELDS if body.get(name) is not None}, "")
    op, patches = _op(given)
    answers, metric = _metric(given, config, tokenizer)
    work = Work(config.steering_config.max_request_work)
    asked = Prompt(prompt, 1, tokenizer, work, turns, written=written)
    positions, shift = _positions(given, asked, clean)
    places = _places(given, shape, positions, shift)
    need_steered_points(places.sites, "points", config.steering_config)
    if patches:
        need_captured_points(places.sites, "points", config.capture_config)
    scales = plain_list(given["scales"].value)
    count = places.count * (1 if scales is None else len(scales))
    if count > MOST_CELLS:
        reject(
            "positions",
            f"points, layers, positions or heads, and scales make {count} cells, a sweep has at "
            f"most {MOST_CELLS}",
        )
    ids = [prompt[position] for position in positions]
    texts = {} if tokenizer is None else {one: tokenizer.decode([one]) for one in set(ids)}
    return SweepPlan(
        op=op,
        patches=patches,
        places=places,
        scales=_scales(given, op, scales),
        answers=answers,
        metric=metric,
        tokens=None if tokenizer is None else [texts[one] for one in ids],
    )


def translated(error: InterventionError) -> NoReturn:
    """Raise the error of a cell's request as one of the sweep's: with the path of its field."""
    path = str(error.parameter)
    said = str(error).removeprefix(path)
    for inner, outer in (("steering[0]", "op"), ("capture.inline", "clean"), ("capture", "clean")):
        if path.startswith(inner):
            path = outer + path.removeprefix(inner)
            break
    raise InterventionError(path + said, parameter=path) from error


def _op(given: Given) -> tuple[dict[str, Any], bool]:
    """The operation, and whether its values are the clean prompt's rows."""
    taken_out = _of_heads(given) and "clean" not in given
    asked = given.get("op", {"op": "scale", "factor": 0.0} if taken_out else {"op": "replace"})
    op = dict(Given(read_op(asked.value, asked.path), asked.path).mapping())
    for key, axis in _AXES.items():
        if key in op:
            reject(f"op.{key}", f"is an axis of the sweep: say {axis!r} beside 'op'")
    patches = op.get("op") == "replace" and "values" not in op
    if patches and "clean" not in given:
        reject("clean", "is missing: it is the prompt whose rows 'replace' puts in")
    if not patches and "clean" in given:
        reject("clean", "is for the op 'replace' without values, whose values are its rows")
    if patches and "gate" in op:
        reject("op.gate", "does not go with the rows of a clean prompt")
    return op, patches


def _metric(
    given: Given, config: "VllmConfig", tokenizer: TokenizerLike | None
) -> tuple[list[int], str]:
    """The tokens that are scored, and the metric."""
    asked = given.get("metric", "diff" if "other" in given else "logprob")
    metric = asked.choice(METRICS, f"must be {', '.join(METRICS)}, got {{given}}")
    if (mode := config.model_config.logprobs_mode).endswith("logits"):
        reject("metric", f"needs log-probabilities, the engine was started with {mode}")
    if metric == "diff" and "other" not in given:
        reject("other", "is missing: 'diff' compares the answer with it")
    if metric == "logprob" and "other" in given:
        reject("other", "is not looked at by 'logprob'; ask for diff or recovered")
    if metric == "recovered" and "clean" not in given:
        reject("metric", "'recovered' needs a clean prompt; ask for logprob or diff")
    if "answer" not in given:
        reject("answer", "is missing: the token whose log-probability is looked at")
    vocabulary = config.model_config.get_vocab_size()
    names = [name for name in ("answer", "other") if name in given]
    tokens = [_token(given[name], vocabulary, tokenizer) for name in names]
    if len(set(tokens)) < len(tokens):
        reject("other", f"is the token of answer, {tokens[0]}")
    return tokens, metric


def _token(given: Given, vocabulary: int, tokenizer: TokenizerLike | None) -> int:
    text = given.plain()
    if isinstance(text, str) and tokenizer is not None:
        # Longer texts are more than one token, and tokenizing them takes time.
        ids = tokenizer.encode(text[:1000], add_special_tokens=False)
        if len(ids) != 1:
            given.refuse(f"{{given}} is {len(ids)} tokens; one is needed, as text or id")
        return int(ids[0])
    token = given.int(message="must be a text of one token or a token id, got {given}")
    if not 0 <= token < vocabulary:
        given.refuse(f"token {{given}} is out of range, the model has {vocabulary}")
    return token


def _of_heads(given: Given) -> bool:
    """True if the sweep's places are heads."""
    return given["points"].says(RETURNED) or plain_list(given["points"].value) == [RETURNED]


def _places(given: Given, shape: TapShape, positions: list[int], shift: int) -> Places[Any]:
    asked, layers = given.get("points", ["post_block"]), given.get("layers", "all")
    if _of_heads(given):
        need_point(RETURNED, "points", shape, (RETURNED,))
        heads = layers.heads(RETURNED, shape)
        sites = [(RETURNED, layer) for layer in sorted(heads)]
        return HeadPlaces(sites, positions, shift, heads)
    listed = plain_list(asked.value)
    names = [asked.value] if listed is None else listed[: len(STREAM_POINTS) + 1]
    points = [Given(name, f"{asked.path}[{i}]").point(shape) for i, name in enumerate(names)]
    if not points or len(set(points)) < len(points):
        asked.refuse("must name a point, each once")
    sites = [(point, n) for point in points for n in layers.layers(point, shape)]
    return StreamPlaces(sorted(sites, key=site_order), positions, shift)


def _positions(given: Given, prompt: Prompt, clean: list[int] | None) -> tuple[list[int], int]:
    """Positions of the prompt, and what is added to one for that of the clean prompt."""
    aligned, first, shift = "align" in given, 0, 0
    if aligned:
        given["align"].choice(("end",), "must be 'end', got {given}")
    length = len(prompt.token_ids)
    if clean is not None:
        shift = len(clean) - length
        first = max(0, -shift)
        if shift and not aligned:
            reject(
                "clean",
                f"has {len(clean)} tokens and prompt {length}; with 'align': 'end' they are "
                "compared from the end",
            )
    asked = given.get("positions", "all_prompt")
    found = asked.positions(Selector(prompt).resolve).array().tolist()
    if asked.says("all_prompt"):
        found = [position for position in found if position >= first]
    if not found:
        reject("positions", "no token of the prompt is at them")
    if found[0] < first:
        reject(
            "positions",
            f"position {found[0]} has none opposite: aligned at the end, clean begins at {first}",
        )
    return found, shift


def _scales(
    given: Given, op: Mapping[str, Any], scales: Sequence[Any] | None
) -> list[float] | None:
    if "scales" not in given:
        return None
    if not scales:
        given["scales"].refuse("must be a list of numbers, got {given}")
    if op.get("op") not in _SCALED:
        reject("scales", f"is for the ops {', '.join(_SCALED)}")
    if "scale" in op:
        reject("op.scale", "is an axis of the sweep: say 'scales' beside 'op'")
    found = [Given(scale, f"scales[{i}]").number() for i, scale in enumerate(scales)]
    if len(set(found)) < len(found):
        reject("scales", "names a scale twice")
    return found
