# SPDX-License-Identifier: Apache-2.0
"""A publication is a completion's rows on their way to a file."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from vllm.v1.capture.consumers.filesystem import names
from vllm.v1.capture.file_format import (
    LABELS,
    STACKED,
    SUFFIX,
    FileLayout,
    Pieces,
    Record,
    encode,
    tensor_name,
)
from vllm.v1.capture.small_rows import FORMS, SCALE

OnCollision = Literal["error", "overwrite", "suffix"]
ON_COLLISION: tuple[OnCollision, ...] = get_args(OnCollision)


class CollisionError(FileExistsError):
    """Raised when a request of that name was published before."""

    def __init__(self, record: Record) -> None:
        super().__init__(
            f"{record.tag}/{record.request_id} exists already: choose another request_id or tag, "
            "or start the consumer with on_collision=suffix or overwrite"
        )


@dataclass(frozen=True)
class Publication:
    """All rows of one completion, with the record that goes beside them."""

    record: Record
    tensors: dict[str, Pieces]
    """The three tensors of `LABELS`, one for each site, and what small rows have beside that."""
    named: bool
    """True if the client chose the name; else it is unique by itself."""

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(piece.nbytes for pieces in self.tensors.values() for piece in pieces)

    def renamed(self) -> "Publication":
        """Return the same rows under a name that is free."""
        free = names.unused_name(self.record.request_id)
        return replace(self, record=replace(self.record, request_id=free))

    @property
    def folder(self) -> str:
        """The path below the root, without a suffix."""
        return f"{self.record.tag}/{self.record.request_id}"

    def packed(self) -> list[Any]:
        """Encode all tensors as one file."""
        return encode(self.tensors, self.record.to_strings())

    def stacked(self) -> list[Any]:
        """Encode all tensors as one file, the rows of all sites as one tensor of `STACKED`."""
        sites = [torch.cat(list(self.tensors[tensor_name(s)])) for s in self.record.sites]
        tensors: dict[str, Pieces] = {name: self.tensors[name] for name in LABELS}
        return encode(tensors | {STACKED: [torch.stack(sites, dim=1)]}, self.record.to_strings())

    def per_file(self) -> dict[str, list[Any]]:
        """Encode each site as a file of its own, by file name; each has the tensors of `LABELS`."""
        shared = {n: t for n, t in self.tensors.items() if n in LABELS or n in FORMS}
        files = {}
        for site in self.record.sites:
            name = tensor_name(site)
            metadata = self.record.to_strings() | {"point": site[0], "layer": str(site[1])}
            own = {n: self.tensors[n] for n in (name, name + SCALE) if n in self.tensors}
            files[name + SUFFIX] = encode(shared | own, metadata)
        return files

    def result(self, layout: FileLayout, paths: list[str]) -> dict[str, Any]:
        """Return the payload of the result: plain data, and no absolute path of the server."""
        return {
            "layout": layout,
            "tag": self.record.tag,
            "request_id": self.record.request_id,
            "paths": paths,
            "rows": self.record.rows * len(self.record.sites),
            "bytes": self.num_bytes,
        }
