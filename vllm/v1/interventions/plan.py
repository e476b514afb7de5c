# SPDX-License-Identifier: Apache-2.0
"""Data that travels with a request, from the frontend to the workers and back.

A `Plan` is made once, by the frontend (`vllm.v1.interventions.frontend.request.resolve`), from
what the user asked. It is a field of its own on `EngineCoreRequest`, so no client can send a
ready-made one.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import Any, TypedDict

import msgspec
import numpy as np
import torch

from vllm.config.points import EMBED, FINAL
from vllm.v1.interventions.focus import FocusOp, FocusProgram
from vllm.v1.interventions.makings import AttentionRead, LensRead
from vllm.v1.interventions.terms import Term

Site = tuple[str, int]
"""A place in the model: (point, layer), layer the global decoder layer index from 0."""

TIERS = ("base", "prefill", "decode")
"""Names of the tiers, by where their vectors act: base at all positions, prefill at the prompt's,
decode at generated ones."""

VECTOR_FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
"""The fields of `SamplingParams` that hold a tier's vectors, in the order of `TIERS`."""

STEERING_FIELDS = (*VECTOR_FIELDS, "steering_modules", "steering")
INHERIT = "steering_inherit_global"
PLAN_FIELDS = (*STEERING_FIELDS, INHERIT, "capture", "rules")
"""The fields of `SamplingParams` that a plan carries in their place."""

UNSTEERED = ""
"""The digest of "nothing happens"."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class AttentionForm(TypedDict, total=False):
    """Form in which a layer makes attention weights of its queries' products with keys. What it
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


class TapShape(msgspec.Struct, frozen=True):
    """Layers, points and widths that the loaded model offers, reported by the workers at
    start-up."""

    hidden_size: int
    dtype: str
    """Model dtype, torch's name without the prefix: "bfloat16"."""
    points: dict[int, tuple[str, ...]]
    """Layer -> the points it has."""
    heads: dict[int, dict[str, tuple[int, int]]] = {}
    """Layer -> point of its attention -> (heads, width of one), of all tensor-parallel ranks."""
    unread: dict[int, str] = {}
    """Layer with queries -> why its attention weights cannot be read; the others' can."""
    latent: tuple[int, ...] = ()
    """Layers over a latent cache (MLA), whose weights cannot be focused."""
    forms: dict[int, AttentionForm] = {}
    """Layer with weights that can be read and captured queries and keys -> how it sees keys."""
    lenses: dict[str, list[Site]] = {}
    """Lens -> the sites whose rows it can read."""
    vocab_size: int = 0
    """Number of logits of the head, where there are lenses."""
    lens_rows: int = 0
    """Number of more rows of hidden_size that a row under a lens takes of a step's budget."""
    branches: dict[int, tuple[str, ...]] = {}
    """Layer -> its branches that are exactly the difference of two of its points."""
    final: int | None = None
    """The last layer, if its head reads what the model returns, as it is."""

    fuses_focus: bool = False
    """True if kernels focus, which keep no weights; else torch does."""
    lanes: int = 1
    """Number of lanes of hidden_size in the stream."""
    senders: int = 1
    """Number of workers of a pipeline stage that share the rows of a step of many."""
    reads_masked: bool = False
    """True if attention may multiply what it masks, so that a NaN in a block reaches who has it."""
    whole_prompts: bool = False
    """True if a prompt's tokens see each other both ways, so that one step has all of them."""

    def offers(self, layer: int) -> tuple[str, ...]:
        """All that can be captured at a layer; the first has what it reads, and the last what the
        head reads."""
        points = *self.points[layer], *self.heads.get(layer, ()), *self.branches.get(layer, ())
        return (
            *(EMBED,) * (layer == 0 and self.lanes == 1),
            *points,
            *(FINAL,) * (layer == self.final),
        )

    def focus_passes(self, runs: int) -> float:
        """Number of times that weights are made or gone through where a span of so many runs is
        focused. A kernel goes through the runs for some keys at a time."""
        return (1 + runs / 8) / 128 if self.fuses_focus else 4

    def parts(self, site: Site) -> tuple[int, int]:
        """Number of heads or lanes of a token's row at a site, and the width of one."""
        point, layer = site
        heads = self.heads.get(layer, {}).get(point)
        if heads is not None:
            return heads
        lanes = self.lanes if self.lanes > 1 and point in self.points.get(layer, ()) else 1
        return lanes, self.hidden_size

    def row_width(self, site: Site) -> int:
        """Width of a token's row at a site; of all heads or lanes together."""
        count, width = self.parts(site)
        return count * width

    def arena_rows(self, site: Site) -> int:
        """Rows of hidden_size that a token takes on the device at a site."""
        count, width = self.parts(site)
        return -(-count * width // self.hidden_size)

    def arena_places(self, sites: Iterable[Site]) -> tuple[dict[Site, int], int]:
        """Return the row at which each site of one token begins on the device, site after site, and
        the number of rows of all sites."""
        places, rows = {}, 0
        for site in sites:
            places[site] = rows
            rows += self.arena_rows(site)
        return places, rows

    def share_rows(self, sites: Iterable[Site]) -> int:
        """The most rows of hidden_size that a token takes on one device, of those whose workers
        share these sites by layers."""
        if self.senders == 1:
            return sum(map(self.arena_rows, sites))
        rows: Counter[int] = Counter()
        for site in sites:
            rows[site[1]] += self.arena_rows(site)
        of_layers = ceil(len(rows) / self.senders) * max(rows.values(), default=0)
        return min(of_layers, rows.total())

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        return dtype_of(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row at one site."""
        return self.hidden_size * self.torch_dtype.itemsize


class VectorSet(msgspec.Struct, frozen=True):
    """Vectors at some sites that are only ever used together."""

    digest: str
    """Hex SHA-256 over widths, sites and data."""
    sites: list[Site]
    data: bytes
    """float32, the vectors of all sites one after the other, native endian."""
    largest: float
    """The largest absolute value in `data`; NaN if there is one."""
    widths: tuple[int, ...]
    """The length of each site's vector; one number where all have the same."""

    @property
    def rows(self) -> list[np.ndarray]:
        """The vector of each site, float32, read-only views of `data`."""
        flat = np.frombuffer(self.data, np.float32)
        if len(self.widths) == 1:
            return list(flat.reshape(len(self.sites), *self.widths))
        return np.split(flat, np.cumsum(self.widths[:-1]))


class VectorSum(msgspec.Struct, frozen=True):
    """Sum of vector sets that one slot of the steering table holds, the global tiers aside."""

    digest: str
    """Hex SHA-256 over `sets` and `factors`."""
    sets: list[tuple[str, float]]
    """The sets that are summed: (digest of the vector set, scale)."""
    factors: list[tuple[Site, bytes]] = []
    """float32 [heads] of sites whose heads are scaled, native endian. The global tiers there are
    scaled too, and these sets are not: what acts before the factors has them in it."""


class Program(msgspec.Struct, frozen=True):
    """Terms by which the ops of a request act at a position."""

    digest: str
    """Hex SHA-256 over what acts at each site, and `decides`."""
    terms: list[str]
    """The digest of each op's term; "" for an op that does not act."""
    decides: bool
    """True if gates that are decided once are decided here, at the last prompt token."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Vectors, ops and focus that act from position `first` to the next segment's: digests,
    `UNSTEERED` for nothing."""

    first: int
    vector_sum: str
    program: str
    focus: str = UNSTEERED
    """The digest of one of `SteeringPlan.focus_programs`."""
    focus_key: str = UNSTEERED
    """Digest of what the focus can do here, with the keys of its spans that are there."""


class SteeringPlan(msgspec.Struct, frozen=True):
    """A request's steering, position by position."""

    segments: list[Segment]
    """Sorted; the first starts at 0, the last has no end, one starts where the prompt ends."""
    inherit: bool
    """True if the global tiers are added."""
    sums: list[VectorSum] = []
    sets: list[VectorSet] = []
    """The vector sets of `sums`, but for those of modules, which the engine core has."""
    programs: list[Program] = []
    op_sites: list[tuple[Site, list[int]]] = []
    """The sites of ops in the order of the stream, each with its ops, as places in
    `Program.terms`, in the order they act."""
    terms: list[Term] = []
    focus_programs: list[FocusProgram] = []
    focus_ops: list[FocusOp] = []
    key_weights: int = 0
    """Number of weights of attention that are made, or gone through, of a focused position for each
    key up to it."""


class Stream(msgspec.Struct, frozen=True):
    """Rows that leave the device together: in one form, for one process."""

    sites: list[Site]
    """A part of the plan's sites, in its order."""
    runs: list[int]
    """Positions, as in `Selection.runs`."""
    relayed: bool
    """True if they go on to the frontend; else they stay in the engine core."""
    width: int
    """hidden_size; with a projection the number of its rows; of heads their widths together."""
    dtype: str
    """The model's dtype; of what was made of rows "float32"."""
    projections: list[str] = []
    """Digests of the matrices the rows are multiplied with on the device: of one for all sites, or
    of one for each; none for rows as they are."""
    heads: list[tuple[int, ...]] = []
    """Heads that are captured at each site; empty at points of the residual stream."""
    summed: bool = False
    """True if a step sends the sum of its rows in `runs`, which are of the prompt, and the mean is
    what consumers get: one row a site."""
    reads: AttentionRead | LensRead | None = None
    """Reading of attention or under a lens that the device makes of the rows and sends in their
    place."""
    differs: bool = False
    """True if its sites are branches, whose rows are differences, float32."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row at one site."""
        return self.width * dtype_of(self.dtype).itemsize


class Selection(msgspec.Struct, frozen=True):
    """Rows of a request that one consumer gets."""

    sites: list[Site]
    runs: list[int]
    """Positions: start, stop (exclusive) of each run, flattened; sorted, disjoint."""
    named: list[int] = []
    """The part of `runs` the user named outright: reported if the request ends before it."""
    last_generated: bool = False
    """True if, of generated positions, only those in `named` and the last (known at the end) are
    kept."""
    streams: tuple[int, ...] = (0,)
    """Indices of the plan's streams that have the rows, perhaps among others: one for each width of
    rows, and only `inline` may have several."""
    heads: dict[Site, tuple[int, ...]] = {}
    """Site -> the heads that are captured there; sites of the residual stream are left out."""
    reads: AttentionRead | LensRead | None = None
    """Reading that is given in place of rows; for attention `sites` are the queries'."""
    fields: dict[str, Any] = {}
    """Fields that are the consumer's own, as its class checked and returned them."""


class Rule(msgspec.Struct, frozen=True):
    """Decision from the scores of a request's rows: the rule fires at a row whose score crosses
    `threshold`, if at least `need` of the last `of` rows do, that one included."""

    name: str
    site: Site
    runs: list[int]
    """The positions whose rows count, as `Selection.runs`."""
    threshold: float
    below: bool
    """True if scores cross it that are smaller; else those that are larger."""
    need: int
    of: int
    stops: bool
    """True if the answer ends with the token of the first row at which it fires."""
    stream: int = 0
    """The index of the plan's stream that has the scores."""
    column: int = 0
    """Index of the probe among the rows of that stream's matrix."""
    for_all: bool = False
    """True if it is the operator's: of such a rule requests are told the name, if it fired."""


class CapturePlan(msgspec.Struct, frozen=True):
    """The union of the consumers' selections: the rows that are written on the device."""

    sites: list[Site]
    """Sites that have taps, in layer order, so that pipeline stages have runs of them."""
    runs: list[int]
    streams: list[Stream]
    consumers: dict[str, Selection]
    arena_rows: int
    """Rows of hidden_size that a position takes on one device, where all senders share them."""
    hidden_size: int
    dtype: str
    """The model's dtype."""
    projections: dict[str, bytes] = {}
    """Digest -> float32 [k, hidden], C order, native endian."""
    rules: list[Rule] = []
    key_weights: int = 0
    """Number of weights of attention that are made, or gone through, of a captured position for
    each key up to it."""
    num_samples: int = 1
    sample: int = 0
    """Index of this completion among the request's `num_samples`."""
    prompt: int | None = None
    """Index of the prompt among those that were sent with the same parameters; None if there was
    one."""
    external_id: str = ""
    """The request's id as its caller knows it."""

    @property
    def stops(self) -> bool:
        """True if a rule may end the answer, which only the frontend finds."""
        return any(rule.stops for rule in self.rules)

    def row_bytes(self, consumer: str) -> int:
        """Bytes of a position's rows at all sites of a consumer."""
        selection = self.consumers[consumer]
        streams, sites = [self.streams[i] for i in selection.streams], set(selection.sites)
        return sum(s.row_bytes * len(sites.intersection(s.sites)) for s in streams)


class Plan(msgspec.Struct, frozen=True):
    """All that a request asks for, checked and resolved; None for what it does not ask for."""

    steering: SteeringPlan | None = None
    capture: CapturePlan | None = None
