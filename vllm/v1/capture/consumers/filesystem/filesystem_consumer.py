# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer gathers a completion's rows in memory and writes them when it ends.

The engine has reserved that memory when the request started.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from vllm.v1.capture.consumer import (
    SHARED_FIELDS,
    CaptureConsumer,
    CaptureSession,
    ConsumerContext,
    Location,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.consumers.filesystem import names
from vllm.v1.capture.consumers.filesystem.checks import flag, need_json, number, one_of
from vllm.v1.capture.consumers.filesystem.publication import (
    ON_COLLISION,
    CollisionError,
    OnCollision,
    Publication,
)
from vllm.v1.capture.consumers.filesystem.shards import ShardEntry, Shards
from vllm.v1.capture.consumers.filesystem.store import open_store
from vllm.v1.capture.file_format import (
    KEPT,
    LABELS,
    LAYOUTS,
    SUFFIX,
    FileLayout,
    Pieces,
    Record,
    tensor_name,
)
from vllm.v1.capture.small_rows import FORMS, SCALE, SMALL_DTYPES, SmallRows
from vllm.v1.interventions.errors import (
    refuse_unknown_keys,
    reject,
    show,
)
from vllm.v1.interventions.makings import Making

APART_BYTES = 64 << 10
"""The average size in bytes from which a tensor's batches are written one by one; else joined."""

LOCK = ".lock"
"""Suffix that upstream's reader appends to a file's path to find a lock, which is free from the
start."""

HIDDEN_STATES_PATH = "hidden_states_path"
"""Key by which upstream's clients find the path of a file among an answer's
`kv_transfer_params`."""

_FIELDS = ("request_id", "tag", "layout", "metadata", "dtype")


class FilesystemConsumer(CaptureConsumer):
    """Writes each completion's rows as safetensors below `root`; `vllm.v1.capture.reader` reads."""

    location: ClassVar[Location] = "engine"
    takes: ClassVar[tuple[type[Making], ...]] = KEPT
    transfer_keys: ClassVar[tuple[str, ...]] = (HIDDEN_STATES_PATH,)

    def __init__(
        self,
        root: str,
        layout: str = "packed",
        on_collision: str = "error",
        shard_max_bytes: int | str = 256 << 20,
        flush_seconds: float | str = 0.2,
        dtype: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        hidden_states_path: bool | str = False,
    ) -> None:
        """Check the options and open the store; nothing is written yet.

        Args:
            root: a path, or a URL that fsspec knows: s3://bucket/folder, gs://, memory://.
            layout: how requests are stored that do not choose themselves. "packed", one file a
                request, is a file that one `safetensors.torch.load_file` reads, under a name known
                beforehand. "sharded" is for many small requests; "per_file" has one file for each
                site; "ehs" one that upstream's `load_hidden_states` reads.
            on_collision: what becomes of a request whose name is taken: "error", "overwrite", or
                "suffix": published under the name with `--` and a random end.
            shard_max_bytes: a shard is closed when it has that many bytes.
            flush_seconds: a shard is closed that many seconds after its first request.
            dtype: what rows are stored as by requests that do not choose: "int8" or "float8", with
                a scale for each row; None for the model's dtype.
            storage_options: keywords of the fsspec file system.
            hidden_states_path: whether payloads have the absolute path of the file, and so the
                `kv_transfer_params` of answers. The layout must be "ehs", and the root local.

        Raises:
            ValueError: an option is not what it must be; the message names it.
        """
        if not isinstance(root, str) or not root:
            raise ValueError(f"root: must be a path or URL, got {root!r}")
        self._layout: FileLayout = one_of("layout", layout, LAYOUTS)
        self._on_collision: OnCollision = one_of("on_collision", on_collision, ON_COLLISION)
        self._shard_max_bytes = int(number("shard_max_bytes", shard_max_bytes, 1, 1 << 40))
        self._flush_seconds = number("flush_seconds", flush_seconds, 0, 3600)
        self._dtype = None if dtype is None else one_of("dtype", dtype, SMALL_DTYPES)
        if not isinstance(storage_options, Mapping | None):
            raise ValueError(
                f"storage_options: must be a dict, got {type(storage_options).__name__}"
            )
        self._store = open_store(root, storage_options or {})
        self._says_path = flag("hidden_states_path", hidden_states_path)
        if self._says_path and not (layout == "ehs" and self._store.is_local):
            raise ValueError(
                "hidden_states_path: is the path of a file that upstream's `load_hidden_states` "
                f"reads, so it needs layout=ehs and a local root, got layout={layout} and {root!r}"
            )
        self._context: ConsumerContext | None = None
        self._shards: Shards | None = None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check the options, and that a local root can be written: it is made.

        Raises:
            ValueError: an option is not what it must be; the message names it.
            OSError: the root cannot be made or written.
        """
        cls(**options)._store.prepare()

    @classmethod
    def check_request(cls, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Check the fields `request_id`, `tag`, `layout`, `metadata` and `dtype`, each of which may
        be None.

        Returns:
            The fields that are not None.

        Raises:
            ValueError: a key is unknown, a name or layout is not allowed, or the metadata are no
                JSON object or too many.
        """
        refuse_unknown_keys(fields, _FIELDS, path, beside=SHARED_FIELDS)
        given = {key: value for key, value in fields.items() if value is not None}
        if "request_id" in given:
            given["request_id"] = names.need_request_id(given["request_id"], f"{path}.request_id")
        if "tag" in given:
            names.need_tag(given["tag"], f"{path}.tag")
        if "layout" in given and given["layout"] not in LAYOUTS:
            reject(
                f"{path}.layout",
                f"unknown layout {show(given['layout'])}; layouts are {', '.join(LAYOUTS)}",
            )
        if "dtype" in given and given["dtype"] not in SMALL_DTYPES:
            reject(
                f"{path}.dtype",
                f"rows are stored as {', '.join(SMALL_DTYPES)}, not as {show(given['dtype'])}; "
                "leave it out for the model's dtype",
            )
        if "metadata" in given:
            given["metadata"] = need_json(given["metadata"], f"{path}.metadata")
        return given

    def start(self, context: ConsumerContext) -> None:
        """Find out whether the store works, and start the threads that write shards."""
        self._context = context
        self._store.prepare()
        self._shards = Shards(
            self._store,
            f"engine{context.engine_index}",
            self._shard_max_bytes,
            self._flush_seconds,
            self._on_collision,
        )

    def open(self, request: RequestInfo) -> CaptureSession:
        """Start gathering the rows of one completion."""
        return _Session(self, request)

    def shutdown(self) -> None:
        """Write the shards that are still open."""
        if self._shards is not None:
            self._shards.close()

    # -- for sessions ---------------------------------------------------------------------------

    def layout_of(self, request: RequestInfo) -> FileLayout:
        """Return the layout that the request chose, or the consumer's."""
        return request.fields.get("layout", self._layout)

    def stored_as(self, request: RequestInfo) -> str:
        """Return the form of small rows that the request chose, or the consumer's; "" for rows as
        they are: of the layout ehs, whose readers know no other, and of what is made of rows."""
        plain = self.layout_of(request) == "ehs" or request.projected or request.made is not None
        return "" if plain else request.fields.get("dtype", self._dtype) or ""

    def publication(
        self, request: RequestInfo, batches: Sequence[RowBatch], end: RequestEnd, error: str | None
    ) -> Publication:
        """Name a completion and put its batches together.

        Args:
            error: why rows that were asked for are absent; None if all are there.
        """
        assert self._context is not None
        fields, stored = request.fields, self.stored_as(request)
        name = names.name_of(fields.get("request_id") or request.request_id)
        if request.num_samples > 1 or request.prompt is not None:
            name = names.completion_name(name, request.prompt or 0, request.sample)
        record = Record(
            request_id=name,
            tag=fields.get("tag", names.DEFAULT_TAG),
            external_id=request.external_id,
            engine_id=request.request_id,
            sample=request.sample,
            num_samples=request.num_samples,
            prompt=request.prompt or 0,
            model=self._context.model,
            sites=request.sites,
            dtype=str(request.dtype).removeprefix("torch."),
            width=request.width,
            hidden_size=self._context.shape.hidden_size,
            projected=request.projected,
            rows=sum(len(batch.positions) for batch in batches),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_tokens=end.num_tokens,
            complete=error is None,
            error=error or "",
            replaces=self._on_collision == "overwrite",
            publication=uuid.uuid4().hex,
            given_id=fields.get("request_id", ""),
            metadata=fields.get("metadata", {}),
            heads=request.heads,
            reduce=request.reduce,
            stored=stored,
            made=request.made,
        )
        tensors = _tensors(request, batches, FORMS.get(stored))
        return Publication(record, tensors, named="request_id" in fields)

    def publish(
        self, publication: Publication, layout: FileLayout
    ) -> tuple[list[str], dict[str, Any]]:
        """Write a publication now, in a layout other than sharded.

        Returns:
            The paths to `withdraw` should it fail later, and the payload of the result.

        Raises:
            CollisionError: the name is taken and `on_collision` is "error".
            OSError: the store cannot write.
        """
        try:
            return self._put(publication, layout)
        except FileExistsError as error:
            if self._on_collision == "error":
                raise CollisionError(publication.record) from error
            if self._on_collision == "overwrite":
                raise
        return self._put(publication.renamed(), layout)

    def _put(
        self, publication: Publication, layout: FileLayout
    ) -> tuple[list[str], dict[str, Any]]:
        overwrite = self._on_collision == "overwrite"
        if layout == "packed":
            path = publication.folder + SUFFIX
            self._store.put(path, publication.packed(), overwrite)
            return [path], publication.result(layout, [path])
        if layout == "ehs":
            path, lock = publication.folder + SUFFIX, publication.folder + SUFFIX + LOCK
            self._store.put(lock, [], replace=True)  # first: who sees the file opens it
            self._store.put(path, publication.stacked(), overwrite)
            payload = publication.result(layout, [path, lock])
            if self._says_path:
                payload[HIDDEN_STATES_PATH] = self._store.full(path)
            return [path, lock], payload
        files = publication.per_file()
        self._store.put_folder(publication.folder, files, overwrite)
        paths = [f"{publication.folder}/{name}" for name in files]
        return [publication.folder], publication.result(layout, paths)

    def withdraw(self, paths: Sequence[str]) -> None:
        """Remove what `publish` wrote at these paths."""
        for path in paths:
            self._store.remove(path)

    @property
    def shards(self) -> Shards:
        """The shards of this engine; there from `start` on."""
        assert self._shards is not None
        return self._shards


class _Session(CaptureSession):
    """One completion: keeps its batches until it ends, then publishes them."""

    def __init__(self, consumer: FilesystemConsumer, request: RequestInfo) -> None:
        self._consumer = consumer
        self._request = request
        self._batches: list[RowBatch] = []
        self._paths: list[str] = []
        """The file or folder that was written for this completion alone."""
        self._entry: ShardEntry | None = None
        """Its part of a shard."""

    def rows(self, batch: RowBatch) -> None:
        expected = (len(self._request.sites), len(batch.positions), self._request.width)
        if batch.values.shape != expected or batch.values.dtype != self._request.dtype:
            found = f"{batch.values.dtype}{list(batch.values.shape)}"
            raise ValueError(f"rows are {found}, expected {self._request.dtype}{list(expected)}")
        if batch.values.untyped_storage().nbytes() > batch.values.nbytes:
            # A view of a whole step's rows, which must not be kept for the few that are ours.
            batch = replace(batch, values=batch.values.clone())
        self._batches.append(batch)

    def done(self, end: RequestEnd) -> Any:
        return self._publish(end, end.error)

    def aborted(self, end: RequestEnd) -> Any:
        if not self._batches:
            # No rows: no file.
            return None
        return self._publish(end, end.error or "the request was aborted")

    def failed(self, reason: str) -> None:
        self._batches.clear()
        if self._entry is not None:
            self._consumer.shards.drop(self._entry)
        self._consumer.withdraw(self._paths)

    def _publish(self, end: RequestEnd, error: str | None) -> Any:
        publication = self._consumer.publication(self._request, self._batches, end, error)
        self._batches.clear()
        layout = self._consumer.layout_of(self._request)
        if layout == "sharded":
            self._entry = self._consumer.shards.add(publication)
            return self._entry.future
        self._paths, payload = self._consumer.publish(publication, layout)
        return payload


def _tensors(
    request: RequestInfo, batches: Sequence[RowBatch], form: SmallRows | None
) -> dict[str, Pieces]:
    """Put the rows of all batches together by tensor; large batches stay pieces of their own."""
    tensors: dict[str, Pieces] = {}
    for name in LABELS:
        parts = [np.empty(0, np.int64), *(vars(batch)[name] for batch in batches)]
        tensors[name] = [torch.from_numpy(np.concatenate(parts))]
    for i, site in enumerate(request.sites):
        rows = [batch.values[i] for batch in batches]
        empty = torch.empty(0, request.width, dtype=request.dtype)
        if rows and sum(values.nbytes for values in rows) >= len(rows) * APART_BYTES:
            tensors[tensor_name(site)] = [values.contiguous() for values in rows]
        else:
            tensors[tensor_name(site)] = [torch.cat([empty, *rows])]
    if form is not None:
        for name in map(tensor_name, request.sites):
            packed = list(map(form.pack, tensors[name]))
            tensors[name] = [codes for codes, _ in packed]
            tensors[name + SCALE] = [scales for _, scales in packed]
        tensors |= {name: [table] for name, table in form.shared().items()}
    return tensors
