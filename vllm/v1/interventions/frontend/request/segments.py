# SPDX-License-Identifier: Apache-2.0
"""From what a request asks for to segments: which sum and which ops act on which positions."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, TypeVar

import msgspec
import numpy as np

from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.focus import Focusing, FocusPrograms
from vllm.v1.interventions.operations import Op
from vllm.v1.interventions.plan import (
    UNSTEERED,
    Program,
    Segment,
    Site,
    SteeringPlan,
    VectorSet,
    VectorSum,
)
from vllm.v1.interventions.positions import ALL, END, Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.terms import Term
from vllm.v1.interventions.vectors import (
    AnyVectors,
    Vectors,
    add_up,
    digest_of,
    largest_sum,
    need_finite_sum,
    sum_digest,
    vector_set_of,
    vectors_of,
)

Key = TypeVar("Key")


@dataclass(frozen=True)
class _Addition:
    """Vectors that came with the request."""

    vectors: AnyVectors
    positions: Positions
    vector_set: VectorSet | None
    """The set that `vectors` alone make; None if it is not made yet."""


@dataclass(frozen=True)
class _Shared:
    """A vector set that the engine core has: a module's, for one phase."""

    vector_set: VectorSet
    scale: float
    positions: Positions


@dataclass(frozen=True)
class _OnHeads:
    """An operation on heads, or what it does at one of its positions."""

    op: Op
    term: Term
    positions: Positions


class SegmentBuilder:
    """Collects what acts where; `plan` cuts the positions into segments.

    Args:
        shape: of the model.
        num_prompt_tokens: where the prompt ends and the generated positions begin.
        work: counts what the segments cost.
    """

    def __init__(self, shape: TapShape, num_prompt_tokens: int, work: Work) -> None:
        self.work = work
        self.shape = shape
        self._prompt = num_prompt_tokens
        self.additions: list[_Addition] = []
        self.shared: list[_Shared] = []
        self.on_heads: list[_OnHeads] = []
        self.ops: list[Op] = []
        self.focused: list[Focusing] = []
        self.key_weights = 0

    @property
    def phases(self) -> dict[str, Positions]:
        """Tier -> the positions it acts on."""
        return {
            "base": ALL,
            "prefill": Positions([(0, self._prompt)]),
            "decode": Positions([(self._prompt, END)]),
        }

    def add(
        self, vectors: AnyVectors, positions: Positions, vector_set: VectorSet | None = None
    ) -> None:
        """Add vectors at some positions."""
        if vectors:
            self.additions.append(_Addition(vectors, positions, vector_set))

    def add_shared(self, vector_set: VectorSet, scale: float, positions: Positions) -> None:
        """Add a vector set that the engine core has, times `scale`, at some positions."""
        self.shared.append(_Shared(vector_set, scale, positions))

    def operate(self, ops: list[Op], config: SteeringConfig) -> None:
        """Append ops. Plain additions that no other op comes before need no ops table; where there
        is one, it takes those with a vector for each position, which are as many sums else."""
        for op in ops:
            if op.heads:
                self.on_heads += [_OnHeads(op, term, where) for term, where in op.parts()]
                continue
            plain = op.name == "add" and not op.gated and not self.ops
            if not plain or (op.each and config.has_ops):
                self.ops.append(op)
                continue
            for term, positions in op.parts():
                vector = np.frombuffer(term.vector, np.float32).astype(np.float64)
                vector = vector * term.scalars.constant
                self.add({site: vector for site in op.sites}, positions)

    def most_ops(self) -> int:
        """The longest list of ops at one site."""
        at_site: Counter[Site] = Counter()
        for op in self.ops:
            for site in op.sites:
                at_site[site] += op.width
        return max(at_site.values(), default=0)

    def plan(self, path: str, inherit: bool, config: SteeringConfig) -> SteeringPlan:
        """Cut all positions into segments, in each of which the same acts.

        Args:
            path: what errors name.
            inherit: whether the global tiers are added.
            config: how much the engine has room for.

        Raises:
            ValueError: the sum of all vectors overflows, the segments are too much work, or there
                are more different ones than the engine has room for.
        """
        where = [addition.positions for addition in self.additions]
        where += [shared.positions for shared in self.shared]
        where += [part.positions for part in self.on_heads]
        where += [op.positions or ALL for op in self.ops]
        where += [focus.queries for focus in self.focused]
        edges = {0, self._prompt}
        decider = None
        if any(op.frozen for op in self.ops):
            decider = self._prompt - 1
            edges.add(decider)
        edges |= {edge for positions in where for edge in positions.flat() if edge < END}
        for op in self.ops:
            if op.each and op.positions is not None:
                edges |= set(op.positions.array().tolist())
            if op.begins is not None:
                edges.add(op.begins + 1)
        # What there is of a span at a position changes where its runs begin and end.
        edges |= {edge for focus in self.focused for edge in focus.op.runs if edge < END}
        firsts = np.array(sorted(edges), dtype=np.int64)
        self.work.charge(len(firsts), Unit.SEGMENT, path)
        self.work.charge(len(firsts) * len(where), Unit.CELL, path)
        acts = np.zeros((len(firsts), len(where)), dtype=bool)
        for i, positions in enumerate(where):
            acts[:, i] = positions.mask(firsts)
        split = len(self.additions) + len(self.shared) + len(self.on_heads)
        makers = _Sums(self, path)
        sum_keys = [row[:split].tobytes() for row in acts]
        sums = _made(
            sum_keys,
            makers.make,
            config.max_steering_configs,
            lambda needed: reject(
                path,
                f"the request needs {needed} slots, the engine has "
                f"max_steering_configs={config.max_steering_configs}",
            ),
        )
        programs = _Programs(self, path)
        program_keys = [
            programs.key(first, row[split : split + len(self.ops)], decides=first == decider)
            for first, row in zip(firsts.tolist(), acts, strict=True)
        ]
        made_programs = _made(
            program_keys,
            programs.make,
            config.max_steering_rows,
            lambda needed: reject(
                path,
                f"the request needs {needed} rows for its ops, the engine has "
                f"max_steering_rows={config.max_steering_rows}",
            ),
        )
        focused = acts[:, split + len(self.ops) :]
        focus = FocusPrograms(self.focused, self.work, path, config.max_steering_configs)
        segments: list[Segment] = []
        for first, sum_key, program_key, focusing in zip(
            firsts.tolist(), sum_keys, program_keys, focused, strict=True
        ):
            vector_sum, program = sums[sum_key], made_programs[program_key]
            segment = Segment(first, vector_sum, program, *focus.make(first, focusing))
            same = segments and msgspec.structs.replace(segments[-1], first=first) == segment
            if not same or first == self._prompt:
                segments.append(segment)
        return SteeringPlan(
            segments=segments,
            inherit=inherit,
            sums=list(makers.sums.values()),
            sets=list(makers.sets.values()),
            programs=list(programs.programs.values()),
            op_sites=programs.op_sites,
            terms=list(programs.terms.values()),
            focus_programs=list(focus.programs.values()),
            focus_ops=[each.op for each in self.focused],
            key_weights=self.key_weights,
        )


def _made(
    keys: list[Key], make: Callable[[Key], str], most: int, refuse: Callable[[int], NoReturn]
) -> dict[Key, str]:
    """Make what each key stands for; returns key -> its digest.

    Args:
        most: how many different ones there may be; `refuse` is called before more are made, since
            a request of a few kilobytes could ask for gigabytes of them.
    """
    made: dict[Key, str] = {}
    different: set[str] = set()
    for key in dict.fromkeys(keys):
        made[key] = make(key)
        different.add(made[key])
        if len(different) - (UNSTEERED in different) > most:
            refuse(len(set(keys)) - (UNSTEERED in different))
    return made


class _Sums:
    """The distinct sums of a request."""

    def __init__(self, builder: SegmentBuilder, path: str) -> None:
        self._builder = builder
        self._path = path
        self.sums: dict[str, VectorSum] = {}
        self.sets: dict[str, VectorSet] = {}

    def make(self, key: bytes) -> str:
        """The digest of the sum where bool [additions + shared + on_heads] `key` is true; keeps
        it."""
        with np.errstate(over="ignore", invalid="ignore"):  # the sums are looked at
            return self._make(key)

    def _make(self, key: bytes) -> str:
        acts = np.frombuffer(key, dtype=bool)
        own = [a for a, on in zip(self._builder.additions, acts, strict=False) if on]
        self._charge(sum(len(a.vectors) for a in own))
        acts = acts[len(self._builder.additions) :]
        shared = [s for s, on in zip(self._builder.shared, acts, strict=False) if on]
        acts = acts[len(self._builder.shared) :]
        on_heads = [part for part, on in zip(self._builder.on_heads, acts, strict=True) if on]
        factors: dict[Site, np.ndarray] = {}
        vector_set = own[0].vector_set if len(own) == 1 and not on_heads else None
        inline: AnyVectors = own[0].vectors if len(own) == 1 else add_up(a.vectors for a in own)
        if on_heads:
            if any(part.op.name == "scale" for part in on_heads):
                # What modules add is scaled, too: it becomes a part of this request's own set.
                self._charge(sum(len(s.vector_set.sites) for s in shared))
                inline, shared = add_up([inline, *map(_scaled, shared)]), []
            inline, factors = self._act_on_heads(inline, on_heads)
        if inline and vector_set is None:
            vector_set = vector_set_of(inline)
        bound = sum(abs(s.scale) * s.vector_set.largest for s in shared)
        bound += vector_set.largest if vector_set is not None else 0.0
        if not bound <= largest_sum(self._builder.shape):
            # Then the sums themselves are looked at, which takes a millisecond.
            self._charge(sum(len(s.vector_set.sites) for s in shared))
            tiers = chain([inline], map(_scaled, shared))
            need_finite_sum(add_up(tiers), self._path, self._builder.shape)
        scaled = [(s.vector_set.digest, s.scale) for s in shared]
        if vector_set is not None:
            self.sets[vector_set.digest] = vector_set
            scaled.append((vector_set.digest, 1.0))
        if not scaled and not factors:
            return UNSTEERED
        scaled.sort()
        at = [(site, factors[site].astype(np.float32).tobytes()) for site in sorted(factors)]
        vector_sum = VectorSum(digest=sum_digest(scaled, at), sets=scaled, factors=at)
        self.sums[vector_sum.digest] = vector_sum
        return vector_sum.digest

    def _act_on_heads(
        self, vectors: AnyVectors, on_heads: list[_OnHeads]
    ) -> tuple[Vectors, dict[Site, np.ndarray]]:
        """Operations on heads in their order, after `vectors`: what is added to a row once it is
        multiplied, and the factor of each head where one is not 1 by itself."""
        shape, made = self._builder.shape, dict(vectors)
        factors: dict[Site, np.ndarray] = {}
        self._charge(sum(len(part.op.sites) for part in on_heads))
        for part in on_heads:
            number = part.term.scalars.constant
            for site, heads in part.op.heads.items():
                count, width = shape.parts(site)
                chosen = list(heads) or list(range(count))
                row = made.get(site, np.zeros(count * width)).reshape(count, width).copy()
                if part.op.name == "scale":
                    row[chosen] *= number
                    factors.setdefault(site, np.ones(count))[chosen] *= number
                else:
                    vector = np.frombuffer(part.term.vector, np.float32).astype(np.float64)
                    row[chosen] += number * vector.reshape(-1, width)
                if site in made or part.op.name != "scale":
                    made[site] = row.reshape(-1)
        for (point, layer), numbers in factors.items():
            if not np.abs(numbers).max() <= np.finfo(np.float32).max:
                reject(
                    self._path, f"the factors of heads at {point} layer {layer} overflow float32"
                )
        return made, factors

    def _charge(self, num_vectors: int) -> None:
        num_bytes = num_vectors * 4 * self._builder.shape.hidden_size
        self._builder.work.charge(num_bytes >> 10, Unit.KILOBYTE, self._path)


def _scaled(shared: _Shared) -> Vectors:
    return {site: row * shared.scale for site, row in vectors_of(shared.vector_set).items()}


ProgramKey = tuple[bytes, bool, int]
"""Key of a program: the bytes of bool [ops], true for those that act; whether gates are decided
here; the position if it matters, else -1."""


class _Programs:
    """The distinct lists of ops of a request."""

    def __init__(self, builder: SegmentBuilder, path: str) -> None:
        self._ops = ops = builder.ops
        self._path, self._work = path, builder.work
        # A term keeps its place in the list of its site: frozen gates are kept by place.
        columns: dict[Site, list[int]] = {}
        first = 0
        for op in ops:
            for site in op.sites:
                columns.setdefault(site, []).extend(range(first, first + op.width))
            first += op.width
        self.op_sites = [(site, columns[site]) for site in sorted(columns, key=site_order)]
        self._differs = np.array([op.each for op in ops], dtype=bool)
        self._begin = {op.begins for op in ops}
        self.programs: dict[str, Program] = {}
        self.terms: dict[str, Term] = {}

    def key(self, first: int, acts: np.ndarray, decides: bool) -> ProgramKey:
        """The key of the program at position `first`, where bool [ops] `acts` is true."""
        differs = bool((acts & self._differs).any()) or first in self._begin
        return acts.tobytes(), decides, first if differs else -1

    def make(self, key: ProgramKey) -> str:
        """The digest of the program of a key; keeps it and its terms."""
        acts, decides, first = key
        self._work.charge(sum(len(ops) for _, ops in self.op_sites), Unit.CELL, self._path)
        chosen: list[Term | None] = []
        for op, on in zip(self._ops, acts, strict=True):
            if on:
                chosen += op.terms if first < 0 else op.terms_at(first)
            else:
                chosen += op.deciding() if op.frozen and decides else [None] * op.width
        if not any(chosen):
            return UNSTEERED
        self.terms |= {t.digest: t for t in chosen if t is not None}
        digests = [t.digest if t is not None else UNSTEERED for t in chosen]
        names = ",".join(f"{point}.{layer}" for (point, layer), _ in self.op_sites)
        listed = ";".join(",".join(digests[i] for i in ops) for _, ops in self.op_sites)
        digest = digest_of(f"{names};{decides};{listed}")
        self.programs[digest] = Program(digest, digests, decides, first in self._begin)
        return digest
