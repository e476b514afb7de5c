# SPDX-License-Identifier: Apache-2.0
"""Reads what the filesystem consumer wrote.

    from vllm.v1.capture import reader

    captures = reader.open("/data/acts")             # or "s3://bucket/acts"
    for request in captures:
        rows = request.rows("post_block", 12)        # memory-mapped where the files are local
    captures.table("post_block", 12, -1).numpy()     # [requests, hidden]

`vllm.v1.capture.file_format` says what the files are; any safetensors library reads them, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import fsspec.core
from fsspec import AbstractFileSystem

from vllm.v1.capture.consumers.filesystem.names import completion_name, is_published, name_of
from vllm.v1.capture.file_format import (
    SHARDS,
    SUFFIX,
    CaptureFileError,
    list_folder,
)
from vllm.v1.capture.shard_index import ShardIndex
from vllm.v1.capture.stored_request import StoredRequest
from vllm.v1.capture.table import Table, read_table

__all__ = ["CaptureFileError", "Captures", "StoredRequest", "Table", "open", "read_table"]


def open(root: str, storage_options: Mapping[str, Any] | None = None) -> "Captures":
    """Open the folder that a filesystem consumer wrote to.

    Args:
        root: the consumer's `root`, a path or URL.
        storage_options: keywords of the fsspec file system.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    fs, path = fsspec.core.url_to_fs(root, **(storage_options or {}))
    captures = Captures(fs, path.rstrip("/"))
    captures.tags()
    return captures


class Captures:
    """All requests below a root, in no order that means anything. Files are opened as needed."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self._shards: dict[str, ShardIndex] = {}

    def __iter__(self) -> Iterator["StoredRequest"]:
        """Iterate over the requests of all tags.

        Raises:
            CaptureFileError: a shard is damaged; the message names it.
        """
        for tag in self.tags():
            yield from self.requests(tag)

    def tags(self) -> list[str]:
        """Return the names of all tags, sorted."""
        return [name for name, is_folder in self._list("") if is_folder]

    def requests(self, tag: str) -> Iterator["StoredRequest"]:
        """Iterate over the requests published under a tag.

        Raises:
            FileNotFoundError: there is no such tag.
            CaptureFileError: a shard is damaged; the message names it.
        """
        for name, is_folder in self._list(tag):
            path = f"{self._root}/{tag}/{name}"
            if name == SHARDS:
                continue
            if is_folder:
                yield StoredRequest(self._fs, path, "per_file", tag, name)
            elif name.endswith(SUFFIX):
                yield StoredRequest(self._fs, path, "packed", tag, name.removesuffix(SUFFIX))
        for name, (header, record) in self._index(tag):
            yield StoredRequest(self._fs, header.path, "sharded", tag, name, header, record)

    def find(
        self,
        name: str | int,
        tag: str | None = None,
        completion: tuple[int, int] | None = None,
    ) -> "StoredRequest":
        """Return one request; the time it takes does not grow with how many there are.

        Args:
            name: its published name, or the `request_id` that it was given.
            tag: where to look; None for all tags.
            completion: the numbers of prompt and sample, of a request with several.

        Raises:
            KeyError: there is none.
            ValueError: there are several, under different tags or in different layouts.
        """
        names = [str(name)] if is_published(str(name)) else []
        names += [made for made in [name_of(str(name))] if made not in names]
        if completion is not None:
            names = [completion_name(each, *completion) for each in names]
        tags = self.tags() if tag is None else [tag]
        found = [request for each in names for tag in tags for request in self._named(tag, each)]
        if not found:
            raise KeyError(f"no request {name!r} under {self._root}")
        if len(found) > 1:
            raise ValueError(f"several requests are named {name!r}: {found}")
        return found[0]

    def table(
        self, point: str, layer: int, position: int | None = None, tag: str | None = None
    ) -> Table:
        """Read rows of all requests; of some of them, `read_table` does.

        Args:
            position: one row of each request, by its position; negative counts from the last row
                that was captured. None for all rows that were captured.
            tag: of which; None for all tags.

        Raises:
            ValueError: there are no requests, or their rows differ in width or dtype.
            KeyError: a request did not capture the site or the position.
            CaptureFileError: a file is damaged.
        """
        return read_table(self if tag is None else self.requests(tag), point, layer, position)

    def incomplete(self) -> Iterator["StoredRequest"]:
        """Iterate over the requests that lack rows they asked for; each says why in `error`."""
        return (request for request in self if not request.complete)

    def _named(self, tag: str, name: str) -> Iterator["StoredRequest"]:
        """The requests of a tag that are published under a name."""
        path = f"{self._root}/{tag}/{name}"
        # Another process may have written since.
        self._fs.invalidate_cache(f"{self._root}/{tag}")
        if self._fs.isfile(path + SUFFIX):
            yield StoredRequest(self._fs, path + SUFFIX, "packed", tag, name)
        if self._fs.isdir(path):
            yield StoredRequest(self._fs, path, "per_file", tag, name)
        for header, record in self._index(tag).find(name):
            yield StoredRequest(self._fs, header.path, "sharded", tag, name, header, record)

    def _index(self, tag: str) -> ShardIndex:
        if tag not in self._shards:
            self._shards[tag] = ShardIndex(self._fs, f"{self._root}/{tag}/{SHARDS}")
        return self._shards[tag]

    def _list(self, folder: str) -> list[tuple[str, bool]]:
        """List a folder below the root, as `list_folder`."""
        return list_folder(self._fs, f"{self._root}/{folder}" if folder else self._root)
