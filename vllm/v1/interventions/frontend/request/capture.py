# SPDX-License-Identifier: Apache-2.0
"""Capture in a request (`SamplingParams.capture`): parsed, checked and resolved to positions."""

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.config.points import HEAD_POINTS, POINTS, READ_POINTS, STREAM_POINTS
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumer import SHARED_FIELDS, CaptureConsumer
from vllm.v1.capture.registry import INLINE, ConsumerSpec
from vllm.v1.interventions.errors import need_mapping, reject, show, show_key
from vllm.v1.interventions.frontend.request.attention import (
    attention_selection,
    charge_attention,
)
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.lens import charge_lenses, lens_read
from vllm.v1.interventions.frontend.request.matrices import matrices_of, matrix_digest
from vllm.v1.interventions.frontend.request.rules import AskedRule, place_rules
from vllm.v1.interventions.frontend.request.selectors import NAMED_SELECTORS, Prompt, Selector
from vllm.v1.interventions.frontend.request.streams import Streams, union
from vllm.v1.interventions.makings import AttentionRead, LensRead
from vllm.v1.interventions.plan import CapturePlan, Selection, Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import (
    need_captured_points,
    need_heads,
    need_layers,
    need_one_lane,
    need_point,
    site_order,
)
from vllm.v1.interventions.values import plain
from vllm.v1.interventions.vectors import need_lane

TOKENS = "tokens"
"""Name of the field, for `inline` alone, that asks for the texts of the rows' tokens as well."""

MAX_CAPTURES = 16
"""The longest list of captures for `inline`."""


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
    `inline` also `"lens"` and a list of captures, for it and files `{"attention": ...}`; and add
    what consumers capture of every request that does not name them.

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
    asked = {} if value is None else need_mapping(value, path)
    if value is not None and not asked:
        reject(path, "names no consumer")
    given: dict[str, tuple[Any, ConsumerSpec]] = {}
    for key, request in asked.items():
        name = plain(key)
        at = f"{path}.{show_key(name)}"
        if name not in specs:
            reject(at, f"unknown consumer {show(name)}; known are {list(specs)}")
        given |= {each: (one, specs[name]) for each, one in _each(name, request, at).items()}
    selections: dict[str, Selection] = {}
    for name, (request, spec) in given.items():
        at = f"{path}.{show_key(name)}"
        selections[name] = selection = _selection(request, at, shape, prompt, spec)
        of_attention = isinstance(selection.reads, AttentionRead)
        where = "attention.queries" if of_attention else "positions"
        prompt.need_some(selection.runs, f"{at}.{where}")
    for name, spec in specs.items():
        if spec.capture is not None and name not in asked:
            of_all = _selection(spec.capture, f"{path}.{name}", shape, prompt, spec)
            if of_all.runs:
                selections[name] = of_all
                given[name] = spec.capture, spec
    if not selections and not rules:
        return None
    projections: dict[str, bytes] = {}
    streams = Streams(shape)
    for name, selection in selections.items():
        request, spec = given[name]
        at = f"{path}.{name}"
        if spec.name == INLINE and selection.fields and prompt.tokenizer is None:
            reject(
                f"{at}.{TOKENS}",
                "needs a tokenizer, and the engine was started with skip_tokenizer_init; read "
                "token_ids",
            )
        digests: list[str] = []
        if request.get("project") is not None:
            matrices = matrices_of(
                request["project"], f"{at}.project", shape, selection.sites, prompt.work, catalog
            )
            digests = [matrix_digest(matrix, shape) for matrix in matrices]
            projections |= zip(digests, matrices, strict=True)
        summed = request.get("reduce") is not None
        selections[name] = streams.add(name, selection, spec.in_frontend, digests, at, summed)
    placed_rules = place_rules(rules, streams, shape, projections)
    num_rows = sum(map(len, projections.values())) // (4 * shape.hidden_size)
    if num_rows > PROJECTION_ROWS:
        reject(
            path if selections else "rules",
            f"its matrices ('project') have {num_rows} rows together, the engine holds "
            f"{PROJECTION_ROWS}",
        )
    placed = streams.placed(projections)
    sites, runs = union(placed)
    if any(POINTS[point].made_of for point, _ in sites):
        taps = {(tap, layer) for point, layer in sites for tap in POINTS[point].copied}
        sites = sorted(taps, key=site_order)
    # What is made of rows takes room, too, while it is on the device; rows under a lens take time.
    made = sum(s.row_bytes * len(s.sites) for s in placed if s.differs or s.reads is not None)
    under = sum(len(s.sites) for s in placed if isinstance(s.reads, LensRead))
    charge_lenses(selections, runs, shape, prompt, path)
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
        path = f"capture_consumers.{name}.capture"
        positions = spec.capture.get("positions", "last_prompt")
        for selector in positions if isinstance(positions, list | tuple) else [positions]:
            if not isinstance(selector, str) or selector not in NAMED_SELECTORS:
                reject(f"{path}.positions", f"must be of {', '.join(NAMED_SELECTORS)}")
        selection = _selection(
            spec.capture, path, shape, Prompt([0], 2, None, Work(sys.maxsize)), spec
        )
        need_captured_points(selection.sites, f"{path}.hooks", config)
        Streams(shape).add(name, selection, spec.in_frontend, (), path)
        if spec.capture.get("project") is not None:
            work = Work(sys.maxsize)
            matrices_of(spec.capture["project"], f"{path}.project", shape, selection.sites, work)


def _each(name: str, request: Any, path: str) -> dict[str, Any]:
    """Return each capture that a consumer is asked for, by the name of its result: `inline[0]` is
    the first of a list."""
    if not isinstance(request, list | tuple):
        return {name: request}
    if name != INLINE:
        reject(
            path,
            f"is a list, which only {INLINE!r} takes; start the consumer twice, once with another "
            "instance_name",
        )
    if not 1 <= len(request) <= MAX_CAPTURES:
        reject(path, f"has {len(request)} captures, allowed are 1-{MAX_CAPTURES}")
    return {f"{name}[{i}]": one for i, one in enumerate(request)}


def _selection(
    request: Any, path: str, shape: TapShape, prompt: Prompt, spec: ConsumerSpec
) -> Selection:
    request = need_mapping(request, path)
    own = {plain(k): plain(field) for k, field in request.items() if k not in SHARED_FIELDS}
    tokens = own.pop(TOKENS, False) if spec.name == INLINE else False
    if not isinstance(tokens, bool):
        reject(f"{path}.{TOKENS}", f"must be true or false, got {show(tokens)}")
    fields = (spec.cls or CaptureConsumer).check_request(own, path)
    if tokens:
        fields[TOKENS] = True
    if "attention" in request:
        if not (spec.cls is None or spec.cls.takes_attention) or len(request) - len(own) > 1:
            reject(
                f"{path}.attention",
                f"is for {INLINE!r} and 'filesystem', and stands there without hooks, positions, "
                "project, reduce and tokens; name another consumer, or give a list of captures",
            )
        of_attention = f"{path}.attention"
        return attention_selection(request["attention"], of_attention, shape, prompt, fields)
    if "lens" in request and spec.cls is not None:
        reject(f"{path}.lens", f"is for {INLINE!r} alone")
    if "hooks" not in request:
        reject(f"{path}.hooks", "is missing: give {point: layers}")
    lanes = tuple(range(shape.lanes))
    if "lane" in request:
        lanes = need_lane(request["lane"], f"{path}.lane", shape.lanes)
    sites, heads = _sites(request["hooks"], f"{path}.hooks", shape, lanes)
    if "lane" in request and not any(point in STREAM_POINTS for point, _ in sites):
        reject(f"{path}.lane", "is of the stream, and hooks name no point there")
    if request.get("lens") is not None:
        need_one_lane(f"{path}.lens", shape)
    selector = Selector(prompt)
    runs = selector.resolve(request.get("positions", "last_prompt"), f"{path}.positions")
    if (reduce := plain(request.get("reduce"))) is not None:
        if reduce != "mean":
            reject(f"{path}.reduce", f"must be 'mean', got {show(reduce)}")
        if any(point in HEAD_POINTS for point, _ in sites):
            reject(f"{path}.reduce", "is for the residual stream; leave out q, k, v and z")
        if request.get("project") is not None:
            reject(
                f"{path}.reduce", "stands without 'project': multiply the mean, which is the same"
            )
        if selector.wants_last_generated or runs.stop > len(prompt.token_ids):
            reject(
                f"{path}.reduce",
                f"takes positions of the prompt, which has {len(prompt.token_ids)} tokens; for the "
                "mean of an answer send it as the end of a prompt",
            )
    reads = None
    if "lens" in request:
        if heads or request.get("project") is not None or reduce is not None:
            reject(
                f"{path}.lens",
                "is for the residual stream, without 'project' and 'reduce'; give a list of "
                "captures",
            )
        reads = lens_read(request["lens"], f"{path}.lens", sites, shape, prompt)
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
        heads=heads,
        reads=reads,
        fields=fields,
    )


def _sites(
    hooks: Any, path: str, shape: TapShape, lanes: tuple[int, ...]
) -> tuple[list[Site], dict[Site, tuple[int, ...]]]:
    """All sites in layer order, and which heads of those of attention; where the stream has
    several lanes, they are its heads."""
    points: list[list[Site]] = []
    heads: dict[Site, tuple[int, ...]] = {}
    for key, value in need_mapping(hooks, path).items():
        point = need_point(key, f"{path}.{show_key(key)}", shape, READ_POINTS)
        if point in HEAD_POINTS:
            chosen = need_heads(value, point, f"{path}.{point}", shape)
            heads |= {(point, layer): chosen[layer] for layer in chosen}
            points.append([(point, layer) for layer in sorted(chosen)])
            continue
        layers = _layers(value, point, f"{path}.{point}", shape)
        points.append([(point, layer) for layer in sorted(layers)])
        if shape.lanes > 1 and point in STREAM_POINTS:
            heads |= dict.fromkeys(points[-1], lanes)
    if not points:
        reject(path, "name no layer")
    if len(points) == 1:
        return points[0], heads
    return sorted(chain(*points), key=site_order), heads


def _layers(value: Any, point: str, path: str, shape: TapShape) -> Iterable[int]:
    """`need_layers`, in less time where a list of ints is given, as mostly."""
    if type(value) is list and len(value) <= len(shape.layers):
        known = {n for n in value if type(n) is int and point in shape.layer(n).points}
        if known and len(known) == len(value):
            return known
    return need_layers(value, point, path, shape)


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
