# SPDX-License-Identifier: Apache-2.0
"""Shards hold many requests in one file, written by group commit.

Requests that end within `flush_seconds` share a shard, and while all threads are writing they keep
gathering: the slower the store, the larger its shards. A shard is its own index: the header names
each request and where its rows are, so both become durable in one step.
"""

import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.capture.consumers.filesystem.publication import (
    CollisionError,
    OnCollision,
    Publication,
)
from vllm.v1.capture.consumers.filesystem.store import Store
from vllm.v1.capture.file_format import SHARDS, SUFFIX, Pieces, encode, read_header, shard_metadata

_THREADS = 4
"""Number of threads that write: while one waits for the store to sync, or hangs, others work."""
_MAX_REQUESTS = 10_000
"""The most requests in a shard, which bounds its header."""


@dataclass(eq=False)
class ShardEntry:
    """A publication on its way into a shard, and its result."""

    publication: Publication
    future: "Future[dict[str, Any]]" = field(default_factory=Future)
    dropped: bool = False
    """True if it is to be left out. Guarded by the lock of `Shards`."""


@dataclass(eq=False)
class _Batch:
    """The entries that become one shard."""

    tag: str
    deadline: float
    entries: list[ShardEntry] = field(default_factory=list)
    num_bytes: int = 0


class _Names:
    """The names that clients chose in the shards of a tag. Guarded by the lock of `Shards`."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.read: set[str] = set()
        """The file names of the shards whose requests are in `taken`."""


class Shards:
    """Collects publications into shards; threads of its own write them."""

    def __init__(
        self,
        store: Store,
        label: str,
        max_bytes: int,
        flush_seconds: float,
        on_collision: OnCollision,
    ) -> None:
        """Start the threads that write.

        Args:
            label: what tells this engine's files from those of others, in their names.
            max_bytes: a shard is closed when it has that many bytes.
            flush_seconds: a shard is closed that many seconds after its first request.
        """
        self._store = store
        self._label = label
        self._max_bytes = max_bytes
        self._flush_seconds = flush_seconds
        self._on_collision = on_collision
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._open: dict[str, _Batch] = {}
        """The batch that takes entries, by tag."""
        self._full: deque[_Batch] = deque()
        self._names: dict[str, _Names] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._write_batches, name=f"shards-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, publication: Publication) -> ShardEntry:
        """Put a publication into its tag's shard.

        The entry's future has the payload of the result when the shard is durable.
        """
        entry = ShardEntry(publication)
        entry.future.set_running_or_notify_cancel()
        tag, size = publication.record.tag, publication.num_bytes
        with self._lock:
            batch = self._open.get(tag)
            if batch is not None and batch.num_bytes + size > self._max_bytes:
                self._full.append(self._open.pop(tag))
                batch = None
            if batch is None:
                batch = self._open[tag] = _Batch(tag, time.monotonic() + self._flush_seconds)
            batch.entries.append(entry)
            batch.num_bytes += size
            if batch.num_bytes >= self._max_bytes or len(batch.entries) >= _MAX_REQUESTS:
                self._full.append(self._open.pop(tag))
            self._changed.notify()
        return entry

    def drop(self, entry: ShardEntry) -> None:
        """Leave out an entry whose result will not be reported.

        A shard that is being written is written once more without it.
        """
        with self._lock:
            entry.dropped = True
            for batch in (*self._open.values(), *self._full):
                if entry in batch.entries:
                    batch.entries.remove(entry)

    def close(self) -> None:
        """Write what is left and end the threads."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- the threads ----------------------------------------------------------------------------

    def _write_batches(self) -> None:
        while (batch := self._next()) is not None:
            entries = batch.entries
            try:
                self._write(batch.tag, entries)
            except Exception as error:
                for entry in entries:
                    if not entry.future.done():
                        entry.future.set_exception(error)
            del batch, entries

    def _next(self) -> _Batch | None:
        with self._lock:
            while True:
                if self._full:
                    return self._full.popleft()
                now = time.monotonic()
                oldest = min(self._open.values(), key=lambda b: b.deadline, default=None)
                if oldest is not None and (self._closing or oldest.deadline <= now):
                    return self._open.pop(oldest.tag)
                if self._closing:
                    return None
                self._changed.wait(None if oldest is None else oldest.deadline - now)

    def _write(self, tag: str, entries: list[ShardEntry]) -> None:
        names = self._names_of(tag, entries)
        with self._lock:
            free, claimed = self._claim(names, entries)
        for entry in entries:
            if entry not in free:
                entry.future.set_exception(CollisionError(entry.publication.record))
        try:
            path = self._publish(tag, free)
        except BaseException:
            with self._lock:
                names.taken -= claimed
            raise
        with self._lock:
            names.read.add(path.rsplit("/", 1)[-1])
        for entry in free:
            entry.future.set_result(entry.publication.result("sharded", [path]))

    def _publish(self, tag: str, entries: list[ShardEntry]) -> str:
        """Write a shard with those entries that are still wanted, and return its path."""
        while True:
            now = time.time_ns()
            stamp = time.strftime("%Y%m%dt%H%M%S", time.gmtime(now // 10**9))
            name = f"{stamp}.{now % 10**9:09}-{self._label}-{uuid.uuid4().hex[:12]}"
            path = f"{tag}/{SHARDS}/{name}{SUFFIX}"
            with self._lock:
                wanted = [entry for entry in entries if not entry.dropped]
            if not wanted:
                return path
            self._store.put(path, _encode([e.publication for e in wanted]), replace=False)
            with self._lock:
                late = [entry for entry in wanted if entry.dropped]
            if not late:
                return path
            # The store took so long that some were given up: once more without them.
            self._store.remove(path)

    # -- names ----------------------------------------------------------------------------------

    def _names_of(self, tag: str, entries: list[ShardEntry]) -> _Names:
        """Return the names that are taken under a tag.

        Shards of other engines, and of before this one started, are read only when a client chose a
        name that must not be there yet.
        """
        with self._lock:
            names = self._names.setdefault(tag, _Names())
            known = set(names.read)
        if self._on_collision != "overwrite" and any(e.publication.named for e in entries):
            folder = f"{tag}/{SHARDS}"
            for shard in self._store.names(folder):
                if shard in known or shard.startswith(".") or not shard.endswith(SUFFIX):
                    continue
                header = read_header(self._store.fs, self._store.full(f"{folder}/{shard}"))
                with self._lock:
                    names.taken |= header.records().keys()
                    names.read.add(shard)
        return names

    def _claim(self, names: _Names, entries: list[ShardEntry]) -> tuple[list[ShardEntry], set[str]]:
        """Settle collisions of names, also within the batch.

        Returns:
            The entries to write, and the names taken for them.
        """
        free: list[ShardEntry] = []
        claimed: set[str] = set()
        for entry in entries:
            name = entry.publication.record.request_id
            taken = name in claimed or (entry.publication.named and name in names.taken)
            if self._on_collision != "overwrite" and taken:
                if self._on_collision == "error":
                    continue
                entry.publication = entry.publication.renamed()
                name = entry.publication.record.request_id
            free.append(entry)
            claimed.add(name)
        if self._on_collision == "overwrite":
            return free, set()
        claimed = {e.publication.record.request_id for e in free if e.publication.named}
        names.taken |= claimed
        return free, claimed


def _encode(publications: list[Publication]) -> list[Any]:
    # Of one name in a batch the last counts: the others are overwritten.
    publications = list({p.record.request_id: p for p in publications}.values())
    tensors: dict[str, Pieces] = {}
    for publication in publications:
        prefix = publication.record.request_id
        tensors |= {f"{prefix}/{name}": pieces for name, pieces in publication.tensors.items()}
    return encode(tensors, shard_metadata(p.record for p in publications))
