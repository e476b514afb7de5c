# SPDX-License-Identifier: Apache-2.0
"""The requests in the shards of one tag, by name."""

import time
from collections.abc import Iterator

from fsspec import AbstractFileSystem

from vllm.v1.capture.file_format import SUFFIX, Header, Record, list_folder, read_header

InShard = tuple[Header, Record]
"""The header of a shard, and the record of one request in it."""

_SETTLED_SECONDS = 2.0
"""Age of a folder's last change, in seconds, at which a later one can be told apart."""


class ShardIndex:
    """Reads each shard's header once, as a shard never changes.

    It looks for new shards where the folder has changed; in a store whose folders have no times,
    at each look.
    """

    def __init__(self, fs: AbstractFileSystem, folder: str) -> None:
        self._fs = fs
        self._folder = folder
        self._shards: dict[str, tuple[Header, dict[str, Record]]] = {}
        self._changed: float | None = None
        self._by_name: dict[str, list[InShard]] = {}

    def find(self, name: str) -> list[InShard]:
        """Return the valid requests of a name; several, where two engines published it at once.

        Raises:
            CaptureFileError: a shard is damaged; the message names it.
        """
        self._refresh()
        return self._by_name.get(name, [])

    def __iter__(self) -> Iterator[tuple[str, InShard]]:
        """Iterate over the valid requests, those of the newest shard first."""
        self._refresh()
        for name, found in self._by_name.items():
            yield from ((name, one) for one in found)

    def _refresh(self) -> None:
        try:
            changed = self._fs.info(self._folder).get("mtime")
            if changed is not None and changed == self._changed:
                return
            files = [name for name, _ in list_folder(self._fs, self._folder)]
        except FileNotFoundError:
            files, changed = [], None
        settled = changed is not None and time.time() - changed > _SETTLED_SECONDS
        self._changed = changed if settled else None
        shards = {}
        for file in files:
            if file in self._shards:
                shards[file] = self._shards[file]
            elif file.endswith(SUFFIX):
                header = read_header(self._fs, f"{self._folder}/{file}")
                shards[file] = header, header.records()
        if shards.keys() != self._shards.keys():
            self._shards = shards
            self._by_name = self._valid()

    def _valid(self) -> dict[str, list[InShard]]:
        """The requests that no newer one replaces."""
        found: dict[str, list[InShard]] = {}
        replaced: set[str] = set()
        # Their names start with the time: of a name that was overwritten the newest counts.
        for _, (header, records) in sorted(self._shards.items(), reverse=True):
            for name, record in records.items():
                if name not in replaced:
                    found.setdefault(name, []).append((header, record))
            replaced |= {name for name, record in records.items() if record.replaces}
        return found
