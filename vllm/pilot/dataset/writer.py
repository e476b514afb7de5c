# SPDX-License-Identifier: Apache-2.0
"""Gathers captured examples into shards and writes them, beside the engine's steps."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm.pilot.dataset.capture_run import Captured
from vllm.pilot.dataset.shard_store import LABELS, Shard, ShardStore
from vllm.v1.capture.small_rows import FORMS, SCALE, StoreDtype

MANIFEST_BYTES = 16 << 20
"""The size of a manifest at which its shard is closed: a header may have 100 MB."""


def stored_bytes(dtype: StoreDtype | None) -> Callable[[torch.Tensor], int]:
    """Return what says how many bytes rows of a site have in a file."""
    if dtype in FORMS:
        return FORMS[dtype].num_bytes
    itemsize = 4 if dtype == "float32" else None
    return lambda rows: rows.numel() * (itemsize or rows.itemsize)


class ShardWriter:
    """Takes examples in their order; of one that was skipped, a new shard begins behind it.

    Args:
        token_text: the text of a token, for the manifest.
        dtype: what values are stored as; None for as they were captured.
        shard_bytes: a shard is closed when it has that many bytes of rows.
        shard_seconds: or when it is that old: what a kill can cost.
    """

    def __init__(
        self,
        store: ShardStore,
        token_text: Callable[[int], str],
        dtype: StoreDtype | None,
        shard_bytes: int,
        shard_seconds: float,
    ) -> None:
        self._store = store
        self._token_text = token_text
        self._dtype = dtype
        self._form = None if dtype is None else FORMS.get(dtype)
        self._shard_bytes = shard_bytes
        self._shard_seconds = shard_seconds
        self._open: list[Captured] = []
        self._lines: list[str] = []
        self._open_bytes = self._open_rows = self._manifest_bytes = 0
        self._opened = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dataset-writer")
        self._writing: Future[None] | None = None

    def add(self, captured: Captured) -> None:
        """Take an example.

        Raises:
            OSError: a shard could not be written, this one or one before it.
        """
        if self._open and captured.example.number != self._open[-1].example.number + 1:
            self.flush()
        if not self._open:
            self._opened = time.monotonic()
        line = self._line(captured)
        self._open.append(captured)
        self._lines.append(line)
        self._open_bytes += captured.num_bytes
        self._open_rows += len(captured.positions)
        self._manifest_bytes += len(line)
        if (
            self._open_bytes >= self._shard_bytes
            or self._manifest_bytes >= MANIFEST_BYTES
            or time.monotonic() - self._opened >= self._shard_seconds
        ):
            self.flush()

    def flush(self) -> None:
        """Write what there is as a shard, once the one before it is written."""
        self._wait()
        if self._open:
            self._writing = self._thread.submit(self._write, self._open, self._lines)
        self._open, self._lines = [], []
        self._open_bytes = self._open_rows = self._manifest_bytes = 0

    def close(self) -> None:
        """Write what there is, and return when it is durable."""
        try:
            self.flush()
            self._wait()
        finally:
            self._thread.shutdown()

    def _wait(self) -> None:
        # One at a time: rows come faster than a slow disk takes them, and must not pile up here.
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _line(self, captured: Captured) -> str:
        facts = {
            "example": captured.example.number,
            "id": captured.example.id,
            "label": captured.example.label,
            "first": self._open_rows,
            "rows": len(captured.positions),
            "positions": captured.positions.tolist(),
            "token_ids": captured.token_ids.tolist(),
            "tokens": [self._token_text(token) for token in captured.token_ids.tolist()],
            "prompt_tokens": captured.num_prompt_tokens,
            "text": captured.text,
            "place": captured.example.place,
            "error": captured.error,
        }
        return json.dumps(facts)

    def _write(self, examples: list[Captured], lines: list[str]) -> None:
        first, last = examples[0].example.number, examples[-1].example.number
        numbers = torch.tensor([one.example.number for one in examples], dtype=torch.int64)
        counts = torch.tensor([len(one.positions) for one in examples])
        labels = (
            numbers.repeat_interleave(counts),
            torch.cat([torch.from_numpy(one.positions) for one in examples]),
            torch.cat([torch.from_numpy(one.token_ids) for one in examples]),
        )
        tensors = dict(zip(LABELS, labels, strict=True))
        for site in next((one.values for one in examples if one.values), {}):
            rows = torch.cat([one.values[site] for one in examples if one.values])
            tensors |= self._stored(site, rows)
        if self._form is not None:
            tensors |= self._form.shared()
        self._store.write(Shard(first, last + 1), tensors, lines)

    def _stored(self, site: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._form is not None:
            codes, scales = self._form.pack(rows)
            return {site: codes, site + SCALE: scales}
        return {site: rows.float() if self._dtype == "float32" else rows}
