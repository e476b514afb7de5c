# SPDX-License-Identifier: Apache-2.0
"""Values that are made of captured rows on the device, and leave it in place of the rows."""

from typing import ClassVar, TypedDict

import msgspec


class Making(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Values that leave the device in place of a stream's rows."""

    adds_up: ClassVar[bool] = False
    """True if a step gives one row for each request, its part of a sum; else one for each captured
    token."""


class AsIs(Making):
    """Rows as they are."""


class Mean(Making):
    """The mean of a request's rows: a step gives the sum of its own, float32."""

    adds_up: ClassVar[bool] = True
    runs: tuple[int, ...]
    """The positions whose rows are summed, all of the prompt, as `Selection.runs`."""


AnyMaking = AsIs | Mean

GIVES = ("mass", "peak", "top", "weights")
"""Names of what may be given of attention weights, in the order in which it lies in a row."""


class AttentionRule(TypedDict, total=False):
    """Rule by which a layer makes attention weights of its queries' products with keys. What it
    does not do is left out, all but the first two."""

    scale: float
    group: int
    """Number of heads of queries that have a head of keys in common."""
    cap: float
    """The soft-cap of scaled products."""
    window: int
    """Number of keys that a query sees, its own the last."""
    chunk: int
    """A query sees keys of its own chunk of so many positions."""
    slopes: list[float]
    """ALiBi, of each head of queries."""
    sinks: list[float]
    """Logits that join the denominator of each head."""


class AttentionRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Values that are given of the attention weights of captured queries.

    A row is float32: for each head, one after the other, what `give` says; or the sum of weights
    over heads.
    """

    give: tuple[str, ...]
    """Some of `GIVES`, in that order."""
    names: tuple[str, ...]
    """The key ranges of mass and peak."""
    ranges: tuple[tuple[int, ...], ...]
    """The keys of each, as `Selection.runs`."""
    top: int
    """Number of the largest weights that are given: their positions, bits of int32,
    and then the weights."""
    sum: str
    """"" for each head's own, "heads" for the sum over heads, "all" for that over layers too, which
    are added up where rows are read."""
    stop: int
    """One past the last query: how many weights there are, those of later keys zeros."""

    @property
    def widths(self) -> list[int]:
        """Numbers of a head that each part has."""
        ranges = len(self.ranges)
        parts = {"mass": [ranges], "peak": [ranges], "top": [self.top] * 2, "weights": [self.stop]}
        return [width for name in self.give for width in parts[name]]

    @property
    def form(self) -> "AttentionRead":
        """Copy without what requests of one group may differ in: the names and keys of the ranges,
        and `stop` where no row depends on it."""
        stop = self.stop if "weights" in self.give else 0
        empty = ((),) * len(self.ranges)
        return msgspec.structs.replace(self, names=(), ranges=empty, stop=stop)

    @property
    def passes(self) -> float:
        """Number of times that weights are made or gone through; sums over ranges are products with
        masks, as cheap as those with keys."""
        ranges = len(self.ranges)
        return (
            1
            + ("mass" in self.give) * ranges / 64
            + ("peak" in self.give) * ranges
            + (self.top > 0)
        )

    def width(self, heads: int) -> int:
        """Number of numbers in a row."""
        return self.stop if self.sum else heads * sum(self.widths)


class LensRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Values that are given of the next token's distribution, as if a row were the last layer's.

    A row is float32, one part after the other: ids of the likeliest tokens (bits of int32) and
    their log-probabilities, the log-probabilities of `tokens` and their ranks (bits of int32), and
    the entropy in nats.
    """

    name: str
    """A lens of `TapShape.lenses`."""
    top_k: int
    tokens: tuple[int, ...]
    entropy: bool

    @property
    def widths(self) -> list[int]:
        """Number of numbers in each part."""
        return [self.top_k] * 2 + [len(self.tokens)] * 2 + [int(self.entropy)]
