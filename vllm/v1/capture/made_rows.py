# SPDX-License-Identifier: Apache-2.0
"""Results that the device made of rows, as a user gets them back: the part that all kinds share."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import numpy as np
import torch

from vllm.v1.capture.copies import joined


class MadeRows:
    """Results that the device made of the rows of one site, in position order.

    A result that was not asked for raises ValueError when it is read. All results are float32 on
    the CPU, but for positions and ids.

    Args:
        values: [n, width], or what returns them, called when they are first read.
    """

    positions: np.ndarray
    """The positions of the rows, int64 [n]."""
    token_ids: np.ndarray
    """The token of each, int64 [n]."""
    versions: np.ndarray
    """The version of the global steering that each ran under, int64 [n], see `llm.steering`."""
    tokens: list[str] | None
    """The text of each row's token, where the capture says `"tokens": true`."""

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        values: torch.Tensor | Callable[[], torch.Tensor],
        versions: np.ndarray,
    ) -> None:
        self.positions, self.token_ids, self.versions = positions, token_ids, versions
        self.tokens = None
        self._values = values

    def at(self, position: int) -> Self:
        """Return what there is of one position, n = 1.

        Raises:
            KeyError: that position was not captured.
        """
        found = np.flatnonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} was not captured, these were: {self.positions}")
        one = copy(self)
        one.positions, one.token_ids = self.positions[found], self.token_ids[found]
        one.versions, one._values = self.versions[found], self._rows()[torch.from_numpy(found)]
        one.tokens = None if self.tokens is None else [self.tokens[int(found[0])]]
        return one

    def joined(self, later: Self) -> Self:
        """These rows and then `later`'s, of the same capture."""
        both = copy(self)
        both.positions = np.concatenate([self.positions, later.positions])
        both.token_ids = np.concatenate([self.token_ids, later.token_ids])
        both.versions = np.concatenate([self.versions, later.versions])
        both._values = joined([self._rows(), later._rows()])
        if later.tokens is not None:
            both.tokens = [*(self.tokens or ()), *later.tokens]
        return both

    def _rows(self) -> torch.Tensor:
        if not isinstance(self._values, torch.Tensor):
            # Of its own: others' rows of the step lie around it.
            self._values = joined([self._values()])
        return self._values

    def __len__(self) -> int:
        return len(self.positions)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": self._rows()}
