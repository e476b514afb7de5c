# SPDX-License-Identifier: Apache-2.0
"""The part that all kinds of results share: what says which token each row is of."""

from collections.abc import Callable
from copy import copy
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from vllm.v1.capture.copies import joined
from vllm.v1.interventions.makings import Making


class TokenRows:
    """Rows of one site, in position order, of any kind.

    Args:
        positions, token_ids, versions: as the attributes.
        texts: returns the text of each row's token, called when they are first read.
    """

    positions: np.ndarray
    """The positions of the rows, int64 [n]. A row has read its token and predicts the next."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]; `NO_TOKEN` for a given embedding."""
    versions: np.ndarray
    """The version of the global steering that each row ran under, int64 [n], see `llm.steering`."""

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        versions: np.ndarray,
        texts: Callable[[], list[str]] | None = None,
    ) -> None:
        self.positions, self.token_ids, self.versions = positions, token_ids, versions
        self._texts: list[str] | Callable[[], list[str]] | None = texts

    @property
    def tokens(self) -> list[str] | None:
        """The text of each row's token, where the capture says `"tokens": true`."""
        if callable(self._texts):
            self._texts = self._texts()
        return self._texts

    def __len__(self) -> int:
        return len(self.positions)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_texts": self.tokens}


M = TypeVar("M", bound=Making)
"""Type of what was made."""


class MadeRows(TokenRows, Generic[M]):
    """Results that the device made of the rows of one site, in position order.

    A result that was not asked for raises ValueError when it is read. All results are float32 on
    the CPU, but for positions and ids.

    Args:
        values: [n, width], or what returns them, called when they are first read.
        making: has the fields of a row, of each head where there are any.
        heads: as the attribute.
    """

    heads: tuple[int, ...]
    """The numbers of the heads; empty if these are not results of heads."""

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        values: torch.Tensor | Callable[[], torch.Tensor],
        versions: np.ndarray,
        making: M,
        texts: Callable[[], list[str]] | None = None,
        heads: tuple[int, ...] = (),
    ) -> None:
        super().__init__(positions, token_ids, versions, texts)
        self._values, self._making, self.heads = values, making, heads

    @property
    def give(self) -> tuple[str, ...]:
        """Names of the results that were asked for."""
        given = (f.given or f.name for f in self._making.fields if f.width)
        return tuple(dict.fromkeys(given))

    @property
    def header(self) -> dict[str, Any]:
        """The keys of an answer over HTTP that say what the rows are, beside `parts`."""
        return {}

    def parts(self) -> dict[str, Any]:
        """The results that there are, by the names of their attributes."""
        return {f.name: getattr(self, f.name) for f in self._making.fields if f.width}

    def _field(self, name: str) -> torch.Tensor:
        """Return the numbers of a field, [n, width], of heads [n, heads, width]."""
        fields = self._making.fields
        at = [field.name for field in fields].index(name)
        if not fields[at].width:
            raise self._not_given(name)
        rows = self._rows()
        if self.heads:
            rows = rows.unflatten(1, (len(self.heads), -1))
        found = rows.split([field.width for field in fields], dim=-1)[at]
        return found.view(torch.int32) if fields[at].dtype == "int32" else found

    def _not_given(self, name: str) -> ValueError:
        [asked] = [f.given or name for f in self._making.fields if f.name == name]
        given = ", ".join(self.give)
        return ValueError(f"{asked!r} was not asked for: the capture gives {given}")

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
        one._texts = None if self.tokens is None else [self.tokens[int(found[0])]]
        return one

    def __repr__(self) -> str:
        """Say how many rows these are and what there is of them."""
        name = type(self).__name__
        return f"{name}({len(self)} rows, positions={self.positions}, give={self.give})"

    def _rows(self) -> torch.Tensor:
        if not isinstance(self._values, torch.Tensor):
            # Of its own: others' rows of the step lie around it.
            self._values = joined([self._values()])
        return self._values

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_values": self._rows()}
