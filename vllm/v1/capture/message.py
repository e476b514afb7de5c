# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in the message to a frontend's process: as one buffer, not one a request.

Each buffer of a message costs both processes time, whatever its size. Rows of requests that capture
the same are neighbours in the memory of their step, so they are sent as they lie there.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions import CapturedChunk


class _Part(NamedTuple):
    places: list[int]
    """The address of each stream's values."""
    chunk: CapturedChunk
    output: EngineCoreOutput


def pack(outputs: dict[int, EngineCoreOutputs] | None) -> dict[int, EngineCoreOutputs] | None:
    """Move the rows of each client's outputs to one more output, the first; `unpack` is its
    inverse."""
    for client in (outputs or {}).values():
        # Who has several chunks keeps them: they are rare, and must stay in order.
        parts = [
            _Part([values.data_ptr() for values in chunks[0].values], chunks[0], output)
            for output in client.outputs
            if (chunks := output.captured) is not None and len(chunks) == 1
        ]
        if len(parts) < 2:
            continue
        parts.sort(key=lambda part: part.places)
        packed = [chunk for run in _runs(parts) for chunk in _joined(run)]
        for part in parts:
            part.output.captured = None
        client.outputs.insert(0, EngineCoreOutput("", [], captured=packed))
    return outputs


def unpack(chunks: list[CapturedChunk]) -> dict[str, list[CapturedChunk]]:
    """Request id -> its rows."""
    rows = {}
    for chunk in chunks:
        counts = [count for _, count in chunk.owners]
        values = [v.split(counts) for v in chunk.values]
        positions = np.split(chunk.positions, np.cumsum(counts[:-1]))
        for (name, _), at, *mine in zip(chunk.owners, positions, *values, strict=True):
            rows[name] = [CapturedChunk(at, mine, chunk.version)]
    return rows


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Neighbours that differ in nothing but their number of rows."""
    runs: list[list[_Part]] = []
    version, behind, shapes = -1, [0], [torch.Size()]
    for part in parts:
        values = part.chunk.values
        like = [v.shape[1:] for v in values]
        if part.places == behind and part.chunk.version == version and like == shapes:
            runs[-1].append(part)
        else:
            runs.append([part])
            version, shapes = part.chunk.version, like
        behind = [
            place + v.nbytes if v.is_contiguous() else -1
            for place, v in zip(part.places, values, strict=True)
        ]
    return runs


def _joined(run: list[_Part]) -> list[CapturedChunk]:
    """One chunk, or those of all parts if different memory happens to be neighbours."""
    counts = [len(part.chunk.positions) for part in run]
    first, total = run[0].chunk, sum(counts)
    ends = [v.storage_offset() + total * v[:1].numel() for v in first.values]
    sizes = [v.untyped_storage().nbytes() // v.itemsize for v in first.values]
    if len(run) > 1 and any(end > size for end, size in zip(ends, sizes, strict=True)):
        return [chunk for part in run for chunk in _joined([part])]
    return [
        CapturedChunk(
            np.concatenate([part.chunk.positions for part in run]),
            [v.as_strided((total, *v.shape[1:]), v.stride()) for v in first.values],
            first.version,
            [(part.output.request_id, count) for part, count in zip(run, counts, strict=True)],
        )
    ]
