# SPDX-License-Identifier: Apache-2.0
"""Values that are made of captured rows on the device, and leave it in place of the rows."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self, TypedDict

import msgspec


class Making(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Values that leave the device in place of a stream's rows."""

    field: ClassVar[str] = ""
    """Field of a capture request that asks for it, of sites of one kind."""
    adds_up: ClassVar[bool] = False
    """True if a step gives one row for each request, its part of a sum; else one for each captured
    token."""

    def placed(self, row: Callable[[str], int]) -> Self:
        """Return it as workers are told.

        Args:
            row: gives the row of the workers' table at which the matrix of a digest begins.
        """
        return self

    def at_sites(self, indices: Sequence[int]) -> Self:
        """Return what is made of some of a stream's sites alone, by their indices."""
        return self

    def apart(self, index: int) -> int:
        """Number that tells neighbouring sites apart which are not made together."""
        return 0


class AsIs(Making):
    """Rows as they are."""


class Scores(Making):
    """Rows times the transposed rows of matrices, float32."""

    field: ClassVar[str] = "project"
    digests: tuple[str, ...]
    """Of the matrix of all sites, or of the one of each; () on workers."""
    size: int
    """Number of rows that each matrix has, and of scores of a row."""
    places: tuple[int, ...] = ()
    """The first row of each matrix in the workers' table; () in a plan."""

    def placed(self, row: Callable[[str], int]) -> Self:
        """Return it with places in place of digests."""
        return msgspec.structs.replace(self, digests=(), places=tuple(map(row, self.digests)))

    def at_sites(self, indices: Sequence[int]) -> Self:
        """Return it with the matrices of some sites alone."""
        if len(self.places) == 1:
            return self
        return msgspec.structs.replace(self, places=tuple(self.places[i] for i in indices))

    def apart(self, index: int) -> int:
        """Place of a site's matrix."""
        return self.places[index] if len(self.places) > 1 else 0


class Mean(Making):
    """The mean of a request's rows: a step gives the sum of its own, float32."""

    field: ClassVar[str] = "reduce"
    adds_up: ClassVar[bool] = True
    runs: tuple[int, ...]
    """The positions whose rows are summed, all of the prompt, as `Selection.runs`."""


AnyMaking = AsIs | Scores | Mean

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
