# SPDX-License-Identifier: Apache-2.0
"""Vectors of other tools as a module's file: `vllm steering convert` of anything but a lens.

A file holds one vector, a matrix with a row for each layer, or vectors that are named by their
layer. Nothing in a file is run. Formats: docs/coming-from.md#vectors-in-files.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vllm.entrypoints.cli.steering.convert import MAX_LAYERS, load_tensors, need_new
from vllm.v1.interventions.errors import reject, show, show_key
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.values import is_array
from vllm.v1.steering.files import read_npz, save
from vllm.v1.steering.gguf import read_gguf
from vllm.v1.steering.json_modules import without_repeats
from vllm.v1.steering.reft_files import module_of_reft

_MOST_BYTES = 1 << 30
"""Most bytes of a file, and of what its arrays say that they hold."""

OF_BLOCKS = (".gguf", ".json", ".svec")
"""Suffixes of formats whose vectors are added to what a block returns."""

_NAMED = re.compile(r"(?:(?:directions?|layers?|blocks?)[._ ]?)?(\d{1,4})", re.ASCII | re.I)
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)


def convert_vectors(
    source: Path,
    out: Path,
    point: str | None = None,
    layers: list[str] | None = None,
    first_layer: int = 0,
) -> list[int]:
    """Write the vectors of `source` to `out`, a file that is not there yet.

    Args:
        point: where they act; None for where the format says.
        layers: numbers and ranges, such as "4-7": those to keep, or those that get the one vector
            of the file. None for all that the file has.
        first_layer: the layer of row 0 of a matrix. Rows of layers below 0 are left out.

    Returns:
        The layers that have a vector.

    Raises:
        ValueError: the file holds something else; the message names the file and the tensor.
        OSError: a file cannot be read or written.
    """
    need_new(out)
    file, suffix = str(source), source.suffix.lower()
    if suffix not in _READERS:
        reject(file, f"holds no vectors: {', '.join(_READERS)} are read")
    if (size := source.stat().st_size) > _MOST_BYTES:
        reject(file, f"has {size} bytes, vectors have at most {_MOST_BYTES}")
    try:
        content = _READERS[suffix](source)
    except OSError:
        raise
    except Exception as error:  # whatever a library makes of bytes that may be anything
        reject(file, f"cannot be read as {suffix}: {str(error)[:200]}")
    if point is None and suffix not in OF_BLOCKS:
        reject(file, "does not say where its vectors act: give --point")
    chosen = None if layers is None else _numbers(layers)
    vectors = _checked(_by_layer(content, file, chosen, first_layer))
    if chosen is not None and (lacks := [n for n in chosen if n not in vectors]):
        has = ", ".join(map(str, sorted(vectors)[:20])) or "none"
        reject(file, f"has no vector of layer {lacks[0]}; layers with one are {has}")
    kept = {n: vectors[n] for n in sorted(vectors) if chosen is None or n in chosen}
    if not kept:
        reject(file, "has no vectors")
    save(out, {point or "post_block": kept})
    return list(kept)


def convert_reft(source: Path, out: Path) -> list[int]:
    """Write the interventions in a folder that pyreft saved to `out`, a file that is not there yet.

    Returns:
        The layers at which they act.

    Raises:
        ValueError: the folder holds something else; the message names the file and the tensor.
        OSError: a file cannot be read or written.
    """
    need_new(out)
    module = module_of_reft(source)
    save(out, module)
    return sorted({op["layers"] for op in module["ops"]})


def _by_layer(
    content: Any, file: str, chosen: list[int] | None, first_layer: int
) -> dict[int, tuple[str, Any]]:
    """Return layer -> a vector and what errors call it, neither of which is checked."""
    if isinstance(content, Mapping):
        content, file = _unwrapped(content, file)
    if isinstance(content, Mapping):
        return _named(content, file)
    if isinstance(content, list | tuple) or (is_array(content) and content.ndim > 1):
        if len(content) > MAX_LAYERS:
            reject(file, f"has {len(content)} rows, a model has at most {MAX_LAYERS} layers")
        rows = enumerate(content, first_layer)
        return {n: (f"{file}[{n - first_layer}]", row) for n, row in rows if n >= 0}
    if not is_array(content):
        reject(file, f"holds {show(content)}, no vectors")
    if chosen is None:
        reject(file, "has one vector and does not say of which layer: give --layers")
    return dict.fromkeys(chosen, (file, content))


def _unwrapped(content: Mapping[Any, Any], file: str) -> tuple[Any, str]:
    """Return the one array under a name that is of no layer, with what errors call it; all of
    `content` if there are others."""
    if "J" in content:
        reject(file, "is a lens, not vectors: leave out --point, --layers and --first-layer")
    arrays = [name for name, value in content.items() if is_array(value)]
    if len(arrays) != 1 or _NAMED.fullmatch(show_key(arrays[0])):
        return content, file
    return content[arrays[0]], f"{file}[{show_key(arrays[0])}]"


def _named(content: Mapping[Any, Any], file: str) -> dict[int, tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    for name, value in content.items():
        where = f"{file}[{show_key(name)}]"
        match = _NAMED.fullmatch(show_key(name))
        if match is None:
            reject(where, "is not named by a layer, as 12, layer_12 or direction.12")
        if int(match[1]) in found:
            reject(where, f"is a second vector of layer {int(match[1])}")
        found[int(match[1])] = where, value
    return found


def _checked(found: Mapping[int, tuple[str, Any]]) -> dict[int, np.ndarray]:
    """Return layer -> float64 [hidden], all of the width of the first one."""
    vectors: dict[int, np.ndarray] = {}
    width = 0
    for layer, (where, value) in found.items():
        if is_array(value) and value.ndim == 2 and len(value) == 1:
            value = value[0]  # one row, as a matrix
        if not isinstance(value, list) and not (is_array(value) and value.ndim == 1):
            given = f"shape {list(value.shape)}" if is_array(value) else show(value)
            reject(where, f"has {given}, needed is a vector [hidden]")
        width = width or len(value)
        if len(value) != width:
            reject(where, f"has {len(value)} values, the vector before has {width}")
        vectors[layer] = Given(value, where).vector(width)
    return vectors


def _numbers(layers: list[str]) -> list[int]:
    """Return the layers that numbers and ranges name, in their order."""
    numbers: dict[int, None] = {}
    for entry in layers:
        match = _RANGE.fullmatch(entry)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high >= MAX_LAYERS:
            reject("--layers", f"must be numbers or ranges such as 4-7, got {show(entry)}")
        numbers |= dict.fromkeys(range(low, high + 1))
    return list(numbers)


def _directions(path: Path) -> Any:
    """Return the vectors by layer of a CAST behavior or condition vector."""
    given = json.loads(path.read_bytes(), object_pairs_hook=without_repeats)
    if not isinstance(given, dict) or not isinstance(given.get("directions"), dict):
        raise ValueError("it has no object 'directions'")
    return given["directions"]


def _torch(path: Path) -> Any:
    content = load_tensors(path, mmap=False)
    values = content.values() if isinstance(content, Mapping) else content
    listed = values if isinstance(content, Mapping | list | tuple) else [content]
    # Views may say more than the file has.
    if sum(value.nbytes for value in listed if is_array(value)) > _MOST_BYTES:
        raise ValueError(f"its tensors have more than {_MOST_BYTES} bytes")
    return content


_READERS = {
    ".gguf": read_gguf,
    ".pt": _torch,
    ".pth": _torch,
    ".npz": lambda path: read_npz(path, _MOST_BYTES),
    ".json": _directions,
    ".svec": _directions,
}
