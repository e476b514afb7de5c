# SPDX-License-Identifier: Apache-2.0
"""The format of files of captured rows, which the filesystem consumer writes and the reader reads.

They are safetensors files. A request has the tensors

    positions, token_ids, versions      int64 [n], shared by all its sites
    post_block.12, pre_attn.3, ...      [n, width], one for each site
    post_block.12.scale, ...            float32 [n], of small rows alone (small_rows.py)

and a `Record`, in the file's metadata. Layouts:

    {tag}/{name}/{site}.safetensors     per_file: each site with the shared three
    {tag}/{name}.safetensors            packed
    {tag}/_shards/{...}.safetensors     sharded: tensors are named {name}/{tensor}, the records are
                                        JSON under the metadata key request/{name}
    {tag}/{name}.safetensors            ehs: hidden_states [n, sites, width] in place of the
                                        sites' own, as upstream's `load_hidden_states` reads
                                        it; it wants an empty {name}.safetensors.lock beside

A name that starts with a dot is temporary.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import msgspec
import torch
from fsspec import AbstractFileSystem

from vllm.v1.capture.small_rows import FORMS
from vllm.v1.interventions.makings import Attention, Features, Making
from vllm.v1.interventions.plan import Site

FORMAT = "1"
"""The version of the format, `capture_format` in the metadata of each file."""

FileLayout = Literal["per_file", "packed", "sharded", "ehs"]
"""Layout of requests in files; the module's docstring shows each one."""
LAYOUTS: tuple[FileLayout, ...] = get_args(FileLayout)

SUFFIX = ".safetensors"
SHARDS = "_shards"
"""The folder of a tag's shards. It is no request's: no name of one starts with an underscore."""
LABELS = ("positions", "token_ids", "versions")
"""The tensors that all sites of a request share."""
STACKED = "hidden_states"
"""The tensor of all sites' rows in the layout ehs, [n, sites, width]."""
IN_SHARD = "request/"
"""The prefix of metadata keys that hold a shard's records."""

SAFETENSORS_DTYPES = {
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes that files may have, by their names in safetensors."""
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_DTYPE_NAMES = {str(d).removeprefix("torch.") for d in _NAMES if d.is_floating_point}

_MAX_HEADER = 100_000_000
"""The longest header in bytes that the safetensors library allows."""
_FIRST_READ = 1 << 16
"""Bytes of a file that are read first to get its header."""

KEPT: tuple[type[Making], ...] = (Attention, Features)
"""Makings of several named fields whose rows files hold."""

Buffer = bytes | memoryview


class CaptureFileError(ValueError):
    """Raised when a file is not what the filesystem consumer wrote."""


@dataclass(frozen=True)
class Record:
    """The facts about a published request beside its rows, kept as strings in a file's metadata."""

    request_id: str
    """The published name."""
    tag: str
    external_id: str
    """The id by which the caller of the engine knows the request."""
    engine_id: str
    sample: int
    num_samples: int
    prompt: int
    """The number of the prompt among those of the request, from 0."""
    model: str
    sites: tuple[Site, ...]
    dtype: str
    """The dtype's name in torch without the prefix, such as "bfloat16"."""
    width: int
    """The length of a row: hidden_size, with `project` the number of scores, or of the heads chosen
    at a site together."""
    hidden_size: int
    """The model's own width."""
    projected: bool
    rows: int
    """Number of rows of each site."""
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and generated tokens of the final sequence."""
    complete: bool
    error: str
    """The reason why rows that were asked for are absent; "" if `complete`."""
    replaces: bool
    """True if an earlier request of this name is no longer valid."""
    publication: str
    """A unique id: files with the same one belong together."""
    given_id: str = ""
    """The `request_id` that the request gave; "" if none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that the request said to keep with its rows."""
    heads: tuple[tuple[int, ...], ...] = ()
    """The numbers of the heads of each site, which lie one after the other in a row; empty at
    points of the residual stream."""
    reduce: str = ""
    """"mean" if a site's row is the mean of the positions asked for, which end with its own."""
    stored: str = ""
    """Form of small rows, a key of `small_rows.FORMS`; "" if rows are of `dtype`."""
    made: Making | None = None
    """Content of the rows where they are of a making in `KEPT`, in the metadata by the name of its
    field; else None."""

    def to_strings(self) -> dict[str, str]:
        """Return the record as metadata of a file, with the version of the format."""
        values = asdict(self) | {"sites": " ".join(map(tensor_name, self.sites))}
        values["metadata"] = json.dumps(self.metadata)
        values["heads"] = json.dumps(self.heads)
        if not self.heads:
            del values["heads"]  # most captures have none
        if not self.stored:
            del values["stored"]
        del values["made"]
        if self.made is not None:
            values[_key(type(self.made))] = json.dumps(msgspec.structs.asdict(self.made))
        return {"capture_format": FORMAT} | {key: _string(value) for key, value in values.items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str], where: str) -> "Record":
        """Read a record back from the metadata that `to_strings` made.

        Args:
            strings: the metadata; keys that are no field are ignored.
            where: the file, for errors.

        Raises:
            CaptureFileError: the format is another, a field is missing or its value is not of the
                field's type. The message names `where`.
        """
        version = strings.get("capture_format")
        if version != FORMAT:
            found = "no capture" if version is None else f"a capture of format {version[:20]!r}"
            raise CaptureFileError(f"{where}: is {found}; format {FORMAT!r} is read")
        try:
            fields: dict[str, Any] = {}
            for name, kind in cls.__annotations__.items():
                if name in _LATER and name not in strings:
                    continue
                text = strings[name]
                if name == "metadata":
                    fields[name] = _object(text)
                elif name == "heads":
                    fields[name] = tuple(tuple(map(int, heads)) for heads in json.loads(text))
                elif name == "sites":
                    fields[name] = tuple(site_of(tensor) for tensor in text.split())
                elif kind is bool:
                    fields[name] = {"true": True, "false": False}[text]
                else:
                    fields[name] = kind(text)
            if fields["dtype"] not in _DTYPE_NAMES:
                raise ValueError(f"unknown dtype {fields['dtype'][:20]!r}")
            if fields.get("stored", "") not in ("", *FORMS):
                raise ValueError(f"unknown form of rows {fields['stored'][:20]!r}")
            if len(fields.get("heads") or fields["sites"]) != len(fields["sites"]):
                raise ValueError("heads of other sites")
            for kind in KEPT:
                if (key := _key(kind)) in strings:
                    made = fields["made"] = _making(kind, strings[key])
                    widths = {made.width(len(heads), 0) for heads in fields.get("heads", [()])}
                    if widths != {fields["width"]} or fields["dtype"] != "float32":
                        raise ValueError(f"{key} of another width or dtype")
        except (KeyError, TypeError, ValueError) as error:
            raise CaptureFileError(f"{where}: its metadata is damaged: {error!r}") from error
        return cls(**fields)


_LATER = ("given_id", "metadata", "heads", "reduce", "stored", "made")
"""Fields that files written by earlier versions lack."""


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    made = json.loads(text)
    if not isinstance(made, dict):
        raise ValueError(f"{text[:20]!r} is no JSON object")
    return made


def _key(kind: type[Making]) -> str:
    """Key of a making's fields in the metadata."""
    return kind.field.partition(".")[0]


def _making(kind: type[Making], text: str) -> Making:
    """Read what `Record.to_strings` made of a making, every field and its type checked."""
    given = _object(text)
    values = [given[name] for name in kind.__struct_fields__]
    return msgspec.convert([kind.__name__, *values], kind)


def _string(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A client may have sent half of a surrogate pair, which no UTF-8 can hold.
    return str(value).encode("utf-8", "backslashreplace").decode()


def tensor_name(site: Site) -> str:
    """Return the name of a site's tensor, `{point}.{layer}`."""
    return f"{site[0]}.{site[1]}"


def site_of(name: str) -> Site:
    """Return the site that a tensor of this name belongs to, the inverse of `tensor_name`.

    Raises:
        ValueError: `name` is not `{point}.{layer}`.
    """
    point, dot, layer = name.rpartition(".")
    if not dot or not layer.isdecimal():
        raise ValueError(f"{name[:80]!r} is not named {{point}}.{{layer}}")
    return point, int(layer)


Pieces = Sequence[torch.Tensor]
"""A tensor cut along its first dimension, in at least one piece."""


def encode(tensors: Mapping[str, Pieces], metadata: Mapping[str, str]) -> list[Buffer]:
    """Encode a safetensors file as pieces of bytes that share the tensors' memory.

    The library's own writers copy, and hold the GIL for a third of a second on 256 MiB, which
    would stall the model steps of the process.

    Args:
        tensors: name -> pieces, contiguous, on the CPU, of the dtypes in `SAFETENSORS_DTYPES`.
        metadata: the strings that go into the header.

    Returns:
        The file's content; the pieces are to be written one after the other.

    Raises:
        ValueError: the header would be longer than safetensors allows.
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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place, dtype and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """The offset in bytes of its first byte, from the start of the file."""
    stop: int
    """The offset in bytes just past its last byte."""


@dataclass(frozen=True)
class Header:
    """The header of one file: its metadata, and where its tensors are."""

    path: str
    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]

    def record(self) -> Record:
        """Return the record of a file that holds one request.

        Raises:
            CaptureFileError: the metadata is damaged, or of another format.
        """
        return Record.from_strings(self.metadata, self.path)

    def records(self) -> dict[str, Record]:
        """Return the records of a shard, by the requests' names.

        Raises:
            CaptureFileError: the file is no shard, or a record is damaged.
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
    """Return the metadata of a shard that holds these requests."""
    return {"capture_format": FORMAT, "layout": "sharded"} | {
        IN_SHARD + record.request_id: json.dumps(record.to_strings()) for record in records
    }


def read_header(fs: AbstractFileSystem, path: str) -> Header:
    """Read a file's header, and check that its tensors fill the rest of the file exactly.

    Raises:
        CaptureFileError: the file is truncated or no safetensors file.
        OSError: it cannot be read.
    """
    size = fs.info(path)["size"] or 0  # None of a store that does not know
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
            name: StoredTensor(
                SAFETENSORS_DTYPES[tensor["dtype"]],
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


def _check_offsets(path: str, tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
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


def list_folder(fs: AbstractFileSystem, path: str) -> list[tuple[str, bool]]:
    """List a folder as (name, whether it is a folder), sorted, without temporary names.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    # Another process may have written since.
    fs.invalidate_cache(path)
    found = [
        (str(item["name"]).rsplit("/", 1)[-1], item["type"] == "directory")
        for item in fs.ls(path, detail=True)
    ]
    return sorted(item for item in found if not item[0].startswith("."))
