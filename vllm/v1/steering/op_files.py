# SPDX-License-Identifier: Apache-2.0
"""Operations of a module as a file has them: entries as a request has, and their vectors apart."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm.config.operations import OPERATIONS, VECTORS, Operation
from vllm.v1.interventions.low_rank import low_rank_of
from vllm.v1.interventions.terms import Term
from vllm.v1.steering.modules import ModuleOp


def split_ops(ops: Sequence[ModuleOp]) -> tuple[str, dict[str, np.ndarray]]:
    """Make JSON of operations without their vectors.

    Returns:
        The JSON, and float32 [hidden] by name: `ops.{i}.direction`, `ops.{i}.probe`; of operations
        of matrices these.
    """
    entries, tensors = [], {}
    for i, op in enumerate(ops):
        entry, vectors = _entry(op)
        entries.append(entry)
        tensors.update({f"ops.{i}.{key}": vector for key, vector in vectors.items()})
    return json.dumps(entries), tensors


def _entry(op: ModuleOp) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An operation as a request says it, and its vectors."""
    term = op.terms[0]
    numbers = term.scalars
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
    vectors = _matrices(operation, op.terms) if operation.ranked else _vectors(operation, term)
    if term.probe:
        when = "last_prompt" if op.frozen else "row"
        gate = {"threshold": numbers.threshold, "sharpness": numbers.sharpness, "when": when}
        flags = {"cosine": numbers.cosine, "latch": numbers.latched}
        entry["gate"] = gate | {key: True for key, number in flags.items() if number}
        vectors["probe"] = np.frombuffer(term.probe, np.float32)
    return entry, vectors


def _vectors(operation: Operation, term: Term) -> dict[str, np.ndarray]:
    vector = np.frombuffer(term.vector, np.float32)
    encoder = np.frombuffer(term.encoder, np.float32)
    # The other of two directions: the same line.
    named = {operation.vector: vector, operation.reads: encoder, operation.other: -vector}
    return {key: values for key, values in named.items() if key}


def _matrices(operation: Operation, terms: Sequence[Term]) -> dict[str, np.ndarray]:
    made = low_rank_of(terms)
    named = {operation.vector: made.B, operation.reads: made.A}
    return named | ({operation.shift: made.c} if made.c.any() else {})


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
