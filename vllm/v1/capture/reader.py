# SPDX-License-Identifier: Apache-2.0
"""Reads what the filesystem consumer wrote.

    from vllm.v1.capture import reader

    for request in reader.open("/data/acts"):        # or "s3://bucket/acts"
        rows = request.rows("post_block", 12)        # memory-mapped where the files are local

`vllm.v1.capture.file_format` says what the files are; any safetensors library reads them, too.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import fsspec.core
import numpy as np
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from vllm.v1.capture.file_format import (
    LABELS,
    SHARDS,
    SUFFIX,
    CaptureFileError,
    FileLayout,
    Header,
    Record,
    read_header,
    site_of,
    tensor_name,
)
from vllm.v1.capture.results import CapturedRows
from vllm.v1.interventions.plan import Site, dtype_of

__all__ = ["CaptureFileError", "Captures", "StoredRequest", "open"]


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
        yield from self._shard_requests(tag)

    def find(self, name: str, tag: str | None = None) -> "StoredRequest":
        """Return the request published under `name`.

        Args:
            tag: where to look; None for all tags.

        Raises:
            KeyError: there is none.
            ValueError: there are several, under different tags or in different layouts.
        """
        tags = self.tags() if tag is None else [tag]
        found = [r for tag in tags for r in self.requests(tag) if r.name == name]
        if not found:
            raise KeyError(f"no request {name!r} under {self._root}")
        if len(found) > 1:
            raise ValueError(f"several requests are named {name!r}: {found}")
        return found[0]

    def incomplete(self) -> Iterator["StoredRequest"]:
        """Iterate over the requests that lack rows they asked for; each says why in `error`."""
        return (request for request in self if not request.complete)

    def _shard_requests(self, tag: str) -> Iterator["StoredRequest"]:
        folder = f"{tag}/{SHARDS}"
        try:
            files = [name for name, is_folder in self._list(folder) if not is_folder]
        except FileNotFoundError:
            return
        replaced: set[str] = set()
        # Their names start with the time: of a name that was overwritten the newest counts.
        for file in sorted(files, reverse=True):
            if not file.endswith(SUFFIX):
                continue
            path = f"{self._root}/{folder}/{file}"
            header = read_header(self._fs, path)
            records = header.records()
            for name, record in records.items():
                if name not in replaced:
                    yield StoredRequest(self._fs, path, "sharded", tag, name, header, record)
            replaced |= {name for name, record in records.items() if record.replaces}

    def _list(self, folder: str) -> list[tuple[str, bool]]:
        """List a folder below the root, as the function `_list`."""
        path = f"{self._root}/{folder}" if folder else self._root
        return _list(self._fs, path)


class StoredRequest:
    """One published completion.

    `path`, `layout`, `tag` and `name` are there without reading. All other attributes read the
    file's header, and raise `CaptureFileError` if that is damaged.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        layout: FileLayout,
        tag: str,
        name: str,
        header: Header | None = None,
        record: Record | None = None,
    ) -> None:
        """Note where the request is stored; nothing is read.

        Args:
            path: the file, or with per_file the folder.
            header, record: the header of a shard, and the record of the request in it.
        """
        self._fs = fs
        self._in_shard = None if header is None or record is None else (header, record)
        self._headers = {path: header} if header is not None else {}
        self.path = path
        self.layout = layout
        self.tag = tag
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.layout} {self.tag}/{self.name}>"

    @property
    def external_id(self) -> str:
        """The id the caller of the engine gave the request."""
        return self.record.external_id

    @property
    def sample(self) -> int:
        """The number of the completion among those of its prompt, from 0."""
        return self.record.sample

    @property
    def model(self) -> str:
        """The name or path of the model."""
        return self.record.model

    @property
    def num_rows(self) -> int:
        """How many rows each site has."""
        return self.record.rows

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the rows as (point, layer), in layer order."""
        return self.record.sites

    @property
    def complete(self) -> bool:
        """Whether all rows are there that the request asked for."""
        return not self.error

    @property
    def error(self) -> str | None:
        """The reason why rows are missing; None if the request is complete."""
        if self.layout == "per_file":
            lacking = [tensor_name(site) for site in self.sites if site not in self._files]
            if lacking:
                return f"{self.path}: the file of {lacking[0]} is missing"
            publications = {
                self._header(path).record().publication for path in self._files.values()
            }
            if len(publications) > 1:
                return f"{self.path}: its files are of {len(publications)} requests"
        if not self.record.complete:
            return self.record.error or "it is not complete"
        return None

    @cached_property
    def record(self) -> Record:
        """The facts about the request beside its rows."""
        if self._in_shard is not None:
            return self._in_shard[1]
        path = self.path if self.layout == "packed" else next(iter(self._files.values()))
        return self._header(path).record()

    def rows(self, point: str, layer: int) -> CapturedRows:
        """Return the rows of one site, memory-mapped where the file is local.

        Raises:
            KeyError: the request did not capture that site.
            CaptureFileError: naming the file: it is missing, or shapes, dtypes or positions are not
                what they must be.
        """
        site = (point, layer)
        if site not in self.sites:
            known = ", ".join(map(tensor_name, self.sites))
            raise KeyError(f"{self!r} has no {tensor_name(site)}, it has {known}")
        if site not in self._files:
            raise CaptureFileError(f"{self.path}: the file of {tensor_name(site)} is missing")
        header, record = self._header(self._files[site]), self.record
        if self.layout == "per_file" and header.record() != record:
            raise CaptureFileError(f"{header.path}: is of another request than its neighbours")
        values = self._tensor(
            header, tensor_name(site), dtype_of(record.dtype), (record.rows, record.width)
        )
        positions, token_ids, versions = (
            self._tensor(header, name, torch.int64, (record.rows,)).numpy() for name in LABELS
        )
        if (positions[:1] < 0).any() or (np.diff(positions) <= 0).any():
            raise CaptureFileError(f"{header.path}: positions of {self.name} are not sorted")
        return CapturedRows(positions, token_ids, values, versions)

    # -- files ----------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> dict[Site, str]:
        """The path of each site's file, of those that are there."""
        if self.layout != "per_file":
            return dict.fromkeys(self.sites, self.path)
        files = {}
        for name, _ in _list(self._fs, self.path):
            with contextlib.suppress(ValueError):
                files[site_of(name.removesuffix(SUFFIX))] = f"{self.path}/{name}"
        if not files:
            raise CaptureFileError(f"{self.path}: has no file of captured rows")
        return files

    def _header(self, path: str) -> Header:
        if path not in self._headers:
            self._headers[path] = read_header(self._fs, path)
        return self._headers[path]

    def _tensor(
        self, header: Header, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return one tensor of the request, once its dtype and shape are checked."""
        key = f"{self.name}/{name}" if self.layout == "sharded" else name
        entry = header.tensors.get(key)
        if entry is None:
            raise CaptureFileError(f"{header.path}: has no tensor {key}")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CaptureFileError(
                f"{header.path}: {key} is {entry.dtype}{list(entry.shape)}, its request has "
                f"{dtype}{list(shape)}"
            )
        if not entry.stop - entry.start:
            return torch.empty(shape, dtype=dtype)
        if isinstance(self._fs, LocalFileSystem):
            # Private pages: what is written to them stays in this process.
            data = np.memmap(
                header.path, np.uint8, "c", entry.start, (entry.stop - entry.start,)
            ).view(np.ndarray)
            flat = torch.from_numpy(data)
        else:
            content = self._fs.cat_file(header.path, start=entry.start, end=entry.stop)
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)


def _list(fs: AbstractFileSystem, path: str) -> list[tuple[str, bool]]:
    """List a folder as (name, whether it is a folder), sorted, without temporary names."""
    # Another process may have written since.
    fs.invalidate_cache(path)
    found = [
        (str(item["name"]).rsplit("/", 1)[-1], item["type"] == "directory")
        for item in fs.ls(path, detail=True)
    ]
    return sorted(item for item in found if not item[0].startswith("."))
