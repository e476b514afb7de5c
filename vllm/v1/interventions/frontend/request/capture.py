# SPDX-License-Identifier: Apache-2.0
"""Capture in a request (`SamplingParams.capture`): parsed, checked and resolved to positions."""

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.config.points import HEAD_POINTS, POINTS, READ_POINTS, STREAM_POINTS
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumer import SHARED_FIELDS, CaptureConsumer
from vllm.v1.capture.registry import INLINE, ConsumerSpec
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.attention import (
    attention_selection,
    charge_attention,
)
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.lens import charge_products
from vllm.v1.interventions.frontend.request.making_fields import Asked, hooks_of, making_of
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.rules import AskedRule, place_rules
from vllm.v1.interventions.frontend.request.selectors import NAMED_SELECTORS, Selector
from vllm.v1.interventions.frontend.request.streams import Streams, union
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.makings import Attention, Making
from vllm.v1.interventions.plan import CapturePlan, Selection, Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import (
    need_captured_points,
    site_order,
)
from vllm.v1.interventions.values import plain

TOKENS = "tokens"
"""Name of the field, for `inline` alone, that asks for the texts of the rows' tokens as well."""

MAX_CAPTURES = 16
"""The longest list of captures for `inline`."""


_EXAMPLE = "{'inline': {'hooks': {'post_block': 'all'}}}"
_NAME_IT = "name the consumer: {'inline': {'hooks': ...}}"


def parse_capture(
    value: Any,
    path: str,
    shape: TapShape,
    prompt: Prompt,
    specs: Mapping[str, ConsumerSpec],
    catalog: ModuleCatalog | None = None,
    rules: Sequence[AskedRule] = (),
) -> CapturePlan | None:
    """Parse `SamplingParams.capture`:
    `{consumer: {"hooks": {point: layers}, "positions": ..., "project": ..., "reduce": ...}}`, for
    `inline` also `"norms"`, `"dose"`, `"lens"` and a list of captures, for it and files
    `{"attention": ...}`; and add what consumers capture of every request that does not name them.

    Args:
        value: the user's mapping, or None.
        path: the field's name, for errors.
        shape: what the model offers.
        prompt: what `positions` are resolved on.
        specs: the engine's consumers.
        catalog: what `project` means by names of modules.
        rules: those of the request; what they read is captured with the rest.

    Returns:
        What is captured; None for nothing.

    Raises:
        ValueError: unknown consumer, key, point or selector, a layer out of range, a position out
            of reach, a selection of nothing, a matrix of a wrong shape or with too many rows, a
            mean of anything but rows of the prompt.
    """
    asked = Given({} if value is None else value, path)
    if not asked.mapping(_EXAMPLE) and value is not None:
        asked.refuse("names no consumer")
    given: dict[str, tuple[Given, ConsumerSpec]] = {}
    for key, request in asked.items():
        unknown = f"unknown consumer {{given}}; known are {list(specs)}"
        if key.plain() in SHARED_FIELDS and key.plain() not in specs:
            key.refuse(unknown, f"{show(key.value)} ({_NAME_IT})")
        name = key.choice(specs, unknown)
        given |= {each: (one, specs[name]) for each, one in _each(name, request).items()}
    selections: dict[str, Selection] = {}
    projections: dict[str, bytes] = {}
    for name, (request, spec) in given.items():
        selection = _selection(request, shape, prompt, spec, projections, catalog)
        prompt.need_some(selection.runs, f"{request.path}.{selection.making.rows_field}")
        selections[name] = selection
    for name, spec in specs.items():
        if spec.capture is not None and name not in asked:
            request = Given(spec.capture, f"{path}.{name}")
            own = dict[str, bytes]()
            of_all = _selection(request, shape, prompt, spec, own, catalog)
            if of_all.runs:
                selections[name] = of_all
                projections |= own
                given[name] = request, spec
    if not selections and not rules:
        return None
    streams = Streams(shape)
    for name, selection in selections.items():
        request, spec = given[name]
        if spec.name == INLINE and selection.fields and prompt.tokenizer is None:
            request[TOKENS].refuse(
                "needs a tokenizer, and the engine was started with skip_tokenizer_init; read "
                "token_ids"
            )
        selections[name] = streams.add(name, selection, spec.in_frontend, request.path)
    placed_rules = place_rules(rules, streams, shape, projections)
    num_rows = sum(map(len, projections.values())) // (4 * shape.hidden_size)
    if num_rows > PROJECTION_ROWS:
        reject(
            path if selections else "rules",
            f"its matrices ('project') have {num_rows} rows together, the engine holds "
            f"{PROJECTION_ROWS}",
        )
    placed = streams.placed()
    sites, runs = union(placed)
    if any(POINTS[point].made_of for point, _ in sites):
        taps = {(tap, layer) for point, layer in sites for tap in POINTS[point].copied}
        sites = sorted(taps, key=site_order)
    # What is made of rows takes room, too, while it is on the device; rows under a lens take time.
    made = sum(
        s.row_bytes * len(s.sites) for s in placed if s.source.takes_room or s.making.takes_room
    )
    under = sum(len(s.sites) for s in placed if s.making.through_head)
    charge_products(selections, runs, shape, prompt, path)
    key_weights = charge_attention(selections, runs, prompt, path)
    return CapturePlan(
        sites=sites,
        runs=runs,
        streams=placed,
        consumers=selections,
        arena_rows=shape.share_rows(sites) + -(-made // shape.row_bytes) + under * shape.lens_rows,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        projections=projections,
        rules=placed_rules,
        key_weights=key_weights,
    )


def check_global(config: CaptureConfig, shape: TapShape) -> None:
    """Check, at start-up, what consumers capture of every request.

    Raises:
        ValueError: what is said of points, layers or `project` is wrong; or the positions are not
            those of every request, so that requests that say nothing of capture would be refused.
    """
    for name, spec in config.consumers.items():
        if spec.capture is None:
            continue
        given = Given(spec.capture, f"capture_consumers.{name}.capture")
        positions = spec.capture.get("positions", "last_prompt")
        for selector in positions if isinstance(positions, list | tuple) else [positions]:
            if not isinstance(selector, str) or selector not in NAMED_SELECTORS:
                given["positions"].refuse(f"must be of {', '.join(NAMED_SELECTORS)}")
        work = Work(sys.maxsize)
        selection = _selection(given, shape, Prompt([0], 2, None, work), spec, {}, None)
        need_captured_points(selection.sites, given["hooks"].path, config)
        Streams(shape).add(name, selection, spec.in_frontend, given.path)


def _each(name: str, request: Given) -> dict[str, Given]:
    """Return each capture that a consumer is asked for, by the name of its result: `inline[0]` is
    the first of a list."""
    if not isinstance(request.value, list | tuple):
        return {name: request}
    if name != INLINE:
        request.refuse(
            f"is a list, which only {INLINE!r} takes; start the consumer twice, once with another "
            "instance_name"
        )
    message = f"has {{given}} captures, allowed are 1-{MAX_CAPTURES}"
    entries = request.entries(message, 1, MAX_CAPTURES)
    return {f"{name}[{i}]": one for i, one in enumerate(entries)}


def _selection(
    request: Given,
    shape: TapShape,
    prompt: Prompt,
    spec: ConsumerSpec,
    matrices: dict[str, bytes],
    catalog: ModuleCatalog | None,
) -> Selection:
    """Return the rows that a consumer asks for, and what is made of them.

    Args:
        matrices: digest -> matrix; gets those of this request.
    """
    asked = request.mapping()
    own = {plain(k): plain(field) for k, field in asked.items() if k not in SHARED_FIELDS}
    tokens = False
    if spec.name == INLINE:
        tokens = Given(own.pop(TOKENS, False), request[TOKENS].path).flag()
    fields = (spec.cls or CaptureConsumer).check_request(own, request.path)
    if tokens:
        fields[TOKENS] = True
    attention = request["attention"]
    if "attention" in request:
        if not _takes(spec, Attention) or len(asked) - len(own) > 1:
            attention.refuse(
                f"is for {INLINE!r} and 'filesystem', and stands there without hooks, positions, "
                "project, reduce and tokens; name another consumer, or give a list of captures"
            )
        return attention_selection(attention, shape, prompt, fields)
    hooks = hooks_of(request, shape)
    lanes = tuple(range(shape.lanes))
    if "lane" in request:
        lanes = (request["lane"].lane(shape.lanes),)
    sites, heads = _sites(hooks, shape, lanes)
    if "lane" in request and not any(point in STREAM_POINTS for point, _ in sites):
        request["lane"].refuse("is of the stream, and hooks name no point there")
    selector = Selector(prompt)
    runs = request.get("positions", "last_prompt").positions(selector.resolve)
    of_rows = Asked(
        request=request,
        sites=sites,
        heads=heads,
        runs=runs,
        knows_end=not selector.wants_last_generated,
        shape=shape,
        prompt=prompt,
        takes=partial(_takes, spec),
        catalog=catalog,
        matrices=matrices,
    )
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
        heads=heads,
        making=making_of(of_rows),
        fields=fields,
    )


def _takes(spec: ConsumerSpec, making: type[Making]) -> bool:
    """Tell whether rows of a kind may be asked of a consumer that is not of each kind."""
    return spec.cls is None or making in spec.cls.takes


def _sites(
    hooks: Given, shape: TapShape, lanes: tuple[int, ...]
) -> tuple[list[Site], dict[Site, tuple[int, ...]]]:
    """All sites in layer order, and which heads of those of attention; where the stream has
    several lanes, they are its heads."""
    points: list[list[Site]] = []
    heads: dict[Site, tuple[int, ...]] = {}
    for key, value in hooks.items():
        point = key.point(shape, READ_POINTS)
        if point in HEAD_POINTS:
            chosen = value.heads(point, shape)
            heads |= {(point, layer): chosen[layer] for layer in chosen}
            points.append([(point, layer) for layer in sorted(chosen)])
            continue
        points.append([(point, layer) for layer in sorted(_layers(value, point, shape))])
        if shape.lanes > 1 and point in STREAM_POINTS:
            heads |= dict.fromkeys(points[-1], lanes)
    if not points:
        hooks.refuse("name no layer")
    if len(points) == 1:
        return points[0], heads
    return sorted(chain(*points), key=site_order), heads


def _layers(given: Given, point: str, shape: TapShape) -> Iterable[int]:
    """The layers, in less time where a list of ints is given, as mostly."""
    value = given.value
    if type(value) is list and len(value) <= len(shape.layers):
        known = {n for n in value if type(n) is int and point in shape.layer(n).points}
        if known and len(known) == len(value):
            return known
    return given.layers(point, shape)


_P = TypeVar("_P")


class NumberedCapture(dict[str, Any]):
    """`SamplingParams.capture` of one of several prompts that share their parameters, so that what
    is written of them gets names of its own.

    Args:
        prompt: which one.
    """

    def __init__(self, capture: Mapping[str, Any], prompt: int) -> None:
        super().__init__(capture)
        self.prompt = prompt


def numbered(params: _P, count: int) -> list[_P]:
    """Copies of `params` for `count` prompts, each capture with the number of its prompt."""
    if not isinstance(params, SamplingParams) or not isinstance(params.capture, Mapping):
        return [params] * count
    copies: list[Any] = [copy.copy(params) for _ in range(count)]
    for i, each in enumerate(copies):
        each.capture = NumberedCapture(params.capture, i)
    return copies
