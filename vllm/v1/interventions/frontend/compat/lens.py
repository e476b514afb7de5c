# SPDX-License-Identifier: Apache-2.0
"""The requests and answers of vLLM-Lens, with `--compat lens` (docs/coming-from.md#vllm-lens).

A request of its is made one of ours exactly, or refused.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm.v1.capture.lens_activations import activations, activations_of
from vllm.v1.capture.results import CaptureResult
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.compat.wire import WIRE_KEYS, decoded, encoded, need_keys
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.given import MAX_SCALE, Given
from vllm.v1.interventions.makings import AttentionRule
from vllm.v1.interventions.plan import Site, dtype_of
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import Array, plain_list
from vllm.v1.interventions.vectors import pack_float32, pack_unit, unit

CAPTURE, QK, STEER = "output_residual_stream", "output_qk", "apply_steering_vectors"
KEYS = (CAPTURE, QK, STEER, "skip_reading_prefix_cache", "activations_transport")
"""Keys that are read here; vLLM-Lens's other keys are refused by name."""

_VECTOR_KEYS = {"activations", "layer_indices", "scale", "norm_match", "position_indices"}

READS = (
    *(f"vllm_xargs.{key}" for key in KEYS),
    *(f"vllm_xargs.{STEER}[].{key}" for key in sorted(_VECTOR_KEYS)),
    *(f"vllm_xargs.{STEER}[].activations.{key}" for key in sorted(WIRE_KEYS)),
)
"""The paths of all fields of a body that are read here; `[]` is each entry of a list."""


def fields_of(args: Mapping[str, Any], path: str, shape: TapShape, work: Work) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for a request's `KEYS`.

    Args:
        args: its `extra_args`.
        path: what stands before a key in errors, with a dot.
        shape: what the model offers.
        work: counts what is made of them, before it is made.

    Raises:
        ValueError: a value is wrong, or cannot be honoured exactly; the message has its path.
    """
    fields: dict[str, Any] = {}
    hooks = {}
    if layers := _layers(args.get(CAPTURE), f"{path}{CAPTURE}", shape, "all", work):
        hooks["post_block"] = layers
    every = [n for n, layer in shape.layers.items() if layer.heads] or [*shape.layers]
    if layers := _layers(args.get(QK), f"{path}{QK}", shape, every, work):
        _need_forms(layers, f"{path}{QK}", shape)
        hooks |= {"q": layers, "k": layers}
    if hooks:
        fields["capture"] = {"inline": {"hooks": hooks, "positions": "all"}}
    if (given := read_json(args.get(STEER), f"{path}{STEER}", work)) is not None:
        if not isinstance(given, list | tuple):
            reject(f"{path}{STEER}", f"must be a list of vectors, got {show(given)}")
        if ops := _Vectors(given, f"{path}{STEER}", shape, work).ops():
            fields["steering"] = ops
    if args.get("skip_reading_prefix_cache"):
        fields["skip_reading_prefix_cache"] = True
    return fields


def read_json(value: Any, path: str, work: Work) -> Any:
    """Return a value that may be given as JSON text, as it is over HTTP. What is in the text is
    counted before it is read: a list of empty lists takes 30 times its text."""
    if not isinstance(value, str):
        return value
    work.charge(sum(map(value.count, ",[{")), Unit.ENTRY, path)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        reject(path, "is not JSON")


def read_layer(value: Any, path: str, shape: TapShape) -> int:
    """Return a layer, from 0, whose output can be read and steered; raises ValueError for none."""
    layer = Given(value, path).int()
    if "post_block" not in shape.layer(layer).points:
        reject(path, f"the model has no layer {show(layer)} that can be read and steered")
    return layer


def _layers(given: Any, path: str, shape: TapShape, every: Any, work: Work) -> Any:
    """The layers that are asked for: those of a list, or `every` for what is true."""
    given = read_json(given, path, work)
    if (listed := plain_list(given)) is None:
        return every if given else []
    work.charge(len(listed), Unit.ENTRY, path)
    return [read_layer(n, f"{path}[{i}]", shape) for i, n in enumerate(listed)]


def _need_forms(layers: list[int], path: str, shape: TapShape) -> None:
    """Refuse layers whose weights are not a function of queries, keys and `_meta`; and those that
    are not alike, for their heads are one tensor."""
    none = "it has no keys of its own, or q, k and z are not all among capture_points"
    for layer in layers:
        rule, why = shape.layers[layer].rule, shape.layers[layer].unread or none
        if rule is not None:
            why = "it attends within chunks" if "chunk" in rule else ""
        if why:
            reject(path, f"attention weights of layer {layer} cannot be made: {why}")
    alike = {(heads["q"], heads["k"]) for heads in (shape.layers[layer].heads for layer in layers)}
    if len(alike) > 1:
        reject(path, "these layers have heads of different numbers or widths; ask for some of them")


class _Row(NamedTuple):
    """A row of a vector that was given, times what."""

    rows: torch.Tensor
    """[positions, hidden] of one layer."""
    number: int
    """Index of the row in `rows`."""
    scale: float

    def added(self, matched: bool) -> np.ndarray:
        """Return the vector that the row adds, float64 [hidden]; if norm-matched, in units of the
        stream's norm."""
        row = self.rows[self.number].to("cpu", torch.float64).numpy()
        return self.scale * (unit(row) if matched and row.any() else row)


class _Vectors:
    """The vectors of a request by layer: those of all positions, and those of single ones.

    vLLM-Lens takes the norm of a row before it adds any vector of its layer, so the vectors of a
    layer are one sum, and those in units of the row's norm another. Rows stay as they were given
    until their sum is made, in float64, and that is kept in float32.
    """

    def __init__(self, given: Sequence[Any], path: str, shape: TapShape, work: Work) -> None:
        self._path, self._shape, self._work = path, shape, work
        self._sums: dict[tuple[int, bool], dict[int | None, list[_Row]]] = {}
        """By layer and whether norm-matched: position, None for all -> what is added."""
        for i, each in enumerate(given):
            self._add(_mapping(each, f"{path}[{i}]"), f"{path}[{i}]")

    def _add(self, vector: Mapping[str, Any], path: str) -> None:
        need_keys(vector, path, _VECTOR_KEYS, ("activations", "layer_indices"))
        values = self._tensor(vector["activations"], f"{path}.activations")
        layers = self._listed(vector["layer_indices"], f"{path}.layer_indices", len(values))
        layers = [
            read_layer(n, f"{path}.layer_indices[{i}]", self._shape) for i, n in enumerate(layers)
        ]
        fields = Given(vector, path)
        scale = fields.get("scale", 1.0).number()
        matched = fields.get("norm_match", False).flag()
        places: list[int | None] = [None]
        where = vector.get("position_indices")
        if values.ndim == 3:
            where = range(values.shape[1]) if where is None else where
            listed = self._listed(where, f"{path}.position_indices", values.shape[1])
            of = f"{path}.position_indices"
            numbers = [Given(p, f"{of}[{i}]").int() for i, p in enumerate(listed)]
            if min(numbers) < 0 or len(set(numbers)) < len(numbers):
                reject(f"{path}.position_indices", "must be of different positions from 0 on")
            places = [*numbers]
        elif where is not None:
            reject(f"{path}.position_indices", "needs activations [layers, positions, hidden]")
        for layer, rows in zip(layers, values.unbind(), strict=True):
            sums = self._sums.setdefault((layer, matched), {})
            rows = rows.reshape(len(places), -1)
            for i, place in enumerate(places):
                sums.setdefault(place, []).append(_Row(rows, i, scale))

    def _tensor(self, value: Any, path: str) -> torch.Tensor:
        """Return `activations`, [layers, hidden] or [layers, positions, hidden], on the CPU."""

        def admit(given: Sequence[int]) -> None:
            hidden = self._shape.hidden_size
            if len(given) not in (2, 3) or given[-1] != hidden:
                allowed = f"[layers, {hidden}] or [layers, positions, {hidden}]"
                reject(path, f"has shape {list(given)}, the model needs {allowed}")
            rows = math.prod(given[:-1])
            self._work.charge(rows, Unit.ENTRY, path)
            self._work.charge(rows * 4 * hidden >> 10, Unit.KILOBYTE, path)

        if isinstance(value, Mapping):
            tensor = decoded(value, path, admit)
        elif isinstance(value, Array):
            given = Given(value, path)
            admit(given.array().shape)
            tensor = given.floats()
        else:
            reject(path, f"must be a tensor, got {show(value)}")
        if not tensor.is_floating_point() or not tensor.numel():
            reject(path, f"must have floats, has {tensor.numel()} of {tensor.dtype}")
        # In parts, as what is looked at is copied.
        if not all(torch.isfinite(part).all() for part in tensor.flatten().split(1 << 20)):
            reject(path, "is not finite")
        return tensor

    def _listed(self, value: Any, path: str, count: int) -> Sequence[Any]:
        listed = plain_list(value)
        if listed is None or len(listed) != count:
            got = show(value) if listed is None else f"{len(listed)} entries"
            reject(path, f"must be a list of {count}, as activations has rows, got {got}")
        return listed

    def ops(self) -> list[dict[str, Any]]:
        """Return the operations: of a layer first what takes the row's norm, then what adds."""
        ops = []
        for (layer, matched), rows in sorted(self._sums.items(), key=lambda item: not item[0][1]):
            base = self._sum(rows.pop(None, ()), matched)
            places = sorted(place for place in rows if place is not None)
            at = {"point": "post_block", "layers": [layer]}
            if base.any():
                elsewhere = {"positions": ["all", {"except": {"at": places}}]} if places else {}
                ops.append({**at, **elsewhere, **self._change(base, matched)})
            values = np.empty((len(places), self._shape.hidden_size), np.float32)
            groups: dict[float, list[int]] = {}
            for i, place in enumerate(places):  # of one length those that one operation can have
                row = base + self._sum(rows[place], matched)
                if row.any():
                    length = self._length(row) if matched else 1.0
                    pack = pack_unit if matched else pack_float32
                    values[i] = np.frombuffer(pack(row, self._path), np.float32)
                    groups.setdefault(length, []).append(i)
            for length, group in groups.items():
                acting = values if len(group) == len(places) else values[group]
                name = "norm_match" if matched else "add"
                where = [places[i] for i in group]
                ops.append(
                    {**at, "op": name, "values": acting, "positions": where, "scale": length}
                )
        return ops

    def _sum(self, rows: Iterable[_Row], matched: bool) -> np.ndarray:
        """Return the sum of the vectors that several rows add, float64 [hidden]."""
        return sum((row.added(matched) for row in rows), np.zeros(self._shape.hidden_size))

    def _change(self, vector: np.ndarray, matched: bool) -> dict[str, Any]:
        if matched:
            return {"op": "norm_match", "direction": vector, "scale": self._length(vector)}
        return {"op": "add", "vector": vector}

    def _length(self, vector: np.ndarray) -> float:
        """Return the norm of a sum as float32 has it; rounding alone may not exceed the limit."""
        norm = float(np.linalg.norm(vector))
        if norm > MAX_SCALE * (1 + 2**-23):
            reject(self._path, f"what a layer's rows add together must be at most {MAX_SCALE:g}")
        return min(float(np.float32(norm)), MAX_SCALE)


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    """Return a vector as a mapping; offline it may be an object that lists its fields."""
    if isinstance(value, Mapping):
        return value
    try:
        return dict(value)
    except (TypeError, ValueError):
        reject(path, f"must be a steering vector, got {show(value)}")


def wire_of(results: Mapping[str, CaptureResult] | None) -> dict[str, Any] | None:
    """`activations_of` as it travels."""
    return _sent(activations_of(results))


def _sent(made: dict[str, Any] | None) -> dict[str, Any] | None:
    return made and {
        name: encoded(value) if isinstance(value, torch.Tensor) else {"__json__": value}
        for name, value in made.items()
    }


class _Site(msgspec.Struct):
    """Fields that are read of one site of a chunk, as the server has just written it."""

    point: str
    layer: int
    dtype: str
    shape: list[int]
    data: bytes
    form: Any = None

    def rows(self) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype_of(self.dtype))
        return flat.reshape(self.shape)


class _Inline(msgspec.Struct):
    payload: list[_Site] | None = None


class _Results(msgspec.Struct):
    inline: _Inline = msgspec.field(default_factory=_Inline)


class _Choice(msgspec.Struct):
    index: int
    capture_results: _Results = msgspec.field(default_factory=_Results)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)


class StreamedRows:
    """Gathers the rows of a chat's answer from its events. Both methods take time: call them in a
    thread."""

    def __init__(self) -> None:
        self._rows: dict[Site, list[torch.Tensor]] = {}
        self._forms: dict[int, AttentionRule] = {}

    def add(self, event: str) -> None:
        """Take the rows out of an event."""
        for choice in msgspec.json.decode(event.removeprefix("data: "), type=_Chunk).choices:
            sites = choice.capture_results.inline.payload or ()
            for site in sites if not choice.index else ():
                if site.data:
                    self._rows.setdefault((site.point, site.layer), []).append(site.rows())
                if site.form is not None:
                    self._forms[site.layer] = site.form

    def event(self) -> str:
        """Return one more event, of `activations`; an empty text if there were no rows."""
        values = {site: torch.cat(self._rows.pop(site)) for site in [*self._rows]}
        made = _sent(activations(values, self._forms))
        said = msgspec.json.encode({"activations": made}).decode()
        return f"data: {said}\n\n" if made else ""
