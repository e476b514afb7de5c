# SPDX-License-Identifier: Apache-2.0
"""Operations in a request (`SamplingParams.steering`): parsed and checked."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm.config.operations import ALSO, HEAD_OPERATIONS, INF, OPERATIONS, Operation
from vllm.config.points import RETURNED
from vllm.config.steering import ASKED
from vllm.v1.interventions.errors import need_family, show
from vllm.v1.interventions.given import Given, Select
from vllm.v1.interventions.likely import first_likely
from vllm.v1.interventions.low_rank import read_low_rank
from vllm.v1.interventions.named_features import probe_written_out, written_out
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.positions import ALL, Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_sites
from vllm.v1.interventions.terms import Term, make_term
from vllm.v1.interventions.values import Array, plain, plain_list
from vllm.v1.interventions.vectors import need_one_width, need_unit, pack_float32, pack_unit
from vllm.v1.steering_formula import Scalars

_GATE_KEYS = ("probe", "threshold", "sharpness")


@dataclass(frozen=True)
class Op:
    """One parsed entry of `SamplingParams.steering`."""

    name: str
    """A name of `OPERATIONS`."""
    sites: list[Site]
    positions: Positions | None
    """Positions at which the operation acts; None for all."""
    terms: list[Term]
    """Terms of the operation, which act one after the other on a row; if `each`, one for each of
    `positions`, ascending."""
    frozen: bool
    """True if its gate is decided once, at the last prompt row. It acts from there on; if not
    on that row itself, the row needs `deciding()`."""
    heads: dict[Site, tuple[int, ...]] = field(default_factory=dict)
    """At points of attention, which heads of each site: `()` for all, with a vector of the whole
    row, else the vector is of one head."""
    each: bool = False
    """True if `terms` are one for each of `positions`, of `values` of two dimensions."""

    @property
    def width(self) -> int:
        """Number of terms that act on a row; each is one of `max_steering_ops`."""
        return 1 if self.each else len(self.terms)

    @property
    def gated(self) -> bool:
        """True if it has a gate."""
        return bool(self.terms[0].probe)

    @property
    def begins(self) -> int | None:
        """The first position, where its gate latches; None where it does not."""
        if not self.terms[0].scalars.latched:
            return None
        return (self.positions or ALL).first_from(0)

    def parts(self) -> list[tuple[Term, Positions]]:
        """Each term, and where it acts."""
        if not self.each:
            return [(term, self.positions or ALL) for term in self.terms]
        assert self.positions is not None
        places = self.positions.array().tolist()
        return [(t, Positions.of([p])) for t, p in zip(self.terms, places, strict=True)]

    def terms_at(self, position: int) -> list[Term]:
        """The terms that act at a position; none where the operation does not act."""
        if self.positions is not None and position not in self.positions:
            return []
        terms = [self.terms[self._rank[position]]] if self.each else self.terms
        return [term.beginning() for term in terms] if position == self.begins else terms

    def deciding(self) -> list[Term]:
        """Terms that decide the gate at a last prompt row on which the operation does not act."""
        return [term.deciding() for term in self.terms[: self.width]]

    @cached_property
    def _rank(self) -> dict[int, int]:
        assert self.positions is not None
        return {position: i for i, position in enumerate(self.positions.array().tolist())}


@dataclass(frozen=True)
class _Gate:
    """A parsed gate."""

    probe: bytes
    """float32 [hidden], native endian; empty for no gate."""
    scalars: dict[str, float]
    """The gate's fields of `Scalars`."""


_UNGATED = _Gate(b"", {})


def parse_ops(
    value: Any,
    path: str,
    shape: TapShape,
    families: frozenset[str],
    select: Select,
    max_terms: int,
    others: Callable[[Any, str], bool] = lambda entry, path: False,
) -> list[Op]:
    """Parse `SamplingParams.steering`, a list of operations, in their order.

    Args:
        value: the user's list.
        path: the field's name, for errors.
        shape: what the model offers.
        families: what the engine was started with, of `config.steering.FAMILIES`.
        select: resolves `positions`.
        max_terms: most operations at one site.
        others: takes entries of other kinds, each with its path; returns whether it did.

    Raises:
        ValueError: an unknown operation, key, point or position, a layer the model does not have,
            a family the engine does not have, a vector of the wrong width, zero or not finite, a
            number out of its range, too many operations at one site.
    """
    ops: list[Op] = []
    at_site: Counter[Site] = Counter()
    given = Given(value, path)
    if isinstance(value, Mapping):
        given.refuse(_LIST, f"{show(value)} (one operation stands in a list of one)")
    for entry in given.entries(_LIST):
        if others(entry.value, entry.path):
            continue
        op = _Entry(written_out(entry, shape), shape, families, max_terms).parse(select)
        for point, layer in () if op.heads else op.sites:
            at_site[point, layer] += op.width
            if at_site[point, layer] > max_terms:
                come = f"comes to {at_site[point, layer]} ops at {point} {layer}"
                entry.refuse(f"{come}, the engine has max_steering_ops={max_terms}")
        ops.append(op)
    return ops


_LIST = "must be a list of operations, got {given}"


class _Entry:
    """One operation as the user wrote it."""

    def __init__(
        self, entry: Given, shape: TapShape, families: frozenset[str], max_terms: int
    ) -> None:
        entry.mapping()
        self.max_terms = max_terms
        self.given = entry
        self.shape = shape
        self.families = families
        self.of_heads = self.given["point"].says(RETURNED)
        self.lanes = 1 if self.of_heads else shape.lanes
        self.lane = -1
        self.width = shape.hidden_size

    def parse(self, select: Select) -> Op:
        operation = self.operation()
        heads = self.heads(operation) if self.of_heads else {}
        sites = list(heads)
        if not sites:
            points, layers = self.given["point"].value, self.given["layers"].value
            sites = need_sites(points, layers, self.given.path, self.shape)
        if "lane" in self.given:
            self.lane = self.given["lane"].lane(self.lanes)
        positions = None
        if "positions" in self.given:
            positions = self.given["positions"].positions(select)
        gate = self.gate()
        frozen = bool(gate.scalars.get("frozen"))
        if frozen:
            positions = self.after_decision(positions, select)
        if gate.scalars.get("latched") and positions is not None and len(positions.runs()) > 1:
            self.given["positions"].refuse(
                "must follow each other without a gap: a gate that latches passes what it knows "
                "from each position to the next"
            )
        numbers = self.numbers(operation)
        scalars = Scalars(**numbers, **gate.scalars, lane=float(self.lane))
        if operation.ranked:
            terms = self.ranked(operation, scalars, gate.probe)
            return Op(operation.name, sites, positions, terms, frozen)
        encoder, each = self.encoder(operation), self.has_rows()
        if each:
            assert positions is not None
            vectors = self.rows(operation, numbers, positions, select)
        else:
            key = "values" if "values" in self.given else operation.vector
            vectors = [self.vector(operation, numbers, self.given[key])]
        terms = [make_term(scalars, vector, gate.probe, encoder) for vector in vectors]
        return Op(operation.name, sites, positions, terms, frozen, heads, each)

    def ranked(self, operation: Operation, scalars: Scalars, probe: bytes) -> list[Term]:
        """The terms of an operation of matrices."""
        keys = (operation.reads, operation.vector, operation.shift)
        reads, vector, shift = (self.given[key] for key in keys)
        made = read_low_rank(reads, vector, shift, self.width, self.max_terms)
        self.need_range(made.B, vector)
        pack_float32(made.c, shift.path)
        return [
            make_term(
                made.numbers(i, scalars),
                self.in_lanes(pack_float32(column, vector.path)),
                probe,
                self.in_lanes(pack_float32(-row, reads.path)),
            )
            for i, (row, column) in enumerate(zip(made.A, made.B.T, strict=True))
        ]

    def heads(self, operation: Operation) -> dict[Site, tuple[int, ...]]:
        """`Op.heads` of an entry at z; `width` becomes that of its vectors."""
        chosen: dict[int, tuple[int, ...]]
        asked = self.given["heads" if "heads" in self.given else "layers"]
        if "heads" in self.given:
            chosen = asked.heads(RETURNED, self.shape)
            widths = {self.shape.layers[layer].heads[RETURNED][1] for layer in chosen}
        else:
            chosen = dict.fromkeys(asked.layers(RETURNED, self.shape), ())
            widths = {self.shape.row_width((RETURNED, layer)) for layer in chosen}
        self.width = max(widths)
        if operation.vector:
            need_one_width(RETURNED, widths, asked.path)
        return {(RETURNED, layer): chosen[layer] for layer in sorted(chosen)}

    def operation(self) -> Operation:
        """The operation, its keys checked."""
        op = self.given["op"]
        for name in ASKED:
            if op.says(name):
                op.refuse(f"{name} belongs to a request, in its field steering")
        said = ", ".join((*OPERATIONS, *ASKED))
        unknown = f"unknown operation {{given}}; operations are {said}"
        if "op" not in self.given and (meant := first_likely(self.given.value, "op")):
            op.refuse(unknown, f"None (did you mean 'op' by {meant}?)")
        name = op.choice(OPERATIONS, unknown, ALSO)
        operation = OPERATIONS[name]
        if self.of_heads and not operation.on_heads:
            do = " and ".join(HEAD_OPERATIONS)
            op.refuse(f"{name} does not act on heads; at {RETURNED} do {do}")
        if not self.of_heads and not operation.on_stream:
            self.given["point"].refuse(f"{name} acts on heads: its point is {RETURNED!r}")
        self.need_family(name, "op")
        needed = operation.needed
        if operation.rows and "values" in self.given:
            needed = tuple("values" if key == operation.vector else key for key in needed)
        if "values" in needed and self.has_rows():
            needed = (*needed, "positions")
        layers = "heads" if self.of_heads and "heads" in self.given else "layers"
        needed = ("op", "point", layers, *needed)
        more = () if self.of_heads else ("gate", *("lane",) * (self.lanes > 1))
        allowed = (*operation.optional, "positions", *more)
        self.given = self.given.fields(needed, allowed, name)
        return operation

    def need_family(self, family: str, key: str) -> None:
        need_family(family, self.families, self.given[key].path)

    def gate(self) -> _Gate:
        """The entry's gate, or `_UNGATED`."""
        if "gate" not in self.given:
            return _UNGATED
        self.need_family("gate", "gate")
        gate = probe_written_out(self.given["gate"], self.shape).fields(
            _GATE_KEYS, ("when", "cosine", "latch"), "a gate"
        )
        unknown = "unknown {given}; use 'row' or 'last_prompt'"
        when = gate.get("when", "row").choice(("row", "last_prompt"), unknown)
        rows, path = self.of_lanes(gate["probe"]).reshape(-1, self.width), gate["probe"].path
        frozen = when == "last_prompt"
        latch = gate.get("latch", False).flag()
        if latch and frozen:
            gate["latch"].refuse("is of gates that each row decides: leave it out, or 'when'")
        cosine = gate.get("cosine", False).flag()
        if cosine:
            rows = np.stack([need_unit(row, path) for row in rows])
        numbers = {name: gate[name].number() for name in _GATE_KEYS[1:]}
        numbers |= {"frozen": float(frozen), "cosine": float(cosine), "latched": float(latch)}
        return _Gate(self.in_lanes(pack_float32(rows, path)), numbers)

    def after_decision(self, positions: Positions | None, select: Select) -> Positions:
        """Return the positions at which an operation with a frozen gate acts; raise ValueError if
        one is before the gate is decided."""
        given = self.given["positions"]
        decided = select("predicting", given.path)
        if positions is None:
            return decided
        first, last_prompt = positions.first_from(0), decided.first_from(0)
        assert last_prompt is not None
        if first is not None and first < last_prompt:
            given.refuse(
                f"position {first} is before the last prompt token, which decides the gate"
            )
        return positions

    def has_rows(self) -> bool:
        """Tell whether `values` is a row for each position, and not one row for all."""
        values = self.given["values"].value
        if self.lanes > 1 and not ("lane" in self.given or "positions" in self.given):
            return False  # two dimensions are one row's lanes
        if isinstance(values, Array):
            return self.given["values"].array().ndim != 1
        return values is not None and not (
            isinstance(values, list) and values and isinstance(plain(values[0]), int | float)
        )

    def numbers(self, operation: Operation) -> dict[str, float]:
        """The operation's numbers of the formula, those of its gate aside."""
        made = dict(operation.fixed)
        for number in operation.numbers:
            value = number.default
            if value is None or number.key in self.given:
                given = self.given[number.key]
                value = float(given.flag()) if number.flag else given.number()
                if number.of_stream:
                    self.need_range(np.array(value), given)
                if not number.least <= value <= number.most:
                    given.refuse(f"must be from {number.least:g} to {number.most:g}, got {value}")
            if abs(value) < INF:
                made |= dict.fromkeys(number.becomes, value)
        if operation.one_of and not any(key in self.given for key in operation.one_of):
            keys = " or ".join(map(repr, operation.one_of))
            self.given.refuse(f"{operation.name} needs {keys}")
        lo, hi = made.get("lo", -INF), made.get("hi", INF)
        if lo > hi:
            self.given["lo"].refuse(f"{lo:g} is greater than hi, {hi:g}")
        return made

    def encoder(self, operation: Operation) -> bytes:
        """The direction that the operation reads the row by, as `vector`; empty if its vector."""
        if not operation.reads:
            return b""
        given = self.given[operation.reads]
        return self.in_lanes(pack_float32(self.of_lanes(given), given.path))

    def vector(self, operation: Operation, numbers: dict[str, float], given: Given) -> bytes:
        """The operation's vector, float32 [width] or [lanes, width]."""
        if not operation.vector:
            return b"" if self.of_heads else bytes(4 * self.width * self.lanes)
        vector, path = self.of_lanes(given), given.path
        if operation.times:
            packed = pack_float32(vector, path)
            with np.errstate(over="ignore"):
                made = vector * numbers[operation.times]
            self.need_range(made, self.given)
            return self.in_lanes(packed)
        if not operation.unit:
            self.need_range(vector, given)
            return self.in_lanes(pack_float32(vector, path))
        rows = vector.reshape(-1, self.width)
        if operation.other:
            other = self.given[operation.other]
            others = self.of_lanes(other).reshape(-1, self.width)
            pairs = zip(rows, others, strict=True)
            # Halved, so that a line that a module wrote is read as it was.
            halves = [need_unit(a, path) - need_unit(b, other.path) for a, b in pairs]
            rows = np.stack(halves) / 2
        paths = [path] if len(rows) == 1 else [f"{path}[{i}]" for i in range(len(rows))]
        return self.in_lanes(b"".join(map(pack_unit, rows, paths)))

    def of_lanes(self, given: Given) -> np.ndarray:
        """A vector for every lane, float64 [width], or of several one for each, flat."""
        return given.of_lanes(self.width, self.lanes if self.lane < 0 else 1)

    def in_lanes(self, vector: bytes) -> bytes:
        """A vector as `Term.vector` has it: zeros in the lanes that the operation leaves alone."""
        if self.lanes == 1:
            return vector
        every = np.zeros((self.lanes, self.width), np.float32)
        lanes = slice(None) if self.lane < 0 else self.lane
        every[lanes] = np.frombuffer(vector, np.float32).reshape(-1, self.width)
        return every.tobytes()

    def rows(
        self,
        operation: Operation,
        numbers: dict[str, float],
        positions: Positions,
        select: Select,
    ) -> list[bytes]:
        """`values` as vectors, one for each position, ascending."""
        asked, values = self.given["positions"], self.given["values"]
        order = positions.array().tolist()
        if (listed := plain_list(asked.value)) is not None:
            # A mapping keeps the order. The first repeat ends it: an entry may mean all positions.
            ordered: dict[int, None] = {}
            for entry in listed:
                for position in select([entry], asked.path).array().tolist():
                    if position in ordered:
                        asked.refuse(f"names position {position} twice")
                    ordered[position] = None
            order = list(ordered)
        given = values.value
        if not isinstance(given, list):
            shape = values.array().shape
            of_lanes = (self.lanes, self.width) if self.lane < 0 else (self.width,)
            if shape[1:] not in ((self.width,), of_lanes):
                values.refuse(f"has shape {list(shape)}, the model needs [n, {self.width}]")
        if len(given) != len(positions):
            values.refuse(f"has {len(given)} rows, positions select {len(positions)}")
        rows = [
            self.vector(operation, numbers, Given(value, f"{values.path}[{i}]"))
            for i, value in enumerate(given)
        ]
        return [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]

    def need_range(self, values: np.ndarray, given: Given) -> None:
        """Raise unless `values`, which are written into the stream, fit its dtype."""
        if not (np.abs(values) <= torch.finfo(self.shape.torch_dtype).max).all():
            given.refuse(f"overflows {self.shape.dtype}")
