# SPDX-License-Identifier: Apache-2.0
"""Rows that captures start from, and values that are made of them on the device and leave it in
their place."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Optional, Self, TypedDict

import msgspec

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


class Field(NamedTuple):
    """Numbers of a row that results give by a name."""

    name: str
    """Name of the attribute of a result."""
    width: int
    """Number of numbers; 0 if they were not asked for."""
    dtype: Literal["float32", "int32"] = "float32"
    """Their dtype; in the row they are bits of float32."""
    given: str = ""
    """Name by which a request asks for them, if it is another."""


class Source(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rows that a stream starts from."""

    dtype: ClassVar[str] = ""
    """Their dtype; "" for the model's."""
    takes_room: ClassVar[bool] = False
    """True if they take memory beside the rows that are copied."""


class Rows(Source, frozen=True):
    """Rows of the residual stream."""


class Heads(Source, frozen=True):
    """Rows of some heads; of lanes, where the residual stream has several; or of modules within a
    branch, each of which counts as one head."""

    chosen: tuple[tuple[int, ...], ...]
    """Numbers of the heads of each site."""


class Difference(Source, frozen=True):
    """Rows of branches: of each the difference of two rows of the residual stream."""

    dtype: ClassVar[str] = "float32"
    takes_room: ClassVar[bool] = True


AnySource = Rows | Heads | Difference


class Making(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Values that leave the device in place of a stream's rows."""

    field: ClassVar[str]
    """Path in a capture request of the field that is refused, where sites of several kinds are."""
    sites_field: ClassVar[str] = "hooks"
    """Field of a capture request that names its sites."""
    rows_field: ClassVar[str] = "positions"
    """Path of the field that names its rows."""
    as_is: ClassVar[bool] = False
    """True if rows leave as they are."""
    projected: ClassVar[bool] = False
    """True if rows are multiplied with a matrix that the request gives."""
    through_head: ClassVar[bool] = False
    """True if rows go through the model's head, which takes `TapShape.lens_rows` for each."""
    mixes: ClassVar[bool] = False
    """True if sites may be of several kinds, for a consumer that takes rows of several widths."""
    shared: ClassVar[bool] = False
    """True if every tensor-parallel rank makes a part of it."""
    late: ClassVar[bool] = False
    """True if it needs more than rows: it is made when the forward has ended."""
    takes_room: ClassVar[bool] = False
    """True if what is made counts among the rows of a step: it may take as much memory as they
    do."""
    by_head: ClassVar[bool] = False
    """True if heads that are made together must be of one width, though what is made of them may be
    equally wide."""
    of_vectors: ClassVar[bool] = False
    """True if it tells what vectors do to rows: a request has it where no operation acts."""
    dtype: ClassVar[str] = "float32"
    """Dtype of what is made; "" for that of the rows."""
    adds_up: ClassVar[bool] = False
    """True if a step gives one row for each request, its part of a sum; else one for each captured
    token."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields of a row, or of a head, one after the other; () if results give the row whole."""
        return ()

    def width(self, heads: int, width: int) -> int:
        """Number of numbers that are made of a row.

        Args:
            heads: how many heads or lanes a row has, 1 in a residual stream without lanes.
            width: of each.
        """
        return heads * width

    def grouped(self) -> Self:
        """Return it without what requests may differ in that are captured together."""
        return self

    def placed(self, row: Callable[[str], int]) -> Self:
        """Return it as workers are told.

        Args:
            row: gives the row of the workers' table at which the matrix of a digest begins.
        """
        return self

    @property
    def weights(self) -> Optional["Attention"]:
        """Return it if it is made of attention weights."""
        return None

    @property
    def passes(self) -> float:
        """Number of times that attention weights of a head are made or gone through."""
        return 0

    def products(self, hidden: int, vocab: int) -> int:
        """Number of products for a row, of hidden numbers and a head of so many tokens; 0 if there
        are too few to count."""
        return 0

    def needed(self, sites: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the sites that the engine must be able to capture."""
        return sites

    def named(self, site: tuple[str, int]) -> tuple[str, int]:
        """Return the site by which consumers know what is made at one."""
        return site

    @property
    def by_site(self) -> bool:
        """True if it may differ from site to site."""
        return False

    def at_sites(self, indices: Sequence[int]) -> Self:
        """Return what is made of some of a stream's sites alone, by their indices."""
        return self

    def apart(self, index: int) -> int:
        """Number that tells neighbouring sites apart which are not made together."""
        return 0


class AsIs(Making, frozen=True):
    """Rows as they are."""

    field: ClassVar[str] = "hooks"
    as_is: ClassVar[bool] = True
    mixes: ClassVar[bool] = True
    dtype: ClassVar[str] = ""


class Scores(Making, frozen=True):
    """Rows times the transposed rows of matrices, float32."""

    field: ClassVar[str] = "project"
    projected: ClassVar[bool] = True
    digests: tuple[str, ...]
    """Digest of the matrix of all sites, or of each one's; () on workers."""
    size: int
    """Number of rows that each matrix has, and of scores of a row."""
    places: tuple[int, ...] = ()
    """The first row of each matrix in the workers' table; () in a plan."""

    def width(self, heads: int, width: int) -> int:
        """Width of the scores, those of each lane."""
        return heads * self.size

    def placed(self, row: Callable[[str], int]) -> Self:
        """Return it with places in place of digests."""
        return msgspec.structs.replace(self, digests=(), places=tuple(map(row, self.digests)))

    @property
    def by_site(self) -> bool:
        """True if each site has a matrix of its own."""
        return len(self.digests) > 1

    def at_sites(self, indices: Sequence[int]) -> Self:
        """Return it with the matrices of some sites alone."""
        if len(self.places) == 1:
            return self
        return msgspec.structs.replace(self, places=tuple(self.places[i] for i in indices))

    def apart(self, index: int) -> int:
        """Place of a site's matrix."""
        return self.places[index] if len(self.places) > 1 else 0


class Norms(Making, frozen=True):
    """Length of each row, of each head and lane by itself, in the L2 norm: float32."""

    field: ClassVar[str] = "norms"
    mixes: ClassVar[bool] = True
    by_head: ClassVar[bool] = True

    def width(self, heads: int, width: int) -> int:
        """One number for each head or lane."""
        return heads


class Dose(Making, frozen=True):
    """Length of the vectors that were added to each row beside the length of the row without them:
    float32."""

    field: ClassVar[str] = "dose"
    of_vectors: ClassVar[bool] = True

    def width(self, heads: int, width: int) -> int:
        """One number."""
        return 1


class Mean(Making, frozen=True):
    """The mean of a request's rows: a step gives the sum of its own, float32."""

    field: ClassVar[str] = "reduce"
    adds_up: ClassVar[bool] = True
    runs: tuple[int, ...]
    """The positions whose rows are summed, all of the prompt, as `Selection.runs`."""


class Attention(Making, frozen=True):
    """Values that are given of the attention weights of captured queries.

    A row is float32: for each head, one after the other, what `give` says; or the sum of weights
    over heads.
    """

    field: ClassVar[str] = "attention.heads"
    sites_field: ClassVar[str] = "attention"
    rows_field: ClassVar[str] = "attention.queries"
    mixes: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    late: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True
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
    def fields(self) -> tuple[Field, ...]:
        """Numbers of a head."""
        give, ranges = self.give, len(self.ranges)
        return (
            Field("mass", ranges * ("mass" in give)),
            Field("peak", ranges * ("peak" in give)),
            Field("top_positions", self.top, "int32", "top"),
            Field("top_weights", self.top, "float32", "top"),
            Field("weights", self.stop * ("weights" in give)),
        )

    def grouped(self) -> Self:
        """Return it without the names and keys of the ranges, and without `stop` where no row
        depends on it."""
        stop = self.stop if "weights" in self.give else 0
        empty = ((),) * len(self.ranges)
        return msgspec.structs.replace(self, names=(), ranges=empty, stop=stop)

    @property
    def weights(self) -> Optional["Attention"]:
        """Return itself."""
        return self

    def needed(self, sites: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the queries, and what attention returned: it proved at start-up that the weights
        can be read."""
        from vllm.config.points import (
            RETURNED,
        )  # vllm.config is slow to import, and readers need us

        return [*sites, (RETURNED, sites[0][1])]

    def named(self, site: tuple[str, int]) -> tuple[str, int]:
        """Return the layer's weights."""
        return "attn", site[1]

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

    def width(self, heads: int, width: int) -> int:
        """Width of what is made; the sum over heads is as wide as there are keys."""
        if self.sum:
            return self.stop
        give, ranges = self.give, len(self.ranges)
        of_ranges = ranges * (("mass" in give) + ("peak" in give))
        return heads * (of_ranges + 2 * self.top + self.stop * ("weights" in give))


_RANK = 128
"""Number of products that take as long as one number that is read from memory."""


class Lens(Making, frozen=True):
    """Values that are given of the next token's distribution, as if a row were the last layer's.

    A row is float32, one part after the other: ids of the likeliest tokens (bits of int32) and
    their log-probabilities, the log-probabilities of `tokens` and their ranks (bits of int32), and
    the entropy in nats.
    """

    field: ClassVar[str] = "lens"
    through_head: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    late: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True
    name: str
    """A lens of `TapShape.lenses`."""
    top_k: int
    tokens: tuple[int, ...]
    entropy: bool

    @property
    def fields(self) -> tuple[Field, ...]:
        """Numbers of a row."""
        return (
            Field("top_ids", self.top_k, "int32"),
            Field("top_logprobs", self.top_k),
            Field("token_logprobs", len(self.tokens)),
            Field("token_ranks", len(self.tokens), "int32"),
            Field("entropy", int(self.entropy)),
        )

    def products(self, hidden: int, vocab: int) -> int:
        """Count the head, a matrix of the lens before it, and one look at all logits for each
        rank."""
        return hidden * (hidden + vocab) + _RANK * len(self.tokens) * vocab

    def width(self, heads: int, width: int) -> int:
        """Width of all fields together."""
        return 2 * (self.top_k + len(self.tokens)) + self.entropy


class Features(Making, frozen=True):
    """Activations of a sparse autoencoder's features.

    A row is float32, one part after the other: ids of the most active features (bits of int32, -1
    where no more are active) and their activations, the activations of `ids`, the number of active
    features (bits of int32), and the L2 norm of what the decoder leaves of the row.
    """

    field: ClassVar[str] = "features"
    shared: ClassVar[bool] = True
    takes_room: ClassVar[bool] = True
    name: str
    """An autoencoder of `TapShape.features`."""
    size: int
    """Number of its features."""
    top: int
    """Number of the most active features."""
    ids: tuple[int, ...]
    above: float
    """A feature is active if its activation is greater."""
    error: bool
    """True if the decoder's error is asked for."""
    stamp: str = ""
    """Tells an autoencoder that got its name while the engine served from others of that name."""

    @property
    def key(self) -> str:
        """Key of the autoencoder among those that workers hold."""
        return self.stamp or self.name

    @property
    def fields(self) -> tuple[Field, ...]:
        """Numbers of a row."""
        return (
            Field("top_ids", self.top, "int32", "top"),
            Field("top_values", self.top, "float32", "top"),
            Field("values", len(self.ids), "float32", "ids"),
            Field("active", 1, "int32"),
            Field("error", int(self.error)),
        )

    def products(self, hidden: int, vocab: int) -> int:
        """Count the encoder, the look for the top, and the decoder if it is asked."""
        return self.size * (hidden * (1 + self.error) + _RANK * (self.top > 0))

    def width(self, heads: int, width: int) -> int:
        """Width of all fields together."""
        return 2 * self.top + len(self.ids) + 1 + self.error


AnyMaking = AsIs | Scores | Norms | Dose | Mean | Attention | Lens | Features

_MADE: tuple[type[Making], ...] = (Scores, Mean, Norms, Dose, Attention, Lens, Features)
MAKING_FIELDS = tuple(making.field.partition(".")[0] for making in _MADE)
"""Fields of a capture request that ask for another making than rows as they are."""
