# SPDX-License-Identifier: Apache-2.0
"""Matrices and directions that a request may multiply rows with: of `project`, and of modules."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.config.capture import PROJECTION_ROWS
from vllm.config.points import HEAD_POINTS, RESIDUAL_POINTS
from vllm.config.steering import MAX_MODULES
from vllm.v1.interventions.errors import need_mapping, reject, show, show_key
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_layers, need_one_lane, need_point
from vllm.v1.interventions.values import Array, plain_list
from vllm.v1.interventions.vectors import need_array, need_vector


def matrix_digest(matrix: bytes, shape: TapShape) -> str:
    """The digest by which a plan names a matrix, float32 [k, hidden]."""
    return hashlib.sha256(b"%d:" % shape.hidden_size + matrix).hexdigest()


def matrices_of(
    value: Any,
    path: str,
    shape: TapShape,
    sites: list[Site],
    work: Work,
    catalog: ModuleCatalog | None = None,
) -> list[bytes]:
    """The bytes of the matrices of `project`, float32 [k, hidden]: of one for all sites, or of each
    of them, from `{point: {layers: matrix}}` or the directions of `{"modules": names}`.
    """
    if any(point in HEAD_POINTS for point, _ in sites):
        reject(path, "is for the residual stream; leave out q, k, v and z")
    if isinstance(value, Mapping) and "modules" in value:
        if catalog is None:
            reject(f"{path}.modules", "names of modules belong to requests; give the matrix")
        need_one_lane(f"{path}.modules", shape)
        value = _directions(value, path, sites, catalog, work)
    if not isinstance(value, Mapping):
        data = _matrix(value, path, shape)
        work.charge(len(data) >> 10, Unit.KILOBYTE, path)
        return [data]
    made: dict[Site, bytes] = {}
    for key, entries in value.items():
        point = need_point(key, f"{path}.{show_key(key)}", shape, RESIDUAL_POINTS)
        for layers, matrix in need_mapping(entries, f"{path}.{point}").items():
            at = f"{path}.{point}.{show_key(layers)}"
            data = _matrix(matrix, at, shape)
            work.charge(len(data) >> 10, Unit.KILOBYTE, at)
            for layer in need_layers(layers, point, at, shape):
                if (point, layer) in made or (point, layer) not in sites:
                    twice = (point, layer) in made
                    reject(at, f"layer {layer} is {'named twice' if twice else 'not in hooks'}")
                made[point, layer] = data
                if len(data) != len(next(iter(made.values()))):
                    reject(at, "has another number of rows than the first matrix")
    if lacks := [site for site in sites if site not in made]:
        reject(path, f"has no matrix for {lacks[0][0]} at layer {lacks[0][1]}")
    matrices = [made[site] for site in sites]
    return matrices if len(set(matrices)) > 1 else matrices[:1]


def _directions(
    value: Mapping[Any, Any], path: str, sites: list[Site], catalog: ModuleCatalog, work: Work
) -> dict[str, dict[int, np.ndarray]]:
    """The directions of modules as `{point: {layer: [names, hidden]}}`."""
    names = plain_list(value["modules"])
    if not names or len(value) > 1 or len(names) > MAX_MODULES:
        reject(path, f"must be {{'modules': names}} alone, with 1-{MAX_MODULES} names")
    matrices: dict[str, dict[int, np.ndarray]] = {}
    for point, layer in sites:
        rows = [
            direction_of(name, f"{path}.modules[{i}]", (point, layer), catalog, work)
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


def _matrix(value: Any, path: str, shape: TapShape) -> bytes:
    """Bytes of float32 [k, hidden], from a list of vectors, a 2-D array or a 2-D tensor."""
    if isinstance(value, Array):
        if need_array(value, path).ndim != 2:
            reject(path, f"has shape {list(value.shape)}, the model needs [k, {shape.hidden_size}]")
    elif not isinstance(value, list):
        reject(path, f"must be a list of lists, a numpy array or a torch tensor, got {show(value)}")
    k, most = len(value), shape.row_bytes // 4
    if not 1 <= k <= min(most, PROJECTION_ROWS):
        reject(
            path,
            f"has {k} rows, allowed are 1-{min(most, PROJECTION_ROWS)}: scores may take no more "
            f"bytes than the row they are made of, and the engine holds {PROJECTION_ROWS} rows of "
            "matrices",
        )
    rows = [need_vector(row, f"{path}[{i}]", shape.hidden_size) for i, row in enumerate(value)]
    with np.errstate(over="ignore"):
        matrix = np.stack(rows).astype(np.float32)
    if not np.isfinite(matrix).all():
        reject(path, "overflows float32")
    return matrix.tobytes()
