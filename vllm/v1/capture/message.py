# SPDX-License-Identifier: Apache-2.0
"""The rows of a step in the message to a frontend's process: as one buffer, not one a request.

Each buffer of a message costs both processes time, whatever its size. Rows of requests that capture
the same are neighbours in the memory of their step, so they are sent as they lie there.
"""

from typing import NamedTuple

import numpy as np

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.interventions import CapturedChunk


class _Part(NamedTuple):
    place: tuple[int, ...]
    """Of each stream's values: the address of their memory, where in it they start."""
    end: tuple[int, ...]
    """The place right behind."""
    output: EngineCoreOutput
    chunk: CapturedChunk


def pack(outputs: dict[int, EngineCoreOutputs] | None) -> dict[int, EngineCoreOutputs] | None:
    """Move the rows of each client's outputs to one more output, the first; `unpack` is its
    inverse."""
    for client in (outputs or {}).values():
        # Who has several chunks keeps them: they are rare, and must stay in order.
        single = [o for o in client.outputs if o.captured is not None and len(o.captured) == 1]
        if len(single) < 2:
            continue
        runs = _runs(sorted(map(_part, single), key=lambda part: part.place))
        for run in runs:
            for part in run:
                part.output.captured = None
        packed = EngineCoreOutput("", [], captured=[_joined(run) for run in runs])
        client.outputs.insert(0, packed)
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


def _part(output: EngineCoreOutput) -> _Part:
    assert output.captured is not None
    [chunk] = output.captured
    start: list[int] = []
    end: list[int] = []
    for values in chunk.values:
        memory = values.untyped_storage().data_ptr()
        first = int(values.storage_offset())
        start += [memory, first]
        end += [memory, first + values.numel() if values.is_contiguous() else -1]
    return _Part(tuple(start), tuple(end), output, chunk)


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Neighbours that differ in nothing but their number of rows."""
    runs: list[list[_Part]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last is not None and last.end == part.place and _like(last.chunk, part.chunk):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _like(one: CapturedChunk, other: CapturedChunk) -> bool:
    return one.version == other.version and all(
        a.shape[1:] == b.shape[1:] for a, b in zip(one.values, other.values, strict=True)
    )


def _joined(run: list[_Part]) -> CapturedChunk:
    counts = [len(part.chunk.positions) for part in run]
    total = sum(counts)
    return CapturedChunk(
        np.concatenate([part.chunk.positions for part in run]),
        [v.as_strided((total, *v.shape[1:]), v.stride()) for v in run[0].chunk.values],
        run[0].chunk.version,
        [(part.output.request_id, count) for part, count in zip(run, counts, strict=True)],
    )
