# SPDX-License-Identifier: Apache-2.0
"""Tells which rows of a completion are selected, and whether they came."""

import numpy as np

from vllm.v1.interventions.plan import Selection
from vllm.v1.interventions.positions import Positions, in_a_row


class Selected:
    """A selection of rows, on a prompt of `num_prompt_tokens` tokens.

    A completion of `n` tokens has `num_rows(n)` rows: the last generated token is never fed
    back.
    """

    def __init__(self, selection: Selection, num_prompt_tokens: int) -> None:
        self.selection = selection
        self._prompt = num_prompt_tokens
        self._runs = Positions.from_flat(selection.runs)
        self._named = Positions.from_flat(selection.named)
        if selection.last_generated:
            self._runs = self._runs.below(num_prompt_tokens) | self._named

    @property
    def max_rows(self) -> int:
        """The most rows that a site can have."""
        return len(self._runs) + self.selection.last_generated

    def num_rows(self, num_tokens: int) -> int:
        """Return how many rows a completion of `num_tokens` tokens has computed.

        Rows of the whole prompt count even when the request ends before its first token.
        """
        return max(num_tokens - 1, self._prompt)

    def known(self, num_rows: int) -> Positions:
        """Return the selected positions below `num_rows`, but not those that depend on the end."""
        return self._runs.below(num_rows)

    def mask(self, positions: np.ndarray, num_rows: int) -> np.ndarray:
        """Tell which of int [n] `positions` are `known`, as bool [n]."""
        return self._runs.mask(positions) & (positions < num_rows)

    def last(self, num_rows: int) -> Positions:
        """Return the last generated position, if it is selected only because it is the last.

        Such a position is not known before the completion of `num_rows` rows has ended.
        """
        wanted = self.selection.last_generated and num_rows > self._prompt
        return Positions.of([num_rows - 1] if wanted and num_rows - 1 not in self._runs else [])

    def all(self, num_rows: int) -> Positions:
        """Return the selected positions of a completion of `num_rows` rows."""
        return self.known(num_rows) | self.last(num_rows)

    def missing(self, num_rows: int, arrived: list[np.ndarray], aborted: bool) -> str | None:
        """Say why selected rows are absent; None if all are there.

        Args:
            arrived: the positions of the rows that came.
            aborted: whether the request was cut off, so that rows may not have been computed.

        Raises:
            RowsLost: absent rows were computed, so they should be there.
        """
        wanted = self.all(num_rows)
        needed = wanted.array()
        there = in_a_row(arrived)
        # As a rule all came, and nothing else; and that is seen in less time.
        absent = needed[:0] if np.array_equal(needed, there) else np.setdiff1d(needed, there)
        if len(absent):
            where = f"{len(absent)} of {len(wanted)} rows, first at position {absent[0]}"
            if aborted:
                return f"the request was aborted before {where} were computed"
            raise RowsLost(f"{where} are missing although they were computed; this is a bug")
        unreached = self._named.first_from(num_rows)
        if unreached is not None:
            return f"the request ended with {num_rows} rows, before position {unreached}"
        return None


class RowsLost(Exception):
    """Raised when rows that were computed did not arrive."""
