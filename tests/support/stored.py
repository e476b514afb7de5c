# SPDX-License-Identifier: Apache-2.0
"""Sessions of the filesystem consumer without an engine, on rows made up here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.consumer import (
    CaptureSession,
    ConsumerContext,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.results import CapturedRows
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import LayerShape, TapShape

SITES: tuple[Site, ...] = (("pre_attn", 0), ("post_block", 0), ("post_block", 12))
WIDTH = 8
SHAPE = TapShape(
    WIDTH, "bfloat16", {0: LayerShape(("pre_attn", "post_block")), 12: LayerShape(("post_block",))}
)
LAYOUTS = ("per_file", "packed", "sharded")


def context(engine_index: int = 0) -> ConsumerContext:
    return ConsumerContext("filesystem", "some/model", SHAPE, engine_index)


def request(
    engine_id: str = "engine-id",
    sites: tuple[Site, ...] = SITES,
    dtype: torch.dtype = torch.bfloat16,
    sample: int = 0,
    num_samples: int = 1,
    external_id: str = "external",
    width: int = WIDTH,
    **fields: Any,
) -> RequestInfo:
    return RequestInfo(
        request_id=engine_id,
        external_id=external_id,
        sample=sample,
        num_samples=num_samples,
        prompt_token_ids=[1, 2, 3],
        sites=sites,
        width=width,
        dtype=dtype,
        projected=dtype == torch.float32,
        max_rows=100,
        fields=FilesystemConsumer.check_request(fields, "capture.filesystem"),
    )


def batch(info: RequestInfo, positions: list[int], seed: int = 0) -> RowBatch:
    """Random bits, so that every value of a dtype comes up: -0.0, denormals, infinities and NaN."""
    at = np.array(positions, np.int64)
    shape = (len(info.sites), len(positions), info.width, info.dtype.itemsize)
    bits = np.random.default_rng([seed, *positions]).integers(0, 256, shape, np.uint8)
    values = torch.from_numpy(bits).view(info.dtype).squeeze(-1)
    return RowBatch(at, at * 7 + 1, at * 0 + 3, values)


def whole(batches: list[RowBatch], site: int) -> CapturedRows:
    """The rows of one site."""
    return CapturedRows(
        np.concatenate([b.positions for b in batches]),
        np.concatenate([b.token_ids for b in batches]),
        torch.cat([b.values[site] for b in batches]),
        np.concatenate([b.versions for b in batches]),
    )


def same(one: CapturedRows, other: CapturedRows) -> bool:
    """Bit by bit."""
    return (
        one.positions.tolist() == other.positions.tolist()
        and one.token_ids.tolist() == other.token_ids.tolist()
        and one.versions.tolist() == other.versions.tolist()
        and one.values.dtype == other.values.dtype
        and one.values.shape == other.values.shape
        and bool((one.values.view(torch.uint8) == other.values.view(torch.uint8)).all())
    )


@contextmanager
def started(root: str, **options: Any) -> Iterator[FilesystemConsumer]:
    consumer = FilesystemConsumer(root=root, **({"flush_seconds": 0.01} | options))
    consumer.start(context())
    try:
        yield consumer
    finally:
        consumer.shutdown()


def finish(session: CaptureSession, error: str | None = None, aborted: bool = False) -> Any:
    """The payload."""
    end = RequestEnd(num_tokens=9, error=error)
    payload = session.aborted(end) if aborted else session.done(end)
    return payload.result(30) if isinstance(payload, Future) else payload


def publish(
    consumer: FilesystemConsumer,
    info: RequestInfo,
    steps: tuple[tuple[int, ...], ...] = ((0, 1), (2,)),
    error: str | None = None,
    aborted: bool = False,
    seed: int = 0,
) -> tuple[Any, list[RowBatch]]:
    """The payload, and the rows it was made of."""
    session = consumer.open(info)
    batches = [batch(info, list(positions), seed) for positions in steps]
    for each in batches:
        session.rows(each)
    return finish(session, error, aborted), batches
