# SPDX-License-Identifier: Apache-2.0
"""The mean of rows, of the sums of them that steps send."""

import numpy as np
import torch

from vllm.v1.interventions.plan import Stream
from vllm.v1.interventions.positions import Positions


class RunningMean:
    """The mean of one completion's rows at the positions of a stream of sums.

    Sums come in the order of steps. A request that is preempted begins anew, in steps of other
    lengths: a sum that has the first position takes the place of all before it, and one that does
    not go on where the last ended is left out.
    """

    def __init__(self, stream: Stream) -> None:
        self._wanted = Positions.from_flat(stream.runs)
        self._first = self._next = self._wanted.first_from(0)
        self._total: torch.Tensor | None = None
        self.positions = np.empty(0, dtype=np.int64)
        """The positions added up so far, int64 [n]."""
        self.version = 0
        """The version of the global steering that the last of them ran under."""

    def add(self, positions: np.ndarray, sums: torch.Tensor, version: int) -> None:
        """Take a step.

        Args:
            positions: what the request captured in it, int64 [n].
            sums: of those of the stream, float32 [sites, hidden].
        """
        own = positions[self._wanted.mask(positions)]
        if not len(own) or self._next is None:
            return
        if own[0] == self._first:
            self._total, self.positions = None, own
        elif own[0] == self._next:
            self.positions = np.concatenate([self.positions, own])
        else:
            return
        self._total = sums.clone() if self._total is None else self._total + sums
        self._next = self._wanted.first_from(int(own[-1]) + 1)
        self.version = version

    def value(self) -> torch.Tensor | None:
        """The mean, float32 [sites, hidden]; None until all positions were added."""
        if self._next is not None or self._total is None:
            return None
        return self._total / len(self.positions)
