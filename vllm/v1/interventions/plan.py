# SPDX-License-Identifier: Apache-2.0
"""Data that travels with a request, from the frontend to the workers and back.

A `Plan` is made once, by the frontend (`vllm.v1.interventions.frontend.request.resolve`), from
what the user asked. It is a field of its own on `EngineCoreRequest`, so no client can send a
ready-made one.
"""

from typing import Any

import msgspec
import numpy as np
import torch

from vllm.v1.capture.rules import FLAG
from vllm.v1.interventions.focus import FocusOp, FocusProgram
from vllm.v1.interventions.makings import AnyMaking, AnySource, AsIs, Rows
from vllm.v1.interventions.terms import Term
from vllm.v1.probes.heads import AnyHead, Linear
from vllm.v1.probes.pools import AnyPool, Each

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
    begins: bool = False
    """True if a gate that latches judges its first row here."""


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

    @property
    def module_digests(self) -> set[str]:
        """The digests of the vector sets of `sums` that are not in `sets`."""
        brought = {vector_set.digest for vector_set in self.sets} if self.sets else ()
        return {d for vector_sum in self.sums for d, _ in vector_sum.sets if d not in brought}


def plain_plan(num_prompt_tokens: int) -> SteeringPlan:
    """The plan of a request that says nothing: the global tiers alone."""
    segments = [Segment(first, UNSTEERED, UNSTEERED) for first in (0, num_prompt_tokens)]
    return SteeringPlan(segments, inherit=True)


class Stream(msgspec.Struct, frozen=True):
    """Rows that leave the device together: made alike of rows of one kind, for one process."""

    sites: tuple[Site, ...]
    """A part of the plan's sites, in its order."""
    width: int
    """Number of numbers that leave of a site."""
    dtype: str
    """Their dtype."""
    source: AnySource = Rows()
    """Rows that they are made of."""
    making: AnyMaking = AsIs()
    """Values that are made of the rows and leave in their place."""
    relayed: bool = False
    """True if they go on to the frontend; else they stay in the engine core, as they do for workers
    to know."""
    runs: tuple[int, ...] = ()
    """Positions, as in `Selection.runs`; () on workers, which are told of each step's."""

    @property
    def is_raw(self) -> bool:
        """True if rows leave as they were copied."""
        return self.making.as_is and isinstance(self.source, Rows)

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
    making: AnyMaking = AsIs()
    """Values that are given in place of rows; for attention `sites` are the queries'."""
    fields: dict[str, Any] = {}
    """Fields that are the consumer's own, as its class checked and returned them."""


class Rule(msgspec.Struct, frozen=True):
    """Decision from the scores of a request's rows: the rule fires at a row whose score crosses
    `threshold`, if at least `need` of the last `of` rows do, that one included."""

    name: str
    sites: list[Site]
    """The score of a row is made of the rows of all."""
    runs: list[int]
    """The positions whose rows count, as `Selection.runs`."""
    threshold: float
    below: bool
    """True if scores cross it that are smaller; else those that are larger."""
    need: int
    of: int
    then: str
    """Action that it takes where it fires, one of `RULES_DO`."""
    puts: tuple[int, ...] = ()
    """Tokens that it forces: they follow the token of the row at which it first fires."""
    stream: int = 0
    """The index of the plan's stream that has the scores."""
    column: int = 0
    """Index of the probe's first vector among the rows of that stream's matrix."""
    head: AnyHead = Linear()
    """Function of a row's products with the probe's vectors."""
    pool: AnyPool = Each()
    """Function of these numbers of the rows so far, which gives the score."""
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
    def cuts(self) -> bool:
        """True if a rule may cut the answer, which only the frontend finds."""
        return any(rule.then != FLAG for rule in self.rules)

    @property
    def forces(self) -> bool:
        """True if a rule may put tokens into the answer."""
        return any(rule.puts for rule in self.rules)

    def row_bytes(self, consumer: str) -> int:
        """Bytes of a position's rows at all sites of a consumer."""
        selection = self.consumers[consumer]
        streams, sites = [self.streams[i] for i in selection.streams], set(selection.sites)
        return sum(s.row_bytes * len(sites.intersection(s.sites)) for s in streams)


class Begun(msgspec.Struct, frozen=True):
    """Part of an answer that a request goes on from: it was cut there, and sent anew."""

    output_token_ids: list[int]
    """The answer so far."""
    rows: int
    """The position before which all rows were delivered."""


class Plan(msgspec.Struct, frozen=True):
    """All that a request asks for, checked and resolved; None for what it does not ask for."""

    steering: SteeringPlan | None = None
    capture: CapturePlan | None = None
    begun: Begun | None = None
