# SPDX-License-Identifier: Apache-2.0
"""Operations of a module as a file has them: entries as a request has, and their vectors apart."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm.config.operations import OPERATIONS, VECTORS
from vllm.v1.steering.modules import ModuleOp


def split_ops(ops: Sequence[ModuleOp]) -> tuple[str, dict[str, np.ndarray]]:
    """Make JSON of operations without their vectors.

    Returns:
        The JSON, and float32 [hidden] by name: `ops.{i}.direction`, `ops.{i}.probe`.
    """
    entries, tensors = [], {}
    for i, op in enumerate(ops):
        entry, vectors = _entry(op)
        entries.append(entry)
        tensors.update({f"ops.{i}.{key}": np.frombuffer(v, np.float32) for key, v in vectors})
    return json.dumps(entries), tensors


def _entry(op: ModuleOp) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """An operation as a request says it, and its vectors."""
    numbers = op.term.scalars
    points = list(dict.fromkeys(point for point, _ in op.sites))
    layers = list(dict.fromkeys(layer for _, layer in op.sites))
    # Else some layers lack a point, which only "all" passes over.
    everywhere = len(points) * len(layers) == len(op.sites)
    entry: dict[str, Any] = {"op": op.name, "point": points if everywhere else "all"}
    if len(points) == 1:
        entry["point"] = points[0]
    entry["layers"] = layers
    if op.heads:
        named = {layer: heads for (_, layer), heads in op.heads.items() if heads}
        if named:
            entry["heads"] = named
            del entry["layers"]
    operation = OPERATIONS[op.name]
    entry |= operation.written(numbers._asdict())
    vectors = [(operation.vector, op.term.vector)] if operation.vector else []
    if operation.reads:
        vectors.append((operation.reads, op.term.encoder))
    if operation.other:  # the same line
        vectors.append((operation.other, (-np.frombuffer(op.term.vector, np.float32)).tobytes()))
    if op.term.probe:
        when = "last_prompt" if op.frozen else "row"
        gate = {"threshold": numbers.threshold, "sharpness": numbers.sharpness, "when": when}
        entry["gate"] = gate
        vectors.append(("probe", op.term.probe))
    return entry, vectors


def joined_ops(text: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Put the vectors back into the entries that `split_ops` made, still to be parsed.

    Args:
        tensors: of the file; those of operations are taken out.

    Raises:
        ValueError: the text is no JSON of a list of objects.
    """
    entries = json.loads(text)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("its ops are no list of operations")
    for i, entry in enumerate(entries):
        for key in VECTORS:
            if f"ops.{i}.{key}" in tensors:
                entry[key] = tensors.pop(f"ops.{i}.{key}")
        if f"ops.{i}.probe" in tensors and isinstance(entry.get("gate"), dict):
            entry["gate"]["probe"] = tensors.pop(f"ops.{i}.probe")
    return entries
