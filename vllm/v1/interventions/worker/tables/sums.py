# SPDX-License-Identifier: Apache-2.0
"""Device side of additive steering: the table of summed vectors, and what its rows are made of."""

import numpy as np
import torch

from vllm.config.points import HEAD_POINTS
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.messages import GLOBALS_ALONE, ROWS_PER_SLOT, StepInterventions
from vllm.v1.interventions.plan import Site, VectorSet, VectorSum
from vllm.v1.interventions.shape import TapShape

_EMPTY = VectorSum(digest="", sets=[])

_Rows = tuple[torch.Tensor, torch.Tensor]
"""Index [n] of sites of the table, and float32 [n, widest], zeros behind a site's own width."""


class SteeringTable:
    """The table, per slot one row of every site for prompt positions and one for generated ones.

    A row is the sum of its slot's vector sets and of the global tiers of its phase, in float32,
    cast once. Vector sets are kept on the host, so a change of the global tiers sends only these.

    Where heads are steered, all tensor-parallel ranks hold rows of all heads, and use the columns
    of their own.

    Args:
        sites: those of this worker that may be steered.
        num_rows: rows of the table at each site.
        shape: of the model.
        scales: whether heads may be scaled.
        rank: the tensor-parallel one, of `ranks`.
    """

    def __init__(
        self,
        sites: list[Site],
        num_rows: int,
        shape: TapShape,
        device: torch.device,
        scales: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._shape = shape
        widest = max(map(shape.row_width, sites), default=shape.hidden_size)
        size, dtype = (len(sites), num_rows, widest), shape.torch_dtype
        self._rows = torch.zeros(size, dtype=dtype, device=device)
        self._index = {site: i for i, site in enumerate(sites)}
        heads = [i for i, (point, _) in enumerate(sites) if scales and point in HEAD_POINTS]
        self._heads = torch.tensor(heads, dtype=torch.int64)
        self._factors = torch.ones(len(heads), *size[1:], device=device)
        self.at: dict[Site, torch.Tensor] = {}
        """Site -> [rows, hidden], of heads [rows, this rank's heads * width], a view."""
        self.factors: dict[Site, torch.Tensor] = {}
        """Site of heads -> float32 of the same size, a view; empty without `scales`."""
        for site, i in self._index.items():
            first, width = 0, shape.row_width(site)
            if site[0] in HEAD_POINTS:
                width //= ranks
                first = rank * width
            columns = slice(first, first + width)
            self.at[site] = self._rows[i, :, columns]
            if i in heads:
                self.factors[site] = self._factors[heads.index(i), :, columns]
        self._sets: dict[str, _Rows] = {}
        self._tiers: dict[str, _Rows] = {}
        self._slots: dict[int, tuple[VectorSum, bool]] = {}

    def take(self, step: StepInterventions) -> None:
        """Take over new vector sets and global tiers, and drop sets: the sums that are made of them
        are to be overwritten."""
        for vector_set in step.new_sets:
            self._sets[vector_set.digest] = self._own(vector_set)
        if step.tiers is not None:
            self._tiers = {
                tier: self._own(vector_set) for tier, vector_set in step.tiers.tiers.items()
            }
            self._write(GLOBALS_ALONE, _EMPTY, inherit=True)
            for slot, (vector_sum, inherit) in self._slots.items():
                if inherit:
                    self._write(slot, vector_sum, inherit)
        for digest in step.dropped_sets:
            del self._sets[digest]

    def write(self, placed: list[tuple[int, tuple[VectorSum, bool]]]) -> None:
        """Write sums into slots, see `StepInterventions.placed`."""
        for slot, (vector_sum, inherit) in placed:
            self._slots[slot] = vector_sum, inherit
            self._write(slot, vector_sum, inherit)

    def forget(self) -> None:
        """Zero the table: the device's memory was lost."""
        self._rows.zero_()
        self._factors.fill_(1)
        self._sets.clear()
        self._tiers.clear()
        self._slots.clear()

    def _own(self, vector_set: VectorSet) -> _Rows:
        """A set's sites here and its vectors; other stages have the rest."""
        pairs = zip(vector_set.sites, vector_set.rows, strict=True)
        here = [(self._index[site], row) for site, row in pairs if site in self._index]
        rows = np.zeros((len(here), self._rows.shape[2]), np.float32)
        for padded, (_, row) in zip(rows, here, strict=True):
            padded[: len(row)] = row
        return torch.tensor([i for i, _ in here], dtype=torch.int64), torch.from_numpy(rows)

    def _write(self, slot: int, vector_sum: VectorSum, inherit: bool) -> None:
        num_sites, _, widest = self._rows.shape
        shared = torch.zeros(num_sites, widest)
        for digest, scale in vector_sum.sets:
            index, rows = self._sets[digest]
            shared.index_add_(0, index, rows, alpha=scale)
        factors = torch.ones(num_sites, widest) if vector_sum.factors else None
        for site, numbers in vector_sum.factors:
            if factors is not None and site in self._index:
                of_heads = torch.frombuffer(bytearray(numbers), dtype=torch.float32)
                width = self._shape.row_width(site)
                columns = of_heads.repeat_interleave(width // len(of_heads))
                factors[self._index[site], :width] = columns
        phases = [shared, shared]
        if inherit and self._tiers:
            self._add_tier(shared, "base", factors)
            phases = [self._with_tier(shared, tier, factors) for tier in ("prefill", "decode")]
        # Cast on the host: half the bytes to move.
        values = torch.stack(phases, dim=1).to(self._rows.dtype)
        self._put(self._rows, slot, values)
        if factors is not None:
            self._put(self._factors, slot, factors[self._heads, None])
        else:
            first = ROWS_PER_SLOT * slot
            self._factors[:, first : first + ROWS_PER_SLOT].fill_(1)

    def _put(self, table: torch.Tensor, slot: int, values: torch.Tensor) -> None:
        first = ROWS_PER_SLOT * slot
        async_tensor_h2d(values, out=table[:, first : first + ROWS_PER_SLOT])

    def _with_tier(
        self, rows: torch.Tensor, tier: str, factors: torch.Tensor | None
    ) -> torch.Tensor:
        if tier not in self._tiers:
            return rows
        rows = rows.clone()
        self._add_tier(rows, tier, factors)
        return rows

    def _add_tier(self, rows: torch.Tensor, tier: str, factors: torch.Tensor | None) -> None:
        if tier in self._tiers:
            index, vectors = self._tiers[tier]
            rows.index_add_(0, index, vectors if factors is None else vectors * factors[index])
