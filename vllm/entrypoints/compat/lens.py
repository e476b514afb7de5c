# SPDX-License-Identifier: Apache-2.0
"""The requests and answers of vLLM-Lens, with `--compat lens` (docs/coming-from.md#vllm-lens).

A request of its is made one of ours exactly, or refused.
"""

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.entrypoints.compat.wire import MAX_BYTES, decoded, encoded, need_int, need_keys
from vllm.v1.capture.results import CapturedRows, CaptureResult
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.plan import TapShape, dtype_of
from vllm.v1.interventions.values import plain, plain_list
from vllm.v1.interventions.vectors import need_number

CAPTURE, STEER = "output_residual_stream", "apply_steering_vectors"
KEYS = (CAPTURE, STEER, "skip_reading_prefix_cache", "activations_transport")
"""What is read here; vLLM-Lens's other keys are refused by name."""

MAX_ROWS = 1 << 16
"""Most rows of all vectors of a request, layers times positions."""

_VECTOR_KEYS = {"activations", "layer_indices", "scale", "norm_match", "position_indices"}


def fields_of(args: Mapping[str, Any], path: str, shape: TapShape) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for a request's `KEYS`.

    Args:
        args: its `extra_args`.
        path: what stands before a key in errors, with a dot.
        shape: what the model offers.

    Raises:
        ValueError: a value is wrong, or cannot be honoured exactly; the message has its path.
    """
    fields: dict[str, Any] = {}
    layers = _json(args.get(CAPTURE), f"{path}{CAPTURE}")
    if (listed := plain_list(layers)) is not None:
        if listed:
            layers = [_layer(n, f"{path}{CAPTURE}[{i}]", shape) for i, n in enumerate(listed)]
            fields["capture"] = _capture(layers)
    elif layers:
        fields["capture"] = _capture("all")
    if (given := _json(args.get(STEER), f"{path}{STEER}")) is not None:
        if not isinstance(given, list | tuple):
            reject(f"{path}{STEER}", f"must be a list of vectors, got {show(given)}")
        if ops := _Vectors(given, f"{path}{STEER}", shape).ops():
            fields["steering"] = ops
    if args.get("skip_reading_prefix_cache"):
        fields["skip_reading_prefix_cache"] = True
    return fields


def _capture(layers: Any) -> dict[str, Any]:
    return {"inline": {"hooks": {"post_block": layers}, "positions": "all"}}


def _json(value: Any, path: str) -> Any:
    """Return a value that may be given as JSON text, as it is over HTTP."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        reject(path, "is not JSON")


def _layer(value: Any, path: str, shape: TapShape) -> int:
    layer = need_int(value, path)
    if "post_block" not in shape.points.get(layer, ()):
        reject(path, f"the model has no layer {show(layer)} that can be read and steered")
    return layer


class _Vectors:
    """The vectors of a request by layer: those of all positions, and those of single ones.

    vLLM-Lens takes the norm of a row before it adds any vector of its layer, so the vectors of a
    layer are one sum, and those in units of the row's norm another.
    """

    def __init__(self, given: Sequence[Any], path: str, shape: TapShape) -> None:
        self._shape = shape
        self._left, self._rows_left = MAX_BYTES, MAX_ROWS
        self._sums: dict[tuple[int, bool], dict[int | None, np.ndarray]] = {}
        """By layer and whether norm-matched: position, None for all -> float64 [hidden]."""
        for i, each in enumerate(given):
            self._add(_mapping(each, f"{path}[{i}]"), f"{path}[{i}]")

    def _add(self, vector: Mapping[str, Any], path: str) -> None:
        need_keys(vector, path, _VECTOR_KEYS, ("activations", "layer_indices"))
        values = self._tensor(vector["activations"], f"{path}.activations")
        layers = self._listed(vector["layer_indices"], f"{path}.layer_indices", len(values))
        layers = [
            _layer(n, f"{path}.layer_indices[{i}]", self._shape) for i, n in enumerate(layers)
        ]
        scale = need_number(vector.get("scale", 1.0), f"{path}.scale")
        matched = plain(vector.get("norm_match", False))
        if not isinstance(matched, bool):
            reject(f"{path}.norm_match", f"must be true or false, got {show(matched)}")
        places: list[int | None] = [None]
        where = vector.get("position_indices")
        if values.ndim == 3:
            where = range(values.shape[1]) if where is None else where
            listed = self._listed(where, f"{path}.position_indices", values.shape[1])
            numbers = [need_int(p, f"{path}.position_indices[{i}]") for i, p in enumerate(listed)]
            if min(numbers) < 0 or len(set(numbers)) < len(numbers):
                reject(f"{path}.position_indices", "must be of different positions from 0 on")
            places = [*numbers]
        elif where is not None:
            reject(f"{path}.position_indices", "needs activations [layers, positions, hidden]")
        for layer, rows in zip(layers, values.unbind(), strict=True):
            sums = self._sums.setdefault((layer, matched), {})
            for place, row in zip(places, rows.reshape(len(places), -1).unbind(), strict=True):
                added = row.to("cpu", torch.float64).numpy() * scale
                if matched and added.any():
                    added = added * (abs(scale) / np.linalg.norm(added))
                sums[place] = sums[place] + added if place in sums else added

    def _tensor(self, value: Any, path: str) -> torch.Tensor:
        """Return `activations`, [layers, hidden] or [layers, positions, hidden], on the CPU."""
        if isinstance(value, Mapping):
            tensor = decoded(value, path, self._left)
        elif isinstance(value, torch.Tensor | np.ndarray):
            tensor = torch.as_tensor(value)
        else:
            reject(path, f"must be a tensor, got {show(value)}")
        if tensor.ndim not in (2, 3) or tensor.shape[-1] != self._shape.hidden_size:
            hidden = self._shape.hidden_size
            allowed = f"[layers, {hidden}] or [layers, positions, {hidden}]"
            reject(path, f"has shape {list(tensor.shape)}, the model needs {allowed}")
        if not tensor.is_floating_point() or not tensor.numel():
            reject(path, f"must have floats, has {tensor.numel()} of {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            reject(path, "is not finite")
        self._left -= tensor.numel() * tensor.itemsize
        self._rows_left -= tensor.shape[:-1].numel()
        if self._left < 0 or self._rows_left < 0:
            reject(path, f"takes a request past {MAX_BYTES} bytes or {MAX_ROWS} rows of vectors")
        return tensor.detach()

    def _listed(self, value: Any, path: str, count: int) -> Sequence[Any]:
        listed = plain_list(value)
        if listed is None or len(listed) != count:
            got = show(value) if listed is None else f"{len(listed)} entries"
            reject(path, f"must be a list of {count}, as activations has rows, got {got}")
        return listed

    def ops(self) -> list[dict[str, Any]]:
        """Return the operations: of a layer first what takes the row's norm, then what adds."""
        ops = []
        for (layer, matched), sums in sorted(self._sums.items(), key=lambda item: not item[0][1]):
            base = sums.pop(None, np.zeros(self._shape.hidden_size))
            places = sorted(place for place in sums if place is not None)
            rows = [(place, base + sums[place]) for place in places]
            acting = [(place, row) for place, row in rows if row.any()]
            at = {"point": "post_block", "layers": [layer]}
            if base.any():
                elsewhere = {"positions": ["all", {"except": {"at": places}}]} if places else {}
                ops.append({**at, **elsewhere, **_change(base, matched)})
            groups: dict[float, list[tuple[int, np.ndarray]]] = {}
            for place, row in acting:  # of one length those that one operation can have
                length = float(np.float32(np.linalg.norm(row))) if matched else 1.0
                groups.setdefault(length, []).append((place, row))
            for length, group in groups.items():
                values = np.stack([row for _, row in group])
                name = "norm_match" if matched else "add"
                where = [place for place, _ in group]
                ops.append(
                    {**at, "op": name, "values": values, "positions": where, "scale": length}
                )
        return ops


def _change(vector: np.ndarray, matched: bool) -> dict[str, Any]:
    if matched:
        return {"op": "norm_match", "direction": vector, "scale": float(np.linalg.norm(vector))}
    return {"op": "add", "vector": vector}


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    """Return a vector as a mapping; offline it may be an object that lists its fields."""
    if isinstance(value, Mapping):
        return value
    try:
        return dict(value)
    except (TypeError, ValueError):
        reject(path, f"must be a steering vector, got {show(value)}")


def activations_of(results: Mapping[str, CaptureResult] | None) -> dict[str, torch.Tensor] | None:
    """Return `{"residual_stream": [layers, n, hidden]}`, layers ascending, of a completion.

    None where its inline result has no rows of the stream after blocks.
    """
    payload = results["inline"].payload if results and "inline" in results else None
    rows = payload if isinstance(payload, Mapping) else {}
    layers = sorted(
        layer
        for (point, layer), site in rows.items()
        if point == "post_block" and isinstance(site, CapturedRows)
    )
    if not layers:
        return None
    return {"residual_stream": torch.stack([rows["post_block", n].values for n in layers])}


def wire_of(results: Mapping[str, CaptureResult] | None) -> dict[str, Any] | None:
    """`activations_of` as it travels."""
    found = activations_of(results)
    return found and {name: encoded(tensor) for name, tensor in found.items()}


async def with_activations(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """Pass a stream of chat chunks on, with one more event of `activations` before its end."""
    rows: dict[int, list[torch.Tensor]] = {}
    async for event in stream:
        if event.startswith("data: [DONE]") and rows:
            layers = torch.stack([torch.cat(rows[layer]) for layer in sorted(rows)])
            answer = {"activations": {"residual_stream": encoded(layers)}}
            yield f"data: {json.dumps(answer)}\n\n"
        elif event.startswith("data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                shown = choice.get("capture_results", {}).get("inline", {})
                for site in shown.get("payload") or () if not choice["index"] else ():
                    rows.setdefault(site["layer"], []).append(_shown(site))
        yield event


def _shown(site: Mapping[str, Any]) -> torch.Tensor:
    """Return the rows of one site of a chunk, as the server has just written them."""
    raw = torch.frombuffer(bytearray(base64.b64decode(site["data"])), dtype=torch.uint8)
    return raw.view(dtype_of(site["dtype"])).reshape(site["shape"])
