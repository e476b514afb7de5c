# SPDX-License-Identifier: Apache-2.0
"""The files that activations of a data set are written to.

    dataset.json                     what was asked for, of which data
    000000000-000002048.safetensors  activations of these examples, one tensor for each site
    manifest.jsonl                   a line for each example, once all are there

A shard's name says whose activations it has, its header holds their manifest, and it appears whole
or not at all. So the shards alone say what is done, and nothing can be there twice or in part.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm.pilot.records import DatasetError
from vllm.v1.capture.consumers.filesystem.store import LocalStore, open_store
from vllm.v1.capture.file_format import SUFFIX, Header, encode, read_header

PLAN = "dataset.json"
MANIFEST = "manifest.jsonl"
FORMAT = "vllm-pilot-dataset-1"
LABELS = ("example", "position", "token_id")
"""The int64 tensors beside the sites': the example's number, and which token the row has read."""

_SHARD = re.compile(r"(\d{9,})-(\d{9,})" + re.escape(SUFFIX))


@dataclass(frozen=True, order=True)
class Shard:
    """The examples from `start` to `stop`, exclusive."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.start:09d}-{self.stop:09d}{SUFFIX}"


class ShardStore:
    """A folder or object store with the activations of one data set.

    Args:
        root: a path, or a URL that fsspec knows.
        storage_options: keywords of the fsspec file system.

    Raises:
        DatasetError: there is no such store.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        try:
            self._store = open_store(root, storage_options or {})
        except ValueError as error:
            raise DatasetError(str(error)) from error
        self.fs = self._store.fs

    @property
    def local(self) -> Path | None:
        """The folder, if it is one of this machine."""
        return Path(self._store.root) if isinstance(self._store, LocalStore) else None

    def full(self, name: str) -> str:
        """Return the path of a file as `fs` takes it."""
        return self._store.full(name)

    def free_bytes(self) -> int | None:
        """Return how many bytes the disk has left; None of an object store."""
        if (folder := self.local) is None:
            return None
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    # -- reading --------------------------------------------------------------------------------

    def plan(self) -> dict[str, Any] | None:
        """Return what dataset.json says; None if there is none.

        Raises:
            DatasetError: it is damaged.
        """
        try:
            text = self.fs.cat_file(self.full(PLAN))
        except FileNotFoundError:
            return None
        try:
            plan: dict[str, Any] = json.loads(text)
            if plan["format"] != FORMAT:
                raise ValueError(f"format {plan['format']!r}, {FORMAT!r} is read")
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{self.root}/{PLAN}: is damaged: {error!r}") from error
        return plan

    def shards(self) -> list[Shard]:
        """Return the shards that are there, in the order of their examples.

        Raises:
            DatasetError: two of them have the same examples.
        """
        found = sorted(
            Shard(int(match[1]), int(match[2]))
            for name in self._store.names("")
            if (match := _SHARD.fullmatch(name))
        )
        for one, other in itertools.pairwise(found):
            if other.start < one.stop:
                raise DatasetError(
                    f"{self.root}: {one.name} and {other.name} have the same examples, as of two "
                    "runs at once; remove one of them"
                )
        return found

    def header(self, shard: Shard) -> Header:
        """Read the header of a shard.

        Raises:
            CaptureFileError: the file is damaged; the message names it.
        """
        return read_header(self.fs, self.full(shard.name))

    def missing(self, num_examples: int) -> list[Shard]:
        """Return the ranges of examples that no shard has."""
        left, at = [], 0
        for shard in self.shards():
            if shard.start > at:
                left.append(Shard(at, shard.start))
            at = shard.stop
        return left + [Shard(at, num_examples)] * (at < num_examples)

    # -- writing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs of this machine away from it meanwhile.

        What a killed run left half written is removed. An object store has no such lock.

        Raises:
            DatasetError: another run is writing to it, or it cannot be written.
        """
        try:
            self._store.prepare()
        except OSError as error:
            raise DatasetError(f"{self.root}: cannot be written: {error}") from error
        folder = self.local
        if folder is None:
            yield
            return
        with open(folder / ".lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DatasetError(f"{self.root}: another run is writing to it") from error
            for unfinished in folder.glob(".*.tmp"):
                unfinished.unlink()
            yield

    def check(self, plan: Mapping[str, Any]) -> None:
        """Compare a plan with the one that was begun here, if shards were written.

        Raises:
            DatasetError: it asks for something else; the message says what.
        """
        if not self.shards():
            return
        begun = self.plan()
        if begun is None:
            raise DatasetError(f"{self.root}: has shards and no {PLAN}; name another folder")
        if differences := _differences(begun, json.loads(json.dumps({"format": FORMAT, **plan}))):
            raise DatasetError(
                f"{self.root}: was begun differently, so it cannot be continued: "
                f"{'; '.join(differences)}. Ask for the same, or name another folder"
            )

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write dataset.json.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"format": FORMAT, **plan}, indent=2) + "\n"
        self._store.put(PLAN, [text.encode()], True)

    def write(
        self, shard: Shard, tensors: Mapping[str, torch.Tensor], manifest: Sequence[str]
    ) -> None:
        """Write a shard; when this returns, it is durable.

        Args:
            tensors: contiguous, on the CPU: of `LABELS` [n], and of each site [n, width].
            manifest: a line of JSON for each example.

        Raises:
            OSError: it cannot be written; then there is nothing of it.
        """
        metadata = {"format": FORMAT, "manifest": "\n".join(manifest)}
        pieces = encode({name: [tensor] for name, tensor in tensors.items()}, metadata)
        self._store.put(shard.name, pieces, False)

    def write_manifest(self) -> None:
        """Write manifest.jsonl from the shards, unless it is there.

        Raises:
            OSError: it cannot be written.
        """
        if self.fs.exists(self.full(MANIFEST)):
            return
        folder = self.local
        path = self.full(f".{uuid.uuid4().hex}.tmp" if folder else MANIFEST)
        with self.fs.open(path, "wb") as file:
            for shard in self.shards():
                file.write(self.header(shard).metadata["manifest"].encode() + b"\n")
        if folder:
            os.replace(path, folder / MANIFEST)


def _differences(begun: Any, now: Any, path: str = "") -> list[str]:
    """Return the differences of two plans, each as `path was ..., is ...`."""
    if isinstance(begun, dict) and isinstance(now, dict):
        keys = sorted(begun.keys() | now.keys())
        parts = (_differences(begun.get(k), now.get(k), f"{path}.{k}" if path else k) for k in keys)
        return [difference for part in parts for difference in part]
    return [] if begun == now else [f"{path} was {json.dumps(begun)}, is {json.dumps(now)}"]
