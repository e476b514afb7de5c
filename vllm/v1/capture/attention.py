# SPDX-License-Identifier: Apache-2.0
"""Attention weights as a user gets them back."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.v1.capture.figures import attention_map, axes_of
from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.interventions.makings import Attention

if TYPE_CHECKING:
    from vllm.v1.capture.figures import Target


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
    def header(self) -> dict[str, Any]:
        """The names of the key ranges, if there are any."""
        return {"ranges": list(self.ranges)} if self.ranges else {}

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

    def draw(
        self,
        target: "Target",
        head: int | None = None,
        tokens: Sequence[str] | None = None,
        title: str = "",
        decode: Callable[[int], str] | None = None,
    ) -> None:
        """Draw weights, queries x keys: of one head, or of each head in a grid. Each is scaled to
        its largest weight.

        Args:
            target: a file, PNG or SVG by its suffix; or axes of matplotlib, for one head.
            head: its number, as in `heads`; all if None.
            tokens: texts of the tokens, by position; without them positions are shown.
            decode: the text of a token, such as `tokenizer.decode`: names those that are queries.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the capture gives no `weights`, or not of this head; nothing was captured.
        """
        if not len(self):
            raise ValueError("no query was captured")
        if head is not None and head not in self.heads:
            raise ValueError(f"head: {head} was not captured, these were: {list(self.heads)}")
        names = [str(t) for t in range(int(self.positions.max()) + 1)]
        texts = dict(enumerate((tokens or ())[: len(names)]))
        if decode is not None:
            read = zip(self.positions.tolist(), self.token_ids.tolist(), strict=True)
            texts = {t: decode(token) for t, token in read if token >= 0} | texts
        for t, text in texts.items():
            names[t] = repr(text)[1:-1]
        rows = [names[t] for t in self.positions.tolist()]
        weights = np.full((len(rows), max(len(self.heads), 1), len(names)), np.nan)
        for at, row in zip(weights, self.weights, strict=True):
            at[:, : row.shape[-1]] = row
        shown = range(weights.shape[1]) if head is None else [self.heads.index(head)]
        width, height = 2.0 + 0.2 * len(names), 1.2 + 0.2 * len(rows)
        with axes_of(target, width, height, len(shown), title) as axes:
            for one, i in zip(axes, shown, strict=True):
                attention_map(one, weights[:, i], rows, names)
                if self.heads and not (title and len(shown) == 1):
                    one.set_title(f"head {self.heads[i]}", fontsize=9)

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
