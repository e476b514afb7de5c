# SPDX-License-Identifier: Apache-2.0
"""Compose a request's tiers into what the steering table holds."""

import hashlib

import numpy as np
import torch

from vllm.v1.interventions import Content, TapShape
from vllm.v1.sites import reject, site_order
from vllm.v1.steering.spec import Vectors


def compose(tiers: list[Vectors], path: str, shape: TapShape) -> Content | None:
    """Sum `tiers` site by site in float64 and cast once to the model's dtype.

    Returns None if no tier says anything. A sum that happens to be zero is a content all the
    same: it takes a slot and runs through the same code as any other.

    Raises:
        ValueError: the sum overflows the model's dtype.
    """
    total: Vectors = {}
    with np.errstate(over="ignore", invalid="ignore"):  # looked at below
        for tier in tiers:
            for site, vector in tier.items():
                total[site] = total[site] + vector if site in total else vector
    if not total:
        return None
    sites = sorted(total, key=site_order)
    rows = torch.from_numpy(np.stack([total[site] for site in sites])).to(shape.torch_dtype)
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():
        point, layer = sites[int(finite.int().argmin())]
        reject(path, f"the sum of all tiers at {point} layer {layer} overflows {shape.dtype}")
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return Content(digest=_digest(sites, data, shape), sites=sites, data=data)


def rows_of(content: Content, shape: TapShape) -> torch.Tensor:
    """[sites, hidden] in the model's dtype, a copy."""
    flat = torch.frombuffer(bytearray(content.data), dtype=shape.torch_dtype)
    return flat.view(len(content.sites), shape.hidden_size)


def _digest(sites: list[tuple[str, int]], data: bytes, shape: TapShape) -> str:
    # The header has no free text, so no two contents share canonical bytes.
    names = ",".join(f"{point}.{layer}" for point, layer in sites)
    header = f"{shape.dtype};{shape.hidden_size};{names};".encode()
    return hashlib.sha256(header + data).hexdigest()
