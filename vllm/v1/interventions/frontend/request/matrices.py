# SPDX-License-Identifier: Apache-2.0
"""Matrices and directions that a request may multiply rows with: of `project`, and of modules."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vllm.config.capture import PROJECTION_ROWS
from vllm.config.points import READ_POINTS, RESIDUAL_POINTS
from vllm.config.steering import MAX_MODULES
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane
from vllm.v1.interventions.values import Array, plain_list
from vllm.v1.interventions.vectors import pack_float32

NOT_OF_STREAM = "is for rows of the residual stream; leave out " + ", ".join(
    point for point in READ_POINTS if point not in RESIDUAL_POINTS
)


def is_of_stream(sites: Iterable[Site]) -> bool:
    """Tell whether the rows of all sites are as wide as a lane of the residual stream."""
    return all(point in RESIDUAL_POINTS for point, _ in sites)


def matrix_digest(matrix: bytes, shape: TapShape) -> str:
    """The digest by which a plan names a matrix, float32 [k, hidden]."""
    return hashlib.sha256(b"%d:" % shape.hidden_size + matrix).hexdigest()


def matrices_of(
    given: Given,
    shape: TapShape,
    sites: list[Site],
    work: Work,
    catalog: ModuleCatalog | None = None,
) -> list[bytes]:
    """The bytes of the matrices of `project`, float32 [k, hidden]: of one for all sites, or of each
    of them, from `{point: {layers: matrix}}` or the directions of `{"modules": names}`.
    """
    if not is_of_stream(sites):
        given.refuse(NOT_OF_STREAM)
    if isinstance(given.value, Mapping) and "modules" in given:
        if catalog is None:
            given["modules"].refuse("names of modules belong to requests; give the matrix")
        need_one_lane(given["modules"].path, shape)
        given = Given(_directions(given, sites, catalog, work), given.path)
    if not isinstance(given.value, Mapping):
        return [_matrix(given, shape, work)]
    made: dict[Site, bytes] = {}
    for key, entries in given.items():
        point = key.point(shape, RESIDUAL_POINTS)
        for layers, matrix in entries.items():
            data = _matrix(matrix, shape, work)
            for layer in layers.layers(point, shape):
                if (point, layer) in made or (point, layer) not in sites:
                    twice = (point, layer) in made
                    layers.refuse(f"layer {layer} is {'named twice' if twice else 'not in hooks'}")
                made[point, layer] = data
                if len(data) != len(next(iter(made.values()))):
                    layers.refuse("has another number of rows than the first matrix")
    if lacks := [site for site in sites if site not in made]:
        given.refuse(f"has no matrix for {lacks[0][0]} at layer {lacks[0][1]}")
    matrices = [made[site] for site in sites]
    return matrices if len(set(matrices)) > 1 else matrices[:1]


def _directions(
    given: Given, sites: list[Site], catalog: ModuleCatalog, work: Work
) -> dict[str, dict[int, np.ndarray]]:
    """The directions of modules as `{point: {layer: [names, hidden]}}`."""
    names = plain_list(given["modules"].value)
    if not names or len(given.value) > 1 or len(names) > MAX_MODULES:
        given.refuse(f"must be {{'modules': names}} alone, with 1-{MAX_MODULES} names")
    matrices: dict[str, dict[int, np.ndarray]] = {}
    for point, layer in sites:
        rows = [
            direction_of(name, f"{given.path}.modules[{i}]", (point, layer), catalog, work)
            for i, name in enumerate(names)
        ]
        matrices.setdefault(point, {})[layer] = np.stack(rows)
    return matrices


def direction_of(
    name: Any, path: str, site: Site, catalog: ModuleCatalog, work: Work
) -> np.ndarray:
    """The base vector of a module at a site, brought to length 1: float64 [hidden].

    Raises:
        ValueError: there is no such module; it has no vector there, or one of zeros.
    """
    direction = catalog.get(name, path).direction(name, site, path)
    work.charge(len(direction) >> 8, Unit.KILOBYTE, path)
    return direction


def _is_vector(given: Given) -> bool:
    """Tell whether a value is one vector, and not a matrix."""
    value = given.value
    if isinstance(value, Array):
        return given.array().ndim == 1
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _matrix(given: Given, shape: TapShape, work: Work) -> bytes:
    """Bytes of float32 [k, hidden], from a list of vectors, a 2-D array or a 2-D tensor; from one
    vector, k = 1."""
    value, hidden = given.value, shape.hidden_size
    if _is_vector(given):
        value = value[None] if isinstance(value, Array) else [value]
        given = Given(value, given.path)
    if isinstance(value, Array):
        if given.array().ndim != 2:
            given.refuse(f"has shape {list(value.shape)}, the model needs [k, {hidden}]")
        if value.shape[0] == hidden != value.shape[1]:
            shape_of = f"{list(value.shape)} (transpose it)"
            given.refuse(f"has shape {shape_of}, the model needs [k, {hidden}]")
    elif not isinstance(value, list):
        given.refuse("must be a list of lists, a numpy array or a torch tensor, got {given}")
    k, most = len(value), min(shape.row_bytes // 4, PROJECTION_ROWS)
    if not 1 <= k <= most:
        given.refuse(
            f"has {k} rows, allowed are 1-{most}: scores may take no more bytes than the row they "
            f"are made of, and the engine holds {PROJECTION_ROWS} rows of matrices"
        )
    rows = [Given(row, f"{given.path}[{i}]").vector(hidden) for i, row in enumerate(value)]
    data = pack_float32(np.stack(rows), given.path)
    work.charge(len(data) >> 10, Unit.KILOBYTE, given.path)
    return data
