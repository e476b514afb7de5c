# SPDX-License-Identifier: Apache-2.0
"""Reads activations of a data set: rows of one site as a map-style `torch.utils.data.Dataset`."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from vllm.pilot.dataset.shard_store import LABELS, PLAN, Shard, ShardStore
from vllm.pilot.records import DatasetError
from vllm.v1.capture.file_format import Header, site_of, tensor_name
from vllm.v1.capture.small_rows import FORMS, SCALE, is_site

ALL = slice(None)


class Activations:
    """Activations of a data set as `capture` wrote them; they can be read while it still writes.

    Args:
        root: the folder or URL.
        storage_options: keywords of the fsspec file system.

    Raises:
        DatasetError: no data set was captured at `root`.
    """

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self.storage_options = storage_options
        self._store = ShardStore(root, storage_options)
        plan = self._store.plan()
        if plan is None:
            raise DatasetError(f"{root}: has no {PLAN}, so no data set was captured there")
        self.plan: dict[str, Any] = plan
        """Content of dataset.json: what was asked for, and of which data."""

    def __repr__(self) -> str:
        """Say where, how many examples and whether they are all there."""
        left = sum(shard.stop - shard.start for shard in self.missing)
        sites = ", ".join(map(tensor_name, self.sites))
        state = f"{left} missing" if left else "complete"
        return f"Activations({self.root!r}, {self.num_examples} examples, {state}: {sites})"

    @property
    def num_examples(self) -> int:
        """Number of examples in the data set."""
        return int(self.plan["data"]["examples"])

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards, in the order of their examples."""
        return self._store.shards()

    @property
    def missing(self) -> list[Shard]:
        """The ranges of examples that are not there yet."""
        return self._store.missing(self.num_examples)

    @property
    def complete(self) -> bool:
        """True if all examples are there."""
        return not self.missing

    @cached_property
    def sites(self) -> list[tuple[str, int]]:
        """The sites as (point, layer), in the order of the stream; none before the first shard."""
        for shard in self.shards:
            names = [name for name in self._store.header(shard).tensors if is_site(name)]
            names = [name for name in names if name not in LABELS]
            if names:
                return [site_of(name) for name in names]
        return []

    def manifest(self) -> Iterator[dict[str, Any]]:
        """Iterate over the examples that are there, in their order.

        Each is a dict: `example` (its number), `id`, `label`, `rows`, and for each row an entry of
        `positions`, `token_ids` and `tokens`; `first` is its first row in its shard. `text` is what
        was generated, `error` why rows are absent.
        """
        for shard in self.shards:
            for line in self._store.header(shard).metadata["manifest"].split("\n"):
                yield json.loads(line)

    def rows(self, point: str, layer: int) -> "Rows":
        """Return the rows of one site.

        Raises:
            KeyError: it was not captured.
        """
        if (point, layer) not in self.sites:
            known = ", ".join(map(tensor_name, self.sites))
            raise KeyError(f"{self.root}: has no {tensor_name((point, layer))}, it has {known}")
        return Rows(self, tensor_name((point, layer)))


class Rows(Dataset[dict[str, Any]]):
    """Rows of one site, in the order of the data set, for a `DataLoader`.

    An item is `{"values": [width], "example", "position", "token_id"}`, and `"label"` if the
    example has one; at points of heads values are [heads, width]. Local files are memory-mapped; of
    an object store a shard is read at a time.
    """

    def __init__(self, activations: Activations, site: str) -> None:
        self._activations = activations
        self._site = site
        self._store = ShardStore(activations.root, activations.storage_options)
        self._headers: list[Header] = []
        self._stops: list[int] = []
        for shard in activations.shards:
            header = self._store.header(shard)
            if site in header.tensors:
                self._headers.append(header)
                before = self._stops[-1] if self._stops else 0
                self._stops.append(before + header.tensors[site].shape[0])
        self._mapped: dict[int, dict[str, torch.Tensor]] = {}
        self._label_of: dict[int, Any] | None = None

    def __repr__(self) -> str:
        """Say what they are of."""
        return f"Rows({self._activations.root!r}, {self._site}: {list(self.shape)})"

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a DataLoader maps the files itself.
        return {**self.__dict__, "_mapped": {}}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows: [n, width]; of heads' points [n, heads, width]."""
        return (len(self), *self._headers[0].tensors[self._site].shape[1:])

    def __len__(self) -> int:
        """Number of rows."""
        return self._stops[-1] if self._stops else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._stops, index)
        tensors = self._tensors(number)
        at = index - (self._stops[number - 1] if number else 0)
        item: dict[str, Any] = {"values": self._rows(tensors, at).clone()}
        for name in LABELS:
            item[name] = int(tensors[name][at])
        label = self._labels[item["example"]]
        return item if label is None else {**item, "label": label}

    def tensor(self) -> torch.Tensor:
        """Return all rows, [n, width], in the dtype of the files; small ones as float32."""
        return torch.cat([self._rows(self._tensors(i)) for i in range(len(self._headers))])

    def numpy(self) -> np.ndarray:
        """Return all rows, [n, width]; bfloat16, which numpy lacks, becomes float32, exactly."""
        values = self.tensor()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def column(self, name: str) -> np.ndarray:
        """Return `"example"`, `"position"` or `"token_id"` of each row, int64 [n]."""
        return torch.cat([self._tensors(i)[name] for i in range(len(self._headers))]).numpy()

    def labels(self) -> np.ndarray:
        """Return the label of each row's example, [n].

        Raises:
            DatasetError: an example has none; it says which.
        """
        examples = self.column("example")
        without = [number for number in set(examples.tolist()) if self._labels[number] is None]
        if without:
            raise DatasetError(f"{self._activations.root}: example {min(without)} has no label")
        return np.array([self._labels[number] for number in examples.tolist()])

    @property
    def _labels(self) -> dict[int, Any]:
        if self._label_of is None:
            manifest = self._activations.manifest()
            self._label_of = {line["example"]: line["label"] for line in manifest}
        return self._label_of

    def _tensors(self, number: int) -> dict[str, torch.Tensor]:
        """The rows and their labels of one shard."""
        if number not in self._mapped:
            if self._store.local is None:
                self._mapped.clear()
            header = self._headers[number]
            names = (self._site, self._site + SCALE, *LABELS)
            self._mapped[number] = {
                name: self._tensor(header, name) for name in names if name in header.tensors
            }
        return self._mapped[number]

    def _rows(self, tensors: Mapping[str, torch.Tensor], at: int | slice = ALL) -> torch.Tensor:
        """The rows of a shard, or one of them."""
        rows = tensors[self._site][at]
        if (scales := tensors.get(self._site + SCALE)) is None:
            return rows
        [form] = [form for form in FORMS.values() if form.codes == rows.dtype]
        return form.unpack(rows, scales[at])

    def _tensor(self, header: Header, name: str) -> torch.Tensor:
        entry = header.tensors[name]
        num_bytes = entry.stop - entry.start
        if not num_bytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._store.local is not None:
            # Private pages: what is written to them stays in this process.
            data = np.memmap(header.path, np.uint8, "c", entry.start, (num_bytes,)).view(np.ndarray)
            flat = torch.from_numpy(data)
        else:
            content = self._store.fs.cat_file(header.path, start=entry.start, end=entry.stop)
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return flat.view(entry.dtype).reshape(entry.shape)
