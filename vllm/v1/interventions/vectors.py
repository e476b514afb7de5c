# SPDX-License-Identifier: Apache-2.0
"""Parser of steering vectors in requests: it checks them and composes nothing."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.config.points import STEERING_POINTS, STREAM_POINTS
from vllm.v1.interventions.errors import need_mapping, reject, show, show_key, unknown_keys
from vllm.v1.interventions.plan import Site, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_layers, need_point, site_order
from vllm.v1.interventions.values import Array, is_array, is_plain, plain

Vectors = dict[Site, np.ndarray]
"""Site -> float64 [hidden], of all lanes [lanes * hidden], of z [heads * width]; scale applied."""

Select = Callable[[Any, str], Positions]
"""Resolves a value of `positions`, given with its path, to the positions it means."""

MAX_SCALE = 1e30
"""Largest number in a request: products stay far inside float64, and the sum is checked again in
the model's dtype."""


def parse_vectors(
    value: Any, path: str, shape: TapShape, select: Select
) -> list[tuple[Vectors, Positions | None]]:
    """Parse one tier: `{point: {layers: vector or {"vector", "scale"?, "positions"?}}}`.

    Args:
        value: the user's mapping, as in `SamplingParams.steering_vectors`.
        path: the field's name, for errors.
        shape: what the model offers.
        select: resolves a value of `positions`, given with its path.

    Returns:
        Pairs of vectors that act together, and where; None is everywhere in the tier.

    Raises:
        ValueError: unknown point, a point or layer the model does not have, a layer named twice,
            wrong width, not finite, not a number, an unknown key, a wrong selector.
    """
    everywhere: Vectors = {}
    limited: list[tuple[Vectors, Positions | None]] = []
    seen: set[Site] = set()
    for point_key, entries in need_mapping(value, path).items():
        point = need_point(point_key, f"{path}.{show_key(point_key)}", shape, STEERING_POINTS)
        for layer_key, entry in need_mapping(entries, f"{path}.{point}").items():
            entry_path = f"{path}.{point}.{show_key(layer_key)}"
            layers = need_layers(layer_key, point, entry_path, shape)
            widths = {shape.row_width((point, layer)) for layer in layers}
            width = need_one_width(point, widths, entry_path)
            lanes = shape.lanes if point in STREAM_POINTS else 1
            vector, positions = _entry(entry, entry_path, width, select, lanes)
            for layer in layers:
                if (point, layer) in seen:
                    reject(entry_path, f"layer {layer} is already given by another entry")
                seen.add((point, layer))
            vectors = {(point, layer): vector for layer in layers}
            if positions is None:
                everywhere |= vectors
            else:
                limited.append((vectors, positions))
    return [(everywhere, None), *limited]


def _entry(
    entry: Any, path: str, width: int, select: Select, lanes: int
) -> tuple[np.ndarray, Positions | None]:
    if not isinstance(entry, Mapping):
        return _of_lanes(entry, path, width, lanes), None
    known = {"vector", "scale", "positions", *("lane",) * (lanes > 1)}
    if unknown := unknown_keys(entry, known):
        lane = ", 'lane'" * (lanes > 1)
        said = f"allowed are 'vector', 'scale'{lane} and 'positions'"
        reject(path, f"unknown keys {unknown}, {said}")
    if "vector" not in entry:
        reject(path, "'vector' is missing")
    scale = need_number(entry.get("scale", 1.0), f"{path}.scale")
    positions = None
    if "positions" in entry:
        positions = select(entry["positions"], f"{path}.positions")
    with np.errstate(over="ignore"):  # the sum is looked at
        vector = _of_lanes(entry["vector"], f"{path}.vector", width, lanes, entry.get("lane"))
        return vector * scale, positions


def _of_lanes(value: Any, path: str, width: int, lanes: int, lane: Any = None) -> np.ndarray:
    """A vector of all lanes, float64 [width]: of one of `hidden` for each of them or for `lane`
    alone, or of [lanes, hidden]."""
    if lane is None:
        vector = need_lanes(value, path, width // lanes, lanes)
        return np.resize(vector, width)
    [chosen] = need_lane(lane, f"{path.removesuffix('.vector')}.lane", lanes)
    rows = np.zeros((lanes, width // lanes))
    rows[chosen] = need_vector(value, path, width // lanes)
    return rows.ravel()


def need_lane(value: Any, path: str, lanes: int) -> tuple[int]:
    """The lane a request names, of so many; raises ValueError if it is none."""
    lane = plain(value)
    if lanes == 1:
        reject(path, "this model's stream has one lane; leave it out")
    if not isinstance(lane, int) or isinstance(lane, bool) or not 0 <= lane < lanes:
        reject(path, f"must be a lane, 0-{lanes - 1}, got {show(lane)}")
    return (lane,)


def need_lanes(value: Any, path: str, hidden: int, lanes: int) -> np.ndarray:
    """Return a request's vector as `need_vector` does; for a stream of several lanes it may also be
    one vector for each lane, [lanes, hidden], which is returned flat."""
    if isinstance(value, list | tuple):
        is_rows = isinstance([*value[:1], 0][0], list | tuple)
    else:
        is_rows = need_array(value, path).ndim == 2
    if lanes == 1 or not is_rows:
        return need_vector(value, path, hidden)
    if len(value) != lanes:
        reject(path, f"has {len(value)} rows, the model has {lanes} lanes")
    return np.concatenate([need_vector(v, f"{path}[{i}]", hidden) for i, v in enumerate(value)])


def need_number(value: Any, path: str) -> float:
    """Return a request's number as float; raise ValueError if it is none, or not finite, or larger
    than `MAX_SCALE` in size."""
    value = plain(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        reject(path, f"must be a number, got {show(value)}")
    if not abs(value) <= MAX_SCALE:  # so that NaN is refused, too
        reject(path, f"must be finite and at most {MAX_SCALE:g}, got {show(value)}")
    return float(value)


def need_one_width(point: str, widths: set[int], path: str) -> int:
    """The width of a point's rows at several layers; raises ValueError if they have several."""
    if len(widths) > 1:
        reject(
            path, f"rows of {point} have widths {sorted(widths)} at these layers, name them apart"
        )
    return widths.pop()


def need_vector(value: Any, path: str, width: int) -> np.ndarray:
    """Return a request's vector as float64 [width].

    Args:
        value: a list or tuple of numbers, or a 1-D array or tensor of a float dtype.

    Raises:
        ValueError: none of these, the wrong width, or not finite.
    """
    if isinstance(value, list | tuple):
        if len(value) != width:
            reject(path, f"has {len(value)} values, the model needs {width}")
        # A list of lists would reach numpy's own errors; a bool is an int to Python.
        if set(map(type, value)) != {float}:
            value = [need_number(x, f"{path}[{i}]") for i, x in enumerate(value)]
        array = np.array(value, np.float64)
    else:
        given = need_array(value, path)
        if list(given.shape) != [width]:
            reject(path, f"has shape {list(given.shape)}, the model needs [{width}]")
        array = floats_of(given, path).to(torch.float64).numpy()
    if not np.isfinite(array).all():
        reject(path, f"is not finite at index {int(np.argmin(np.isfinite(array)))}")
    return array


def need_array(value: Any, path: str) -> Array:
    """Return a request's array or tensor as it is; raise ValueError if it is none, is not dense, or
    is of a subclass, for what that says of its values would be lost: a mask, a unit."""
    if is_array(value):
        return value
    name = type(value).__name__
    if isinstance(value, torch.Tensor) and is_plain(value):
        layout = "nested" if value.is_nested else value.layout
        reject(path, f"must be a dense tensor, got {layout} on {value.device}")
    if isinstance(value, Array):
        reject(path, f"must be a plain array or tensor, got {name}, which says more of its values")
    reject(path, f"must be a list, a numpy array or a torch tensor, got {show(value)}")


def floats_of(array: Array, path: str) -> torch.Tensor:
    """Return the values of an array as a CPU tensor of a dtype that torch computes in; raise
    ValueError if they are no floats."""
    if isinstance(array, torch.Tensor):
        if array.is_floating_point() and array.dtype != torch.float4_e2m1fn_x2:  # pairs in bytes
            return array.detach().cpu().resolve_neg()
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # of long doubles; who needs finite ones looks
            return torch.from_numpy(array.astype(f"=f{min(array.itemsize, 8)}"))
    reject(path, f"must be of a float dtype, got {array.dtype}")


def unit(vector: np.ndarray) -> np.ndarray:
    """A float64 vector that is not zero, brought to length 1."""
    # By the largest entry first: a square may overflow, or underflow to 0.
    scaled: np.ndarray = vector / np.abs(vector).max()
    return scaled / np.linalg.norm(scaled)


def pack_unit(direction: np.ndarray, path: str) -> bytes:
    """Scale a float64 direction [width] to length 1, as float32 bytes, native endian; raises
    ValueError if it is zero."""
    largest = np.abs(direction).max()
    if largest == 0:
        reject(path, "is zero: it has no direction")
    scaled = direction / largest
    if abs(np.linalg.norm(scaled) * largest - 1) > np.finfo(np.float32).eps:
        direction = unit(scaled)
    # Else it is one that was rounded, which stays as it is: so a saved module is loaded.
    return pack_float32(direction, path)


def pack_float32(values: np.ndarray, path: str) -> bytes:
    """Round float64 numbers to float32, as bytes, native endian; raises ValueError for one that
    is too large."""
    with np.errstate(over="ignore"):
        packed = values.astype(np.float32)
    if not np.isfinite(packed).all():
        reject(path, "overflows float32")
    return packed.tobytes()


def vector_set_of(vectors: Vectors) -> VectorSet:
    """Make a vector set of `vectors`, rounded once to float32."""
    sites = sorted(vectors, key=site_order)
    widths = tuple(len(vectors[site]) for site in sites)
    rows = np.concatenate([vectors[site] for site in sites]).astype(np.float32)
    data, largest = rows.tobytes(), float(max(rows.max(), -rows.min()))
    names = ",".join(f"{point}.{layer}" for point, layer in sites)
    widths = widths if len(set(widths)) > 1 else widths[:1]
    return VectorSet(digest_of(f"{widths};{names};", data), sites, data, largest, widths)


def add_up(tiers: Iterable[Vectors]) -> Vectors:
    """Sum vectors site by site, in float64."""
    total: Vectors = {}
    for tier in tiers:
        for site, vector in tier.items():
            total[site] = total[site] + vector if site in total else vector
    return total


def largest_sum(shape: TapShape) -> float:
    """The largest number that the vectors of a request may add up to, and those of the global tiers
    as well: half the largest of the model's dtype, so that together they never overflow."""
    return float(torch.finfo(shape.torch_dtype).max) / 2


def need_finite_sum(vectors: Vectors, path: str, shape: TapShape) -> None:
    """Raise ValueError if a sum of vectors is too large for the model's dtype."""
    for (point, layer), vector in vectors.items():
        if not np.abs(vector).max() <= largest_sum(shape):  # so that NaN is refused, too
            reject(
                path,
                f"the sum of all vectors at {point} layer {layer} overflows half of {shape.dtype}",
            )


def digest_of(text: str, data: bytes = b"") -> str:
    """Hex SHA-256 over canonical text and bytes."""
    # No free text, so no two things share canonical bytes.
    return hashlib.sha256(text.encode() + data).hexdigest()


def norms_of(vector_set: VectorSet) -> dict[str, dict[int, float]]:
    """Euclidean norms of a set's vectors: point -> layer -> norm."""
    norms: dict[str, dict[int, float]] = {}
    for (point, layer), row in zip(vector_set.sites, vector_set.rows, strict=True):
        norms.setdefault(point, {})[layer] = float(np.linalg.norm(row.astype(np.float64)))
    return norms


def sum_digest(
    sets: Sequence[tuple[str, float]], factors: Sequence[tuple[Site, bytes]] = ()
) -> str:
    """The digest of a sum of vector sets (digest, scale), and of the factors of heads, float32.

    Equal ones are equal bit for bit: workers add in the order of `sets`, which matters in float32
    but for two of scale 1.
    """
    if len(sets) == 2 and sets[0][1] == sets[1][1] == 1:
        sets = sorted(sets)
    text = ";".join(f"{digest}*{scale.hex()}" for digest, scale in sets)
    text += "".join(f"|{point}.{layer}" for (point, layer), _ in factors)
    return digest_of(text, b"".join(numbers for _, numbers in factors))


def vectors_of(vector_set: VectorSet) -> Vectors:
    """The vectors of a set as float64."""
    rows = (row.astype(np.float64) for row in vector_set.rows)
    return dict(zip(vector_set.sites, rows, strict=True))
