# SPDX-License-Identifier: Apache-2.0
"""Rows of several requests in one chunk, as a frontend takes them apart."""

from itertools import accumulate

from vllm.v1.interventions.plan import CapturedChunk


def unpack(chunks: list[CapturedChunk]) -> dict[str, list[CapturedChunk]]:
    """Request id -> its rows, of chunks that have `owners`."""
    rows: dict[str, list[CapturedChunk]] = {}
    for chunk in chunks:
        counts = [count for _, count in chunk.owners]
        values = [v.split(counts) for v in chunk.values]
        stops = accumulate(counts)
        at = [chunk.positions[b - n : b] for n, b in zip(counts, stops, strict=True)]
        for (name, _), here, *mine in zip(chunk.owners, at, *values, strict=True):
            rows.setdefault(name, []).append(CapturedChunk(here, mine, chunk.version))
    return rows
