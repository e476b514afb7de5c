# SPDX-License-Identifier: Apache-2.0
"""Probe of one layer or of several: weights, a head and a pool."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from vllm.v1.probes.heads import Linear, Mlp
from vllm.v1.probes.pools import AnyPool, Each

Site = tuple[str, int]
"""Point and layer."""

Rows = np.ndarray | torch.Tensor


@dataclass(frozen=True, eq=False)
class ServedProbe:
    """Probe as rules take it: `{"name": "lies", "probe": probe, "threshold": 0.5}`.

    The score of the t-th row is pool(head(W x))_t, where x are the rows of all sites, one after the
    other.
    """

    sites: tuple[Site, ...]
    weight: np.ndarray
    """W, float32 [units, sites, hidden]."""
    head: Linear | Mlp = field(default_factory=Linear)
    pool: AnyPool = field(default_factory=Each)
    threshold: float | None = None
    """Scores above it fire a rule that gives no threshold."""
    about: dict[str, Any] = field(default_factory=dict)
    """Words of whoever made it, as JSON takes them: how it was trained and calibrated."""

    def __post_init__(self) -> None:
        """Check that its parts fit together.

        Raises:
            ValueError: they do not, or a weight is not finite; the message names the part.
        """
        if self.weight.ndim != 3 or self.weight.dtype != np.float32:
            raise ValueError("weight: must be float32 [units, sites, hidden]")
        units, sites, _ = self.weight.shape
        if sites != len(self.sites) or not sites:
            raise ValueError(f"weight: is of {sites} sites, {len(self.sites)} are named")
        if len(set(self.sites)) < sites:
            raise ValueError("sites: one is named twice")
        if units != self.head.units:
            raise ValueError(f"bias: has {self.head.units} numbers, the weight has {units} units")
        if not self.pool.takes(self.head.outputs):
            raise ValueError(f"pool: needs {self.pool.wants}, the head has {self.head.outputs}")
        if not np.isfinite(self.weight).all():
            raise ValueError("weight: is not finite")

    def __repr__(self) -> str:
        """Say its parts, not its numbers."""
        at = ", ".join(f"{point}.{layer}" for point, layer in self.sites)
        units, _, hidden = self.weight.shape
        return f"ServedProbe({self.head.kind}, {self.pool.kind}, {units} x {hidden} at {at})"

    @property
    def hidden_size(self) -> int:
        """Width of the rows."""
        return int(self.weight.shape[2])

    def fields(self) -> dict[str, Any]:
        """Return it as a rule has it over HTTP: `SteeringClient` packs its arrays."""
        made: dict[str, Any] = {
            "sites": [[*site] for site in self.sites],
            "weight": self.weight.reshape(-1, self.hidden_size),
            "pool": msgspec.to_builtins(self.pool),
            **self.head.fields(),
        }
        return made if self.threshold is None else {**made, "threshold": self.threshold}

    def numbers(self, rows: Rows) -> np.ndarray:
        """Return the head's numbers of rows, before the pool.

        Args:
            rows: [n, sites, hidden]; [n, hidden] of a probe of one site.

        Returns:
            float64 [n, outputs].
        """
        if isinstance(rows, torch.Tensor):
            rows = rows.double().numpy()
        wide = rows.astype(np.float64)
        if wide.ndim == 2 and len(self.sites) == 1:
            wide = wide[:, None]
        if wide.ndim != 3 or wide.shape[1:] != self.weight.shape[1:]:
            raise ValueError(
                f"rows: have shape {list(wide.shape)}, the probe needs "
                f"[n, {len(self.sites)}, {self.hidden_size}]"
            )
        return self.head.numbers(np.einsum("nsh,ush->nu", wide, self.weight.astype(float)))

    def scores(self, rows: Rows) -> np.ndarray:
        """Return the score at each row of one completion, as a rule that looks at these rows sees
        it, up to rounding: a rule's products are float32.

        Args:
            rows: as `numbers` takes them, in the order of their positions.

        Returns:
            float64 [n].
        """
        numbers = self.numbers(rows)
        return self.pool.scores(numbers) if len(numbers) else np.empty(0)
