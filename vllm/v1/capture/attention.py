# SPDX-License-Identifier: Apache-2.0
"""Attention weights as a user gets them back."""

import torch

from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.interventions.makings import Attention


class AttentionRows(MadeRows[Attention]):
    """Values that were asked of one layer's attention weights, by query in position order.

    Args:
        values: [n, width], as `Attention` says, or a function that returns them, called when
            they are first read.
    """

    heads: tuple[int, ...]
    """The numbers of the heads; with `"sum": "all"` none."""

    @property
    def ranges(self) -> tuple[str, ...]:
        """The names of the key ranges, in the order of the columns of `mass` and `peak`."""
        return self._making.names

    @property
    def mass(self) -> torch.Tensor:
        """The sum of the weights of each range's keys, [n, heads, ranges]."""
        return self._field("mass")

    @property
    def peak(self) -> torch.Tensor:
        """The largest weight of each range's keys, [n, heads, ranges]."""
        return self._field("peak")

    @property
    def top_positions(self) -> torch.Tensor:
        """The keys with the largest weights, the largest first: int32 [n, heads, top], -1 where
        fewer have any."""
        return self._field("top_positions")

    @property
    def top_weights(self) -> torch.Tensor:
        """Their weights, [n, heads, top]."""
        return self._field("top_weights")

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of all keys up to the query's own, t: n tensors [heads, t + 1], summed
        [t + 1]."""
        rows = self._rows() if self._making.sum else self._field("weights")
        return [row[..., : t + 1] for row, t in zip(rows, self.positions.tolist(), strict=True)]

    def _field(self, name: str) -> torch.Tensor:
        if self._making.sum:
            raise self._not_given(name)
        return super()._field(name)

    def _not_given(self, name: str) -> ValueError:
        summed = f", summed over {self._making.sum}" if self._making.sum else ""
        return ValueError(f"{super()._not_given(name)}{summed}")

    def __repr__(self) -> str:
        """Say how many queries these are and what there is of them."""
        return f"AttentionRows({len(self)} queries, positions={self.positions}, give={self.give})"
