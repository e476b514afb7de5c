# SPDX-License-Identifier: Apache-2.0
"""What a request may say about capture: parsed, checked and resolved to positions."""

import copy
import hashlib
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from vllm.config.capture import (
    CAPTURE_POINTS,
    HEAD_POINTS,
    PROJECTION_ROWS,
    CaptureConfig,
)
from vllm.config.steering import MAX_MODULES
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.consumer import SHARED_FIELDS, CaptureConsumer
from vllm.v1.capture.registry import INLINE, ConsumerSpec
from vllm.v1.interventions.errors import need_mapping, reject, show, show_key
from vllm.v1.interventions.frontend.attention_request import attention_selection
from vllm.v1.interventions.frontend.capture_streams import Streams, union
from vllm.v1.interventions.frontend.lens_request import charge_lenses, lens_read
from vllm.v1.interventions.frontend.module_catalog import ModuleCatalog
from vllm.v1.interventions.frontend.selectors import NAMED_SELECTORS, Prompt, Selector
from vllm.v1.interventions.frontend.work import Unit, Work
from vllm.v1.interventions.plan import (
    AttentionRead,
    CapturePlan,
    LensRead,
    Selection,
    Site,
    TapShape,
)
from vllm.v1.interventions.sites import (
    need_captured_points,
    need_heads,
    need_layers,
    need_point,
    site_order,
)
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import need_vector

TOKENS = "tokens"
"""What only `inline` may be asked for: the texts of the rows' tokens beside them."""

MAX_CAPTURES = 16
"""The longest list of captures for `inline`."""


def parse_capture(
    value: Any,
    path: str,
    shape: TapShape,
    prompt: Prompt,
    specs: Mapping[str, ConsumerSpec],
    catalog: ModuleCatalog | None = None,
) -> CapturePlan | None:
    """Parse `SamplingParams.capture`:
    `{consumer: {"hooks": {point: layers}, "positions": ..., "project": ..., "reduce": ...}}`, for
    `inline` also `"lens"`, `{"attention": ...}` and a list of such captures, and add what consumers
    capture of every request that does not name them.

    Args:
        value: the user's mapping, or None.
        path: the field's name, for errors.
        shape: what the model offers.
        prompt: what `positions` are resolved on.
        specs: the engine's consumers.
        catalog: what `project` means by names of modules.

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
        if not selection.runs:
            of_attention = isinstance(selection.reads, AttentionRead)
            where = "attention.queries" if of_attention else "positions"
            reject(
                f"{at}.{where}",
                f"select nothing: the prompt has {len(prompt.token_ids)} tokens and "
                f"max_tokens={prompt.max_tokens} gives {max(prompt.max_tokens - 1, 0)} generated "
                "positions",
            )
    for name, spec in specs.items():
        if spec.capture is not None and name not in asked:
            of_all = _selection(spec.capture, f"{path}.{name}", shape, prompt, spec)
            if of_all.runs:
                selections[name] = of_all
                given[name] = spec.capture, spec
    if not selections:
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
            matrices = _matrices(
                request["project"], f"{at}.project", shape, selection, prompt.work, catalog
            )
            digests = [hashlib.sha256(b"%d:" % shape.hidden_size + m).hexdigest() for m in matrices]
            projections |= zip(digests, matrices, strict=True)
        summed = request.get("reduce") is not None
        selections[name] = streams.add(name, selection, spec.in_frontend, digests, at, summed)
    num_rows = sum(map(len, projections.values())) // (4 * shape.hidden_size)
    if num_rows > PROJECTION_ROWS:
        reject(
            path,
            f"its matrices ('project') have {num_rows} rows together, the engine holds "
            f"{PROJECTION_ROWS}",
        )
    placed = streams.placed(projections)
    sites, runs = union(placed)
    # What is made of rows takes room, too, while it is on the device; rows under a lens take time.
    made = sum(s.row_bytes * len(s.sites) for s in placed if s.reads is not None)
    under = sum(len(s.sites) for s in placed if isinstance(s.reads, LensRead))
    charge_lenses(selections, runs, shape, prompt, path)
    return CapturePlan(
        sites=sites,
        runs=runs,
        streams=placed,
        consumers=selections,
        arena_rows=sum(map(shape.arena_rows, sites))
        + -(-made // shape.row_bytes)
        + under * shape.lens_rows,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        prompt=value.prompt if isinstance(value, NumberedCapture) else None,
        projections=projections,
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
            _matrices(spec.capture["project"], f"{path}.project", shape, selection, work)


def _each(name: str, request: Any, path: str) -> dict[str, Any]:
    """What a consumer is asked for, by the name of its result: `inline[0]` is the first of a
    list."""
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


def _matrices(
    value: Any,
    path: str,
    shape: TapShape,
    selection: Selection,
    work: Work,
    catalog: ModuleCatalog | None = None,
) -> list[bytes]:
    """`_matrix` of a matrix for all sites, or of each of the sites: `{point: {layers: matrix}}`, or
    the directions of `{"modules": names}` there."""
    if selection.heads:
        reject(path, "is for the residual stream; leave out q, k, v and z")
    if isinstance(value, Mapping) and "modules" in value:
        if catalog is None:
            reject(f"{path}.modules", "names of modules belong to requests; give the matrix")
        value = _directions(value, path, selection.sites, catalog, work)
    if not isinstance(value, Mapping):
        data = _matrix(value, path, shape)
        work.charge(len(data) >> 10, Unit.KILOBYTE, path)
        return [data]
    made: dict[Site, bytes] = {}
    for key, entries in value.items():
        point = need_point(key, f"{path}.{show_key(key)}", shape)
        for layers, matrix in need_mapping(entries, f"{path}.{point}").items():
            at = f"{path}.{point}.{show_key(layers)}"
            data = _matrix(matrix, at, shape)
            work.charge(len(data) >> 10, Unit.KILOBYTE, at)
            for layer in need_layers(layers, point, at, shape):
                if (point, layer) in made or (point, layer) not in selection.sites:
                    twice = (point, layer) in made
                    reject(at, f"layer {layer} is {'named twice' if twice else 'not in hooks'}")
                made[point, layer] = data
                if len(data) != len(next(iter(made.values()))):
                    reject(at, "has another number of rows than the first matrix")
    if lacks := [site for site in selection.sites if site not in made]:
        reject(path, f"has no matrix for {lacks[0][0]} at layer {lacks[0][1]}")
    matrices = [made[site] for site in selection.sites]
    return matrices if len(set(matrices)) > 1 else matrices[:1]


def _directions(
    value: Mapping[Any, Any], path: str, sites: list[Site], catalog: ModuleCatalog, work: Work
) -> dict[str, dict[int, np.ndarray]]:
    """The base vectors of modules as `{point: {layer: [names, hidden]}}`, each of length 1."""
    names = plain_list(value["modules"])
    if not names or len(value) > 1 or len(names) > MAX_MODULES:
        reject(path, f"must be {{'modules': names}} alone, with 1-{MAX_MODULES} names")
    matrices: dict[str, dict[int, np.ndarray]] = {}
    modules = [catalog.get(name, f"{path}.modules[{i}]") for i, name in enumerate(names)]
    for point, layer in sites:
        rows = []
        for i, module in enumerate(modules):
            base = module.tiers.get("base")
            if base is None or (point, layer) not in base.sites:
                reject(
                    f"{path}.modules[{i}]",
                    f"{names[i]} has no vector for {point} at layer {layer}, which is in hooks",
                )
            row = base.rows[base.sites.index((point, layer))].astype(np.float64)
            work.charge(len(row) >> 8, Unit.KILOBYTE, f"{path}.modules[{i}]")
            if not row.any():
                reject(f"{path}.modules[{i}]", f"is zero for {point} at layer {layer}")
            rows.append(row / np.linalg.norm(row))
        matrices.setdefault(point, {})[layer] = np.stack(rows)
    return matrices


def _matrix(value: Any, path: str, shape: TapShape) -> bytes:
    """Bytes of float32 [k, hidden], from a list of vectors, a 2-D array or a 2-D tensor."""
    if isinstance(value, np.ndarray | torch.Tensor):
        if value.ndim != 2:
            reject(path, f"has shape {list(value.shape)}, the model needs [k, {shape.hidden_size}]")
    elif not isinstance(value, list):
        reject(path, f"must be a list of lists, a numpy array or a torch tensor, got {show(value)}")
    k, most = len(value), shape.row_bytes // 4
    if not 1 <= k <= min(most, PROJECTION_ROWS):
        reject(
            path,
            f"has {k} rows, allowed are 1-{min(most, PROJECTION_ROWS)}: scores may take no more "
            f"bytes than the row they are made of, and the engine holds {PROJECTION_ROWS} rows of "
            "matrices",
        )
    rows = [need_vector(row, f"{path}[{i}]", shape.hidden_size) for i, row in enumerate(value)]
    with np.errstate(over="ignore"):
        matrix = np.stack(rows).astype(np.float32)
    if not np.isfinite(matrix).all():
        reject(path, "overflows float32")
    return matrix.tobytes()


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
        if spec.cls is not None or len(request) > 1:
            reject(
                f"{path}.attention",
                f"stands alone in a capture for {INLINE!r}: leave out hooks, positions, project "
                "and reduce, or give a list of captures",
            )
        return attention_selection(request["attention"], f"{path}.attention", shape, prompt)
    if "lens" in request and spec.cls is not None:
        reject(f"{path}.lens", f"is for {INLINE!r} alone")
    if "hooks" not in request:
        reject(f"{path}.hooks", "is missing: give {point: layers}")
    sites, heads = _sites(request["hooks"], f"{path}.hooks", shape)
    selector = Selector(prompt)
    runs = selector.resolve(request.get("positions", "last_prompt"), f"{path}.positions")
    if (reduce := plain(request.get("reduce"))) is not None:
        if reduce != "mean":
            reject(f"{path}.reduce", f"must be 'mean', got {show(reduce)}")
        if heads:
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
    hooks: Any, path: str, shape: TapShape
) -> tuple[list[Site], dict[Site, tuple[int, ...]]]:
    """All sites in layer order, and which heads of those of attention."""
    points: list[list[Site]] = []
    heads: dict[Site, tuple[int, ...]] = {}
    for key, value in need_mapping(hooks, path).items():
        point = need_point(key, f"{path}.{show_key(key)}", shape, CAPTURE_POINTS)
        if point in HEAD_POINTS:
            chosen = need_heads(value, point, f"{path}.{point}", shape)
            heads |= {(point, layer): chosen[layer] for layer in chosen}
            points.append([(point, layer) for layer in sorted(chosen)])
            continue
        layers = _layers(value, point, f"{path}.{point}", shape)
        points.append([(point, layer) for layer in sorted(layers)])
    if not points:
        reject(path, "name no layer")
    if len(points) == 1:
        return points[0], heads
    return sorted(chain(*points), key=site_order), heads


def _layers(value: Any, point: str, path: str, shape: TapShape) -> Iterable[int]:
    """`need_layers`, in less time where a list of ints is given, as mostly."""
    if type(value) is list and len(value) <= len(shape.points):
        known = {n for n in value if type(n) is int and point in shape.points.get(n, ())}
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
