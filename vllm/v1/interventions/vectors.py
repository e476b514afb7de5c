# SPDX-License-Identifier: Apache-2.0
"""Parser of steering vectors in requests: it checks them and composes nothing."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.config.points import STEERING_POINTS, STREAM_POINTS
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.given import Given, Select
from vllm.v1.interventions.plan import Site, VectorSet
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.values import is_array

Vectors = dict[Site, np.ndarray]
"""Site -> float64 [hidden], of all lanes [lanes * hidden], of z [heads * width]; scale applied."""
AnyVectors = Mapping[Site, np.ndarray]
"""`Vectors` that are there, or are made when they are asked for."""


class RowsOf(AnyVectors):
    """Vectors that are made float64 when they are asked for: few are, as a rule none.

    Args:
        places: site -> where its vector is in `numbers`.
        numbers: float32 or float64, of all sites.
    """

    def __init__(self, places: Mapping[Site, slice], numbers: np.ndarray) -> None:
        self._places, self._numbers = places, numbers

    def __getitem__(self, site: Site) -> np.ndarray:
        return self._numbers[self._places[site]].astype(np.float64)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes that it keeps of its own."""
        return self._numbers.nbytes if self._numbers.flags.owndata else 0


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
    for point_key, entries in Given(value, path).items():
        point = point_key.point(shape, STEERING_POINTS)
        many = is_array(entries.value) and entries.value.ndim > 1
        each = "for a vector of each layer: dict(enumerate(rows))"
        entries.mapping(each if many else "name the layer: {2: v}")
        for layers_key, entry in entries.items():
            layers = layers_key.layers(point, shape)
            widths = {shape.row_width((point, layer)) for layer in layers}
            width = need_one_width(point, widths, entry.path)
            lanes = shape.lanes if point in STREAM_POINTS else 1
            vector, positions = _entry(entry, width, select, lanes)
            for layer in layers:
                if (point, layer) in seen:
                    entry.refuse(f"layer {layer} is already given by another entry")
                seen.add((point, layer))
            vectors = {(point, layer): vector for layer in layers}
            if positions is None:
                everywhere |= vectors
            else:
                limited.append((vectors, positions))
    return [(everywhere, None), *limited]


def _entry(
    entry: Given, width: int, select: Select, lanes: int
) -> tuple[np.ndarray, Positions | None]:
    if not isinstance(entry.value, Mapping):
        return np.resize(entry.of_lanes(width // lanes, lanes), width), None
    lane = ("lane",) if lanes > 1 else ()
    fields = entry.fields(allowed=("vector", "scale", *lane, "positions"))
    if "vector" not in fields:
        entry.refuse("'vector' is missing")
    scale = fields.get("scale", 1.0).number()
    positions = fields["positions"].positions(select) if "positions" in fields else None
    if fields["lane"].value is None:
        vector = np.resize(fields["vector"].of_lanes(width // lanes, lanes), width)
    else:
        rows = np.zeros((lanes, width // lanes))
        rows[fields["lane"].lane(lanes)] = fields["vector"].vector(width // lanes)
        vector = rows.ravel()
    with np.errstate(over="ignore"):  # the sum is looked at
        return vector * scale, positions


def need_one_width(point: str, widths: set[int], path: str) -> int:
    """The width of a point's rows at several layers; raises ValueError if they have several."""
    if len(widths) > 1:
        reject(
            path, f"rows of {point} have widths {sorted(widths)} at these layers, name them apart"
        )
    return widths.pop()


def unit(vector: np.ndarray) -> np.ndarray:
    """A float64 vector that is not zero, brought to length 1."""
    # By the largest entry first: a square may overflow, or underflow to 0.
    scaled: np.ndarray = vector / np.abs(vector).max()
    return scaled / np.linalg.norm(scaled)


def need_unit(direction: np.ndarray, path: str) -> np.ndarray:
    """Scale a float64 direction [width] to length 1; raises ValueError if it is zero."""
    largest = np.abs(direction).max()
    if largest == 0:
        reject(path, "is zero: it has no direction")
    scaled = direction / largest
    # One that was rounded stays as it is: so a saved module is loaded.
    rounded = abs(np.linalg.norm(scaled) * largest - 1) <= np.finfo(np.float32).eps
    return direction if rounded else unit(scaled)


def pack_unit(direction: np.ndarray, path: str) -> bytes:
    """Pack what `need_unit` makes as float32 bytes, native endian."""
    return pack_float32(need_unit(direction, path), path)


def pack_float32(values: np.ndarray, path: str) -> bytes:
    """Round float64 numbers to float32, as bytes, native endian; raises ValueError for one that
    is too large."""
    with np.errstate(over="ignore"):
        packed = values.astype(np.float32)
    if not np.isfinite(packed).all():
        reject(path, "overflows float32")
    return packed.tobytes()


def vector_set_of(vectors: AnyVectors) -> VectorSet:
    """Make a vector set of `vectors`, rounded once to float32."""
    sites = sorted(vectors, key=site_order)
    widths = tuple(len(vectors[site]) for site in sites)
    rows = np.concatenate([vectors[site] for site in sites]).astype(np.float32)
    return packed_set(sites, widths, rows.tobytes(), float(max(rows.max(), -rows.min())))


def packed_set(
    sites: list[Site], widths: tuple[int, ...], data: bytes, largest: float
) -> VectorSet:
    """Make a vector set of `data`, in which sites are in the order of the stream; the others are as
    `VectorSet` has them, `widths` of each site."""
    names = ",".join(f"{point}.{layer}" for point, layer in sites)
    widths = widths if len(set(widths)) > 1 else widths[:1]
    return VectorSet(digest_of(f"{widths};{names};", data), sites, data, largest, widths)


def add_up(tiers: Iterable[AnyVectors]) -> Vectors:
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


def need_finite_sum(vectors: AnyVectors, path: str, shape: TapShape) -> None:
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
    digest = hashlib.sha256(text.encode())
    digest.update(data)  # apart: it may be megabytes, which would be copied
    return digest.hexdigest()


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
