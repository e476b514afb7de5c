# SPDX-License-Identifier: Apache-2.0
"""One request as it is stored: its record, and its rows when they are asked for."""

import contextlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.features import FeatureRows
from vllm.v1.capture.file_format import (
    LABELS,
    STACKED,
    SUFFIX,
    CaptureFileError,
    FileLayout,
    Header,
    Record,
    list_folder,
    read_header,
    site_of,
    tensor_name,
)
from vllm.v1.capture.results import CapturedRows
from vllm.v1.capture.small_rows import FORMS, SCALE
from vllm.v1.interventions.makings import Attention, Features
from vllm.v1.interventions.plan import Site, dtype_of


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
    def id(self) -> str:
        """The `request_id` that the request gave; its published name if it gave none."""
        return self.record.given_id or self.name

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that the request gave, to be kept with its rows."""
        return self.record.metadata

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
        """Number of rows of each site."""
        return self.record.rows

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the rows as (point, layer), in layer order."""
        return self.record.sites

    @property
    def complete(self) -> bool:
        """True if all rows are there that the request asked for."""
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
        """Return the rows of one site, memory-mapped where the file is local; small ones as
        float32.

        Raises:
            KeyError: the request did not capture that site, or captured attention or features.
            CaptureFileError: naming the file: it is missing, or shapes, dtypes or positions are not
                what they must be.
        """
        if isinstance(self.record.made, Attention):
            raise KeyError(f"{self!r} has weights of attention: read attention({layer})")
        if self.record.made is not None:
            raise KeyError(f"{self!r} has features: read features({point!r}, {layer})")
        return CapturedRows(*self._site((point, layer)), self._heads.get((point, layer), ()))

    def attention(self, layer: int | None) -> AttentionRows:
        """Return what was captured of the attention of one layer, as `inline` gives it; with
        `"sum": "all"` that of all layers, at None.

        Raises:
            KeyError: the request did not capture attention, or that of another layer.
            CaptureFileError: as `rows`.
        """
        read, layers = self.record.made, [n for _, n in self.sites]
        if not isinstance(read, Attention) or layer not in (
            [None] if read.sum == "all" else layers
        ):
            raise KeyError(f"{self!r} has no attention of layer {layer}, it has {self.sites}")
        if layer is not None:
            heads = self._heads["attn", layer]
            return AttentionRows(*self._site(("attn", layer)), read, heads=heads)
        positions, token_ids, values, versions = self._site(self.sites[0])
        for site in self.sites[1:]:
            values = values + self._site(site)[2]
        return AttentionRows(positions, token_ids, values, versions, read)

    def features(self, point: str, layer: int) -> FeatureRows:
        """Return the activations of features at one site, as `inline` gives them.

        Raises:
            KeyError: the request did not capture that site, or no features.
            CaptureFileError: as `rows`.
        """
        made = self.record.made
        if not isinstance(made, Features):
            raise KeyError(f"{self!r} has no features, it has {self.sites}")
        return FeatureRows(*self._site((point, layer)), made)

    @property
    def _heads(self) -> dict[Site, tuple[int, ...]]:
        return dict(zip(self.sites, self.record.heads, strict=False))

    def _site(self, site: Site) -> tuple[np.ndarray, np.ndarray, torch.Tensor, np.ndarray]:
        """Positions, tokens, rows [n, width] and versions of a site, checked."""
        if site not in self.sites:
            known = ", ".join(map(tensor_name, self.sites))
            raise KeyError(f"{self!r} has no {tensor_name(site)}, it has {known}")
        if site not in self._files:
            raise CaptureFileError(f"{self.path}: the file of {tensor_name(site)} is missing")
        header, record = self._header(self._files[site]), self.record
        if self.layout == "per_file" and header.record() != record:
            raise CaptureFileError(f"{header.path}: is of another request than its neighbours")
        dtype, shape = dtype_of(record.dtype), (record.rows, record.width)
        if self.layout == "packed" and STACKED in header.tensors:
            stacked = (record.rows, len(self.sites), record.width)
            values = self._tensor(header, STACKED, dtype, stacked)[:, self.sites.index(site)]
        elif record.stored:
            form, name = FORMS[record.stored], tensor_name(site)
            scales = self._tensor(header, name + SCALE, torch.float32, (record.rows,))
            values = form.unpack(self._tensor(header, name, form.codes, shape), scales)
        else:
            values = self._tensor(header, tensor_name(site), dtype, shape)
        positions, token_ids, versions = (
            self._tensor(header, name, torch.int64, (record.rows,)).numpy() for name in LABELS
        )
        if (positions[:1] < 0).any() or (np.diff(positions) <= 0).any():
            raise CaptureFileError(f"{header.path}: positions of {self.name} are not sorted")
        return positions, token_ids, values, versions

    # -- files ----------------------------------------------------------------------------------

    @cached_property
    def _files(self) -> dict[Site, str]:
        """The path of each site's file, of those that are there."""
        if self.layout != "per_file":
            return dict.fromkeys(self.sites, self.path)
        files = {}
        for name, _ in list_folder(self._fs, self.path):
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
            if len(content) != entry.stop - entry.start:
                raise CaptureFileError(f"{header.path}: its store gave a part of {key}")
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(dtype).reshape(shape)
