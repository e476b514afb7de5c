# SPDX-License-Identifier: Apache-2.0
"""Reads modules from files, and writes them.

Files are safetensors and npz with a vector for each `{tier}.{point}.{layer}`, safetensors with
operations too, GGUF control vectors as llama.cpp and repeng write them, and JSON. Nothing is ever
unpickled.
"""

import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch

from vllm.config.points import RETURNED, STEERING_POINTS, STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import TIERS, Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import (
    need_layers,
    need_one_lane,
    need_point,
)
from vllm.v1.interventions.vectors import Vectors
from vllm.v1.steering.gguf import read_gguf, write_gguf
from vllm.v1.steering.json_modules import read_json_module, without_repeats
from vllm.v1.steering.modules import (
    Module,
    make_module,
    parse_module,
    parse_module_ops,
)
from vllm.v1.steering.op_files import joined_ops, split_ops
from vllm.v1.steering.unshaped import ANY_FAMILY, module_without_model

FORMAT_VERSION = "1"
"""The version of our safetensors files, `steering_format` in the metadata."""

OPS_VERSION = "2"
"""The version of those that hold operations, which readers of the first would leave out."""

_HEADERS = 1 << 20
"""Bytes that a file may have beside its vectors."""

_JSON = ".json"
_DIGITS = 3
"""Times that a float64 may be longer when it is written out, with what is between two."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes that vectors may have, by their names in safetensors."""

_NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)

Named = dict[str, np.ndarray | torch.Tensor]
"""The vectors of a file by name, as they stand in it."""


@dataclass(frozen=True)
class Content:
    """Content of a file: vectors and operations."""

    vectors: Named
    ops: list[Any] = field(default_factory=list)
    """Operations as a request says them."""


SiteOf = Callable[[str, str, TapShape], tuple[str, Site]]
"""A function of a vector's name, where it stands (for errors), and the model's shape. It returns
the tier and site that the name means."""


def load(path: str | Path, shape: TapShape, config: SteeringConfig = ANY_FAMILY) -> Module:
    """Read the module in a file, by its suffix: .safetensors, .gguf, .npz or .json.

    In a GGUF file, `direction.{i}` is added to the output of block i, counted from 0: the base
    tier's `post_block` of layer i.

    Args:
        config: the options of the engine that is to run it.

    Raises:
        ValueError: the file is of another format, truncated, or larger than any module of this
            model; a tier, point or layer is unknown; a vector is of the wrong width or not finite.
            The message names the file and the tensor.
        OSError: the file cannot be read.
    """
    file, suffix = str(path), Path(path).suffix.lower()
    found = need_file(path)
    most = _most_bytes(shape, config.max_steering_ops) * (_DIGITS if suffix == _JSON else 1)
    if found.st_size > most:
        reject(file, f"has {found.st_size} bytes, a module of this model has at most {most}")
    try:
        if suffix == _JSON:
            fields = read_json_module(Path(path).read_bytes())
        else:
            read, site_of = _READERS[suffix]
            content = read(Path(path), shape)
    except Exception as error:  # whatever a library makes of bytes that may be anything
        reject(file, f"cannot be read as {suffix}: {str(error)[:200]}")
    if suffix == _JSON:
        return parse_module(fields, file, shape, config)
    return _module(content, site_of, file, shape, config)


def need_file(path: str | Path) -> os.stat_result:
    """Find out of which size a file is, once it is known to be one that is read.

    Raises:
        ValueError: its suffix is of no module, or it is no regular file; the message names it.
        OSError: it is not there.
    """
    if Path(path).suffix.lower() not in (*_READERS, _JSON):
        reject(str(path), f"is not a module: {', '.join((*_READERS, _JSON))} are read")
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        reject(str(path), "is not a regular file")
    return found


def _module(
    content: Content, site_of: SiteOf, file: str, shape: TapShape, config: SteeringConfig
) -> Module:
    """Make a module of a file's content, once it is checked."""
    need_one_lane(file, shape)
    tiers: dict[str, Vectors] = {tier: {} for tier in TIERS}
    for name, vector in content.vectors.items():
        where = f"{file}[{show_key(name)}]"
        tier, site = site_of(name, where, shape)
        tiers[tier][site] = Given(vector, where).vector(shape.row_width(site))
    ops = parse_module_ops(content.ops, f"{file}[ops]", shape, config)
    return make_module(tiers, ops, file, shape)


def parse_safetensors(data: bytes, where: str, shape: TapShape, config: SteeringConfig) -> Module:
    """Read the module in the content of a safetensors file.

    Args:
        where: what errors call the content.
        config: the options of the engine that is to run it.

    Raises:
        ValueError: as `load`.
    """
    most = _most_bytes(shape, config.max_steering_ops)
    if len(data) > most:
        reject(where, f"has {len(data)} bytes, a module of this model has at most {most}")
    try:
        content = _safetensors(data, shape)
    except Exception as error:  # whatever a library makes of bytes that may be anything
        reject(where, f"cannot be read: {str(error)[:200]}")
    return _module(content, _site_of, where, shape, config)


def save(path: str | Path, source: Module | Mapping[str, Any], model_hint: str = "") -> None:
    """Write a module as safetensors, vectors float32 [hidden]; `load` gives the same module.

    Args:
        source: a module, or what `llm.steering.register_module` takes: `{point: {layer: vector}}`,
            or a mapping with "vectors", "prefill_vectors", "decode_vectors" and "ops". No engine is
            needed, so layers are numbers.
        model_hint: the model's name, for readers.

    Raises:
        ValueError: the source is no module, or acts on one lane of a stream, which such a file
            cannot say; the message names the field.
        OSError: the file cannot be written.
    """
    module = _module_of(source)
    for op in module.ops:
        if op.terms[0].scalars.lane >= 0:
            reject(str(path), f"has no lanes, and {op.name} acts on one: keep the module as JSON")
    vectors = {
        f"{tier}.{point}.{layer}": row
        for tier, vector_set in module.tiers.items()
        for (point, layer), row in zip(vector_set.sites, vector_set.rows, strict=True)
    }
    metadata = {"steering_format": FORMAT_VERSION, "model_hint": model_hint}
    if module.ops:
        ops, of_ops = split_ops(module.ops)
        metadata |= {"steering_format": OPS_VERSION, "ops": ops}
        vectors |= of_ops
    sizes = [len(row) for name, row in vectors.items() if name.split(".")[1] in STREAM_POINTS]
    sizes += [len(op.terms[0].vector) // 4 for op in module.ops if not op.heads]
    if sizes:  # rows of heads may have any width
        metadata["hidden_size"] = str(sizes[0])
    # `save_file` would say of a full disk something that is no OSError.
    data = safetensors.numpy.save(vectors, metadata)
    # It writes the metadata in an order of chance; equal modules are to be equal files.
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = metadata
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write(path, lambda file: file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:]))


def export_gguf(path: str | Path, source: Module | Mapping[str, Any], model_hint: str = "") -> None:
    """Write a control vector that repeng reads, and llama.cpp if layer 0 has none.

    Args:
        source: as of `save`.
        model_hint: the model's type, such as "llama"; repeng calls it `model_type`.

    Raises:
        ValueError: the module has what such a file cannot hold: a tier other than base, a point
            other than post_block, operations.
        OSError: the file cannot be written.
    """
    module = _module_of(source)
    if module.ops:
        reject(str(path), f"a GGUF control vector has no operations, such as {module.ops[0].name}")
    if others := sorted(module.tiers.keys() - {"base"}):
        reject(str(path), f"a GGUF control vector has no {others[0]} tier")
    base = module.tiers["base"]
    if others := sorted({point for point, _ in base.sites} - {"post_block"}):
        reject(str(path), f"a GGUF control vector has no {others[0]}, only post_block")
    rows = dict(zip((layer for _, layer in base.sites), base.rows, strict=True))
    _write(path, lambda unfinished: write_gguf(unfinished, model_hint, rows))


def _most_bytes(shape: TapShape, num_ops: int = 0) -> int:
    """Return the size of a file with a float64 vector for all sites and tiers of the model, and two
    for each of some operations at each site: what it reads by, or a gate's probe, and its own."""
    sites = [
        (point, n)
        for n, layer in shape.layers.items()
        for point in (*layer.points, *layer.inputs, RETURNED)
    ]
    return _HEADERS + 8 * (len(TIERS) + 2 * num_ops) * sum(map(shape.row_width, sites))


def _module_of(source: Module | Mapping[str, Any]) -> Module:
    return source if isinstance(source, Module) else module_without_model(source, "source")


def _write(path: str | Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name first, so that it is there whole or not at all."""
    unfinished = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _site_of(name: str, where: str, shape: TapShape) -> tuple[str, Site]:
    """Return the tier and site that the name `{tier}.{point}.{layer}` means."""
    tier, *rest = name.split(".")
    if len(rest) != 2 or not _NUMBER.fullmatch(rest[1]):
        reject(where, "is not named {tier}.{point}.{layer}, as base.post_block.12")
    if tier not in TIERS:
        reject(where, f"unknown tier {show(tier)}; tiers are {', '.join(TIERS)}")
    return tier, _site(rest[0], rest[1], where, shape)


def _site_of_direction(name: str, where: str, shape: TapShape) -> tuple[str, Site]:
    """Return the tier and site that the name `direction.{layer}` of a GGUF file means."""
    word, _, layer = name.partition(".")
    if word != "direction" or not _NUMBER.fullmatch(layer):
        reject(where, "is not named direction.{layer}")
    return "base", _site("post_block", layer, where, shape)


def _site(point: str, layer: str, where: str, shape: TapShape) -> Site:
    need_point(point, where, shape, STEERING_POINTS)
    [number] = need_layers(int(layer), point, where, shape)
    return point, number


def _read_safetensors(path: Path, shape: TapShape) -> Content:
    return _safetensors(path.read_bytes(), shape)


def _safetensors(data: bytes, shape: TapShape) -> Content:
    """Return the tensors of a safetensors file, whose metadata, if any, must fit this model."""
    tensors = safetensors.deserialize(data)
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    header = json.loads(text, object_pairs_hook=without_repeats)
    metadata = header.get("__metadata__", {})
    version = metadata.get("steering_format", FORMAT_VERSION)
    if version not in (FORMAT_VERSION, OPS_VERSION):
        known = f"{FORMAT_VERSION} and {OPS_VERSION} are read"
        raise ValueError(f"it is of format {show(version)}, {known}")
    width = metadata.get("hidden_size", str(shape.hidden_size))
    if width != str(shape.hidden_size):
        raise ValueError(f"it is for hidden size {show(width)}, the model has {shape.hidden_size}")
    named = {name: _tensor(name, tensor) for name, tensor in tensors}
    ops = joined_ops(metadata["ops"], named) if version == OPS_VERSION else []
    return Content(dict(named), ops)


def _tensor(name: str, tensor: dict[str, Any]) -> torch.Tensor:
    if tensor["dtype"] not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ValueError(f"{show_key(name)} is of dtype {tensor['dtype']}; {known} are read")
    flat = torch.frombuffer(bytearray(tensor["data"]), dtype=_DTYPES[tensor["dtype"]])
    return flat.reshape(tensor["shape"])


def read_npz(path: Path, most: int) -> Named:
    """Return the arrays of an npz file, which may have `most` bytes together.

    Raises:
        ValueError: they have more, or hold pickled objects, or a name is there twice.
        Exception: the libraries raise anything on bytes that may be anything.
    """
    named: Named = {}
    with zipfile.ZipFile(path) as archive:
        # Compressed, it may be small and hold anything.
        if sum(member.file_size for member in archive.infolist()) > most:
            raise ValueError(f"its arrays have more than {most} bytes")
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in named:
                raise ValueError(f"it has {show_key(name)} twice")
            # As many bytes as it claims to have, which were counted, however many come out of it.
            with archive.open(member) as opened:
                named[name] = _array(name, opened.read(member.file_size))
    return named


def _array(name: str, data: bytes) -> np.ndarray:
    """Return the array in the content of an .npy file."""
    opened = io.BytesIO(data)
    version = np.lib.format.read_magic(opened)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    sizes, _, dtype = read_header(opened)
    if dtype.hasobject:
        raise ValueError(f"{show_key(name)} holds pickled objects, which are never read")
    return np.frombuffer(data, dtype, offset=opened.tell()).reshape(sizes)


def _read_npz(path: Path, shape: TapShape) -> Content:
    return Content(read_npz(path, _most_bytes(shape)))


def _read_gguf(path: Path, shape: TapShape) -> Content:
    return Content(dict(read_gguf(path)))


_READERS: dict[
    str,
    tuple[Callable[[Path, TapShape], Content], SiteOf],
] = {
    ".safetensors": (_read_safetensors, _site_of),
    ".gguf": (_read_gguf, _site_of_direction),
    ".npz": (_read_npz, _site_of),
}
