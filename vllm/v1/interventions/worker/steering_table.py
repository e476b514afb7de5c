# SPDX-License-Identifier: Apache-2.0
"""Device side of additive steering: the table of summed vectors, and what its rows are made of."""

import torch

from vllm.v1.interventions.messages import (
    GLOBALS_ALONE,
    ROWS_PER_SLOT,
    StepInterventions,
)
from vllm.v1.interventions.plan import Site, VectorSet, VectorSum

_EMPTY = VectorSum(digest="", sets=[])


class SteeringTable:
    """The table, per slot one row of every site for prompt positions and one for generated ones.

    A row is the sum of its slot's vector sets and of the global tiers of its phase, in float32,
    cast once. Vector sets are kept on the host, so a change of the global tiers sends only these.

    Args:
        sites: those of this worker that may be steered.
        num_rows: rows of the table at each site.
    """

    def __init__(
        self,
        sites: list[Site],
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rows = torch.zeros(len(sites), num_rows, hidden_size, dtype=dtype, device=device)
        self.at: dict[Site, torch.Tensor] = dict(zip(sites, self._rows, strict=True))
        """Site -> [rows, hidden], a view."""
        self._index = {site: i for i, site in enumerate(sites)}
        self._sets: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tiers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots: dict[int, tuple[VectorSum, bool]] = {}

    def apply(self, step: StepInterventions) -> None:
        """Take over new vector sets, sums and global tiers."""
        for vector_set in step.new_sets:
            self._sets[vector_set.digest] = self._own(vector_set)
        changed = {slot: (vector_sum, inherit) for slot, vector_sum, inherit in step.sums}
        self._slots |= changed
        if step.tiers is not None:
            self._tiers = {
                tier: self._own(vector_set) for tier, vector_set in step.tiers.tiers.items()
            }
            self._write(GLOBALS_ALONE, _EMPTY, inherit=True)
            changed = {s: (c, i) for s, (c, i) in self._slots.items() if i or s in changed}
        for slot, (vector_sum, inherit) in changed.items():
            self._write(slot, vector_sum, inherit)
        for digest in step.dropped_sets:
            del self._sets[digest]

    def forget(self) -> None:
        """Zero the table: the device's memory was lost."""
        self._rows.zero_()
        self._sets.clear()
        self._tiers.clear()
        self._slots.clear()

    def _own(self, vector_set: VectorSet) -> tuple[torch.Tensor, torch.Tensor]:
        """Index [n] of a set's sites here, and float32 [n, hidden]; other stages have the rest."""
        here = [i for i, site in enumerate(vector_set.sites) if site in self._index]
        index = torch.tensor([self._index[vector_set.sites[i]] for i in here], dtype=torch.int64)
        return index, torch.from_numpy(vector_set.rows[here])

    def _write(self, slot: int, vector_sum: VectorSum, inherit: bool) -> None:
        num_sites, _, hidden_size = self._rows.shape
        shared = torch.zeros(num_sites, hidden_size)
        for digest, scale in vector_sum.sets:
            index, rows = self._sets[digest]
            shared.index_add_(0, index, rows, alpha=scale)
        phases = [shared, shared]
        if inherit and self._tiers:
            self._add_tier(shared, "base")
            phases = [self._with_tier(shared, "prefill"), self._with_tier(shared, "decode")]
        # Cast on the host: half the bytes to move.
        values = torch.stack(phases, dim=1).to(self._rows.dtype)
        if self._rows.is_cuda:
            values = values.pin_memory()
        first = ROWS_PER_SLOT * slot
        self._rows[:, first : first + ROWS_PER_SLOT].copy_(values, non_blocking=True)

    def _with_tier(self, rows: torch.Tensor, tier: str) -> torch.Tensor:
        if tier not in self._tiers:
            return rows
        rows = rows.clone()
        self._add_tier(rows, tier)
        return rows

    def _add_tier(self, rows: torch.Tensor, tier: str) -> None:
        if tier in self._tiers:
            index, vectors = self._tiers[tier]
            rows.index_add_(0, index, vectors)
