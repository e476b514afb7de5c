# SPDX-License-Identifier: Apache-2.0
"""Captures data sets that are too large for one machine, on a Ray cluster.

Ray Data hands blocks of examples to workers with an engine each. When a worker is lost, its block
goes to another, which runs what no shard has yet.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vllm import LLM
from vllm.pilot.dataset.activations import Activations
from vllm.pilot.dataset.capture_run import CaptureRun
from vllm.pilot.dataset.capturing import SHARD_BYTES, SHARD_SECONDS, plan_of, token_text
from vllm.pilot.dataset.examples import DataFile, Example
from vllm.pilot.dataset.shard_store import Shard, ShardStore
from vllm.pilot.dataset.writer import ShardWriter
from vllm.pilot.records import DatasetError


def capture_on_ray(
    engine: Mapping[str, Any],
    data: DataFile,
    out: str | os.PathLike[str],
    hooks: Mapping[str, Any],
    positions: Any = "last_prompt",
    *,
    workers: int,
    resources: Mapping[str, Any] | None = None,
    block_examples: int = 1024,
    more: Mapping[str, Any] | None = None,
    max_tokens: int = 1,
    skip_refused: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Activations:
    """Capture all examples that are not in `out` yet, on the cluster that `ray.init` joined.

    Args:
        engine: the keywords of each worker's `LLM`, with `model`. `inline` is added.
        data: on a path that all workers see.
        out: a URL of an object store, or a folder that all workers see.
        workers: how many engines.
        resources: what Ray gives each, `{"num_gpus": 1}`.
        block_examples: how many examples are one task, and at least one shard.

    Others are those of `dataset.capture`.

    Raises:
        ImportError: Ray Data is not installed.
        DatasetError: as of `dataset.capture`.
    """
    import ray
    import ray.data

    out = os.fspath(out)
    store = ShardStore(out, storage_options)
    contents = data.contents(sample=1)
    asked = {"hooks": hooks, "positions": positions, **(more or {})}
    plan = plan_of(dict(engine), asked, max_tokens, None, skip_refused, data, contents)
    with store.locked():
        store.check(plan)
        store.begin(plan)
        blocks = [
            {"start": start, "stop": min(start + block_examples, left.stop)}
            for left in store.missing(contents.num_examples)
            for start in range(left.start, left.stop, block_examples)
        ]
        if blocks:
            given = {
                "engine": dict(engine),
                "data": data,
                "out": out,
                "storage_options": storage_options,
                "asked": asked,
                "max_tokens": max_tokens,
                "skip_refused": skip_refused,
            }
            done = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(
                _Worker,
                fn_constructor_kwargs=given,
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=workers),
                # A worker that is lost is started again, and so is what it was doing.
                max_restarts=-1,
                max_task_retries=-1,
                **(resources or {}),
            )
            for _ in done.iter_batches(batch_size=None):
                pass
        if missing := store.missing(contents.num_examples):
            raise DatasetError(
                f"{out}: Ray ended, and {len(missing)} blocks of examples are missing"
            )
        store.write_manifest()
    return Activations(out, storage_options)


class _Worker:
    """One engine, and what it runs."""

    def __init__(
        self,
        engine: dict[str, Any],
        data: DataFile,
        out: str,
        storage_options: Mapping[str, Any] | None,
        asked: Mapping[str, Any],
        max_tokens: int,
        skip_refused: bool,
    ) -> None:
        self._llm = LLM(**{"capture_consumers": ["inline"], **engine})
        self._run = CaptureRun(self._llm, asked, max_tokens, skip_refused, 2 * SHARD_BYTES)
        self._store = ShardStore(out, storage_options)
        self._data = data
        self._examples: Iterator[Example] = iter(())
        self._at: int | None = None

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for start, stop in zip(batch["start"].tolist(), batch["stop"].tolist(), strict=True):
            # Of a block whose worker was lost, some may be there.
            left = self._store.missing(stop)
            block = (Shard(max(one.start, start), one.stop) for one in left if one.stop > start)
            for part in block:
                writer = ShardWriter(
                    self._store, token_text(self._llm), None, SHARD_BYTES, SHARD_SECONDS
                )
                try:
                    for captured in self._run(self._part(part.start, part.stop)):
                        writer.add(captured)
                finally:
                    writer.close()
        return batch

    def _part(self, start: int, stop: int) -> list[Example]:
        # They come in order as a rule: then the data is read once.
        if self._at is None or start < self._at:
            self._examples, self._at = iter(self._data), 0
        block = list(itertools.islice(self._examples, start - self._at, stop - self._at))
        self._at = stop
        return block
