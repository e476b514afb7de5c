# SPDX-License-Identifier: Apache-2.0
"""The files of captured rows: what the filesystem consumer writes and the reader reads.

They are safetensors files. A request has the tensors

    positions, token_ids, versions      int64 [n], shared by all its sites
    post_block.12, pre_attn.3, ...      [n, width], one for each site

and a `Record`, in the file's metadata. Layouts:

    {tag}/{name}/{site}.safetensors     per_file: each site with the shared three
    {tag}/{name}.safetensors            packed
    {tag}/_shards/{...}.safetensors     sharded: tensors are named {name}/{tensor}, the records are
                                        JSON under the metadata key request/{name}

A name that starts with a dot is temporary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from fsspec import AbstractFileSystem

from vllm.v1.interventions.plan import Site

FORMAT = "1"
"""`capture_format` in the metadata of each file."""

FileLayout = Literal["per_file", "packed", "sharded"]
LAYOUTS: tuple[FileLayout, ...] = get_args(FileLayout)

SUFFIX = ".safetensors"
SHARDS = "_shards"
"""No name of a request starts with an underscore."""
LABELS = ("positions", "token_ids", "versions")
"""Tensors that all sites of a request share."""
IN_SHARD = "request/"

DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Of safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DTYPE_NAMES = {str(dtype).removeprefix("torch.") for dtype in _NAMES}

_MAX_HEADER = 100_000_000
"""Bytes; what the safetensors library allows."""
_FIRST_READ = 1 << 16
"""Bytes of a file that are read at once to get its header."""

Buffer = bytes | memoryview


class CaptureFileError(ValueError):
    """A file is not what the filesystem consumer wrote."""


@dataclass(frozen=True)
class Record:
    """What is known of a published request beside its rows; strings in a file's metadata."""

    request_id: str
    """The published name."""
    tag: str
    external_id: str
    """As the caller of the engine knows the request."""
    engine_id: str
    sample: int
    num_samples: int
    prompt: int
    """Which of the request's prompts."""
    model: str
    sites: tuple[Site, ...]
    dtype: str
    """torch's name without the prefix: "bfloat16"."""
    width: int
    """Of a row: hidden_size, with `project` the number of scores."""
    hidden_size: int
    """Of the model."""
    projected: bool
    rows: int
    """Of each site."""
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and generated tokens of the final sequence."""
    complete: bool
    error: str
    """Why rows that were asked for are absent; "" if `complete`."""
    replaces: bool
    """Whether an earlier request of this name is no longer valid."""
    publication: str
    """Unique: files of one publication belong together."""

    def to_strings(self) -> dict[str, str]:
        values = asdict(self) | {"sites": " ".join(map(tensor_name, self.sites))}
        return {"capture_format": FORMAT} | {key: _string(value) for key, value in values.items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str], where: str) -> "Record":
        """
        Raises:
            CaptureFileError: naming `where`.
        """
        version = strings.get("capture_format")
        if version != FORMAT:
            found = "no capture" if version is None else f"a capture of format {version[:20]!r}"
            raise CaptureFileError(f"{where}: is {found}; format {FORMAT!r} is read")
        try:
            fields: dict[str, Any] = {}
            for name, kind in cls.__annotations__.items():
                text = strings[name]
                if name == "sites":
                    fields[name] = tuple(site_of(tensor) for tensor in text.split())
                elif kind is bool:
                    fields[name] = {"true": True, "false": False}[text]
                else:
                    fields[name] = kind(text)
            if fields["dtype"] not in _DTYPE_NAMES:
                raise ValueError(f"unknown dtype {fields['dtype'][:20]!r}")
        except (KeyError, ValueError) as error:
            raise CaptureFileError(f"{where}: its metadata is damaged: {error!r}") from error
        return cls(**fields)


def _string(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A client may have sent half of a surrogate pair, which no UTF-8 can hold.
    return str(value).encode("utf-8", "backslashreplace").decode()


def tensor_name(site: Site) -> str:
    return f"{site[0]}.{site[1]}"


def site_of(name: str) -> Site:
    """
    Raises:
        ValueError: `name` is no site's.
    """
    point, dot, layer = name.rpartition(".")
    if not dot or not layer.isdecimal():
        raise ValueError(f"{name[:80]!r} is not named {{point}}.{{layer}}")
    return point, int(layer)


Pieces = Sequence[torch.Tensor]
"""A tensor, cut along its first dimension; at least one piece."""


def encode(tensors: Mapping[str, Pieces], metadata: Mapping[str, str]) -> list[Buffer]:
    """A safetensors file, in pieces that share the tensors' memory.

    The library's own writers copy, and hold the GIL for a third of a second on 256 MiB, which
    would stall the model steps of the process.

    Args:
        tensors: contiguous, on the CPU.
    """
    # The widest first: all are aligned then.
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, pieces in ordered:
        end = at + sum(piece.nbytes for piece in pieces)
        header[name] = {
            "dtype": _NAMES[pieces[0].dtype],
            "shape": [sum(map(len, pieces)), *pieces[0].shape[1:]],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"a file of {len(tensors)} tensors needs a header of {len(text)} bytes")
    data = [_bytes_of(piece) for _, pieces in ordered for piece in pieces]
    return [len(text).to_bytes(8, "little"), text, *data]


def _bytes_of(tensor: torch.Tensor) -> Buffer:
    assert tensor.is_contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte in the file."""
    stop: int


@dataclass(frozen=True)
class Header:
    path: str
    metadata: dict[str, str]
    tensors: dict[str, Entry]

    def record(self) -> Record:
        """Of a file of one request."""
        return Record.from_strings(self.metadata, self.path)

    def records(self) -> dict[str, Record]:
        """Of a shard: name -> record.

        Raises:
            CaptureFileError: the file is no shard.
        """
        found = {}
        for key, text in self.metadata.items():
            if key.startswith(IN_SHARD):
                try:
                    strings = json.loads(text)
                except ValueError as error:
                    raise CaptureFileError(f"{self.path}: {key} is damaged: {error}") from error
                name = key.removeprefix(IN_SHARD)
                found[name] = Record.from_strings(strings, f"{self.path}[{name}]")
        if not found:
            raise CaptureFileError(f"{self.path}: is no shard of captures")
        return found


def shard_metadata(records: Iterable[Record]) -> dict[str, str]:
    return {"capture_format": FORMAT, "layout": "sharded"} | {
        IN_SHARD + record.request_id: json.dumps(record.to_strings()) for record in records
    }


def read_header(fs: AbstractFileSystem, path: str) -> Header:
    """
    Raises:
        CaptureFileError: the file is truncated or no safetensors file.
        OSError: it cannot be read.
    """
    size = fs.info(path)["size"]
    data = fs.cat_file(path, start=0, end=min(size, _FIRST_READ))
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(size - 8, _MAX_HEADER):
        raise CaptureFileError(f"{path}: is truncated or no safetensors file")
    if len(data) < 8 + length:
        data += fs.cat_file(path, start=len(data), end=8 + length)
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        base = 8 + length
        tensors = {
            name: Entry(
                DTYPES[tensor["dtype"]],
                tuple(map(int, tensor["shape"])),
                base + int(tensor["data_offsets"][0]),
                base + int(tensor["data_offsets"][1]),
            )
            for name, tensor in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CaptureFileError(f"{path}: its header is damaged: {error!r}") from error
    _check_offsets(path, tensors, base, size)
    return Header(path, metadata, tensors)


def _check_offsets(path: str, tensors: Mapping[str, Entry], base: int, size: int) -> None:
    at = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        num_bytes = tensor.dtype.itemsize
        for length in tensor.shape:
            num_bytes *= length
        misplaced = tensor.start != at or tensor.stop - tensor.start != num_bytes
        if misplaced or any(length < 0 for length in tensor.shape):
            raise CaptureFileError(f"{path}: tensor {name[:80]!r} is not where its header says")
        at = tensor.stop
    if at != size:
        raise CaptureFileError(f"{path}: has {size} bytes, its header says {at}: truncated")
