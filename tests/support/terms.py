# SPDX-License-Identifier: Apache-2.0
"""Operations on made-up rows, through the parser and the op of the workers, without an engine.

`Site` lays a request's operations out as programs of terms, as the scheduler and the workers do for
a real one, and steps rows through them in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.support import op_reference
from vllm.config.operations import STREAM_OPERATIONS
from vllm.model_executor.layers.steering_terms import TermTables
from vllm.v1.interventions.operations import Op, parse_ops
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.terms import Term
from vllm.v1.steering_formula import Scalars

POINT, LAYER = "post_block", 1
MAX_TERMS = 24
LENGTH = 9
"""Rows of a made-up request."""
FAMILIES = frozenset({*STREAM_OPERATIONS, "gate"})

Steer = Callable[..., None]
"""`steer_rows_torch` or `steer_rows_triton`."""


def shape_of(hidden: int, dtype: torch.dtype = torch.float32) -> TapShape:
    """A model with the one site."""
    return TapShape(hidden, str(dtype).removeprefix("torch."), {LAYER: LayerShape((POINT,))})


def selecting(num_prompt: int, end: int) -> Callable[[Any, str], Positions]:
    """A `select` that knows lists of absolute positions and three names."""
    named = {
        "predicting": [(num_prompt - 1, end)],
        "all_generated": [(num_prompt, end)],
        "all_prompt": [(0, num_prompt)],
    }

    def select(value: Any, path: str) -> Positions:
        return Positions(named[value]) if isinstance(value, str) else Positions.of(value)

    return select


def entry(op: str, **fields: Any) -> dict[str, Any]:
    """An operation at the one site, as a user writes it."""
    return {"op": op, "point": POINT, "layers": LAYER, **fields}


class Maker:
    """Random operations whose numbers fit rows of norm about `size`."""

    def __init__(self, seed: int, hidden: int, size: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.hidden, self.size = hidden, size

    def rows(self, count: int = LENGTH) -> torch.Tensor:
        """float32 [count, hidden]."""
        rows = self.rng.standard_normal((count, self.hidden)) * self.size / self.hidden**0.5
        return torch.from_numpy(rows).float()

    def direction(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(self.hidden))

    def number(self) -> float:
        """Of either sign, and never so small that it would do nothing that can be seen."""
        return float(self.rng.choice([-1, 1]) * self.rng.uniform(0.1, 2))

    def gate(self, when: str = "row") -> dict[str, Any]:
        """One that is neither shut nor open on rows of this size."""
        if self.rng.integers(2):
            return {
                "probe": self.direction() * self.size,
                "threshold": self.number() / 4 / self.hidden**0.5,
                "sharpness": self.number() * self.hidden**0.5,
                "when": when,
                "cosine": True,
            }
        return {
            "probe": self.direction() / self.size,
            "threshold": self.number() / 4,
            "sharpness": self.number(),
            "when": when,
        }

    def feature(self, value: float) -> dict[str, Any]:
        """One that adds, or is set to a value. It is active on about half of the rows, or, if it
        acts only where it is active, on nearly all of them, so that it can be seen."""
        changes = ({"add": value}, {"value": value, "strength": self.number()}, {"value": value})
        spread, only_if_active = self.size / self.hidden**0.5, bool(self.rng.integers(2))
        return {
            "encoder": self.direction() / self.hidden**0.5,
            "decoder": self.direction() / self.hidden**0.5,
            "bias": spread * (3 if only_if_active else self.number() / 4),
            "threshold": abs(self.number()) * spread / 4,
            "only_if_active": only_if_active,
            **changes[self.rng.integers(3)],
        }

    def low_rank(self, rank: int) -> dict[str, Any]:
        """One that moves a row by about its own size, of columns that overlap."""
        return {
            "A": torch.stack([self.direction() for _ in range(rank)]),
            "B": torch.stack([self.direction() for _ in range(rank)], 1) / self.hidden / rank**0.5,
            "c": self.size / self.hidden**0.5 * torch.from_numpy(self.rng.standard_normal(rank)),
            "strength": self.number(),
        }

    def op(self, name: str, **more: Any) -> dict[str, Any]:
        lo = self.number() * self.size / 4
        fields: dict[str, Callable[[], dict[str, Any]]] = {
            "add": lambda: {"vector": self.rows(1)[0], "scale": self.number()},
            "norm_match": lambda: {"direction": self.direction(), "scale": self.number()},
            "ablate": lambda: {"direction": self.direction(), "strength": self.number()},
            "clamp": lambda: {
                "direction": self.direction(),
                "lo": lo,
                # Narrower than the rows are spread along a direction: some lie outside.
                "hi": lo + abs(self.number()) * self.size / (8 * self.hidden**0.5),
            },
            "pin": lambda: {"direction": self.direction(), "value": lo},
            "replace": lambda: {
                "values": self.rows(3),
                "positions": self.rng.permutation(LENGTH)[:3].tolist(),
                "alpha": abs(self.number()) / 2,
            },
            "normalize": lambda: {},
            "swap": lambda: {"direction": self.direction(), "other": self.direction()},
            "feature": lambda: self.feature(lo),
            "low_rank": lambda: self.low_rank(int(self.rng.integers(1, 5))),
        }
        return entry(name, **(fields[name]() | more))


class Site:
    """One request's operations at one site, and the device's side of them.

    Args:
        asked: operations as a user writes them, of this site.
        length: rows of the request.
        num_prompt: those of the prompt.
        families: what the engine was started with; all if not given.
        depth: positions of which latched gates are kept.
    """

    def __init__(
        self,
        asked: Sequence[Mapping[str, Any]],
        hidden: int,
        length: int,
        num_prompt: int = 1,
        families: frozenset[str] = FAMILIES,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.asked, self.num_prompt, self.dtype, self.device = asked, num_prompt, dtype, device
        select = selecting(num_prompt, length)
        shape = shape_of(hidden, dtype)
        self.ops = parse_ops(list(asked), "steering", shape, families, select, MAX_TERMS)
        self._rows: list[torch.Tensor] = [torch.zeros(hidden)]
        self._terms: dict[str, int] = {}
        self._scalars: dict[int, Scalars] = {}
        self._probes: dict[int, int] = {}
        self._encoders: dict[int, int] = {}
        begins = [op.begins for op in self.ops if op.begins is not None]
        programs: dict[tuple[tuple[int, ...], bool], int] = {((0,) * MAX_TERMS, False): 0}
        frozen = any(op.frozen for op in self.ops)
        of_position = []
        for position in range(length):
            # A program that decides is the last prompt row's alone.
            decides = frozen and position == num_prompt - 1
            key = self._program(position), decides
            of_position.append(programs.setdefault(key, len(programs)))
        self.of_position = torch.tensor(of_position, dtype=torch.int32)
        self.keeper = of_position[begins[0]] if begins else 0
        """The program at which latched gates are kept."""
        self.tables = self._lay_out(list(programs), families)

    def _program(self, position: int) -> tuple[int, ...]:
        columns = [column for op in self.ops for column in self._columns(op, position)]
        return tuple(columns + [0] * (MAX_TERMS - len(columns)))

    def _columns(self, op: Op, position: int) -> list[int]:
        terms = op.terms_at(position)
        if not terms and op.frozen and position == self.num_prompt - 1:
            terms = op.deciding()
        return [self._place(term) for term in terms] or [0] * op.width

    def _place(self, term: Term) -> int:
        if term.digest not in self._terms:
            self._terms[term.digest] = row = self._row(term.vector)
            self._scalars[row] = term.scalars
            if term.probe:
                self._probes[row] = self._row(term.probe)
            if term.encoder:
                self._encoders[row] = self._row(term.encoder)
        return self._terms[term.digest]

    def _row(self, data: bytes) -> int:
        self._rows.append(torch.frombuffer(bytearray(data), dtype=torch.float32))
        return len(self._rows) - 1

    def _lay_out(
        self, programs: Sequence[tuple[tuple[int, ...], bool]], families: frozenset[str]
    ) -> TermTables:
        rows = len(self._rows)
        scalars = torch.zeros(rows, len(Scalars._fields))
        probes, encoders = torch.zeros(2, rows, dtype=torch.int32)
        for row, values in self._scalars.items():
            scalars[row] = torch.tensor(values)
            probes[row] = self._probes.get(row, 0)
            encoders[row] = self._encoders.get(row, 0)
        owner = next((p for p, (_, decides) in enumerate(programs) if decides), 0)
        gate_owners = torch.tensor([[owner], [self.keeper]], dtype=torch.int32)
        gate_owners = gate_owners.repeat(1, len(programs))
        gate_owners[:, 0] = 0
        tables = TermTables(
            program=torch.zeros(len(self.of_position), dtype=torch.int32),
            runs=torch.zeros(2, len(self.of_position), dtype=torch.int32),
            programs=torch.tensor([terms for terms, _ in programs], dtype=torch.int32),
            vectors=torch.stack(self._rows),
            scalars=scalars,
            probes=probes,
            encoders=encoders,
            gate_owners=gate_owners,
            gates=torch.full((1 + self.depth, len(programs), MAX_TERMS), float("nan")),
            norms=True,
            gated="gate" in families,
            encodes=bool({"feature", "low_rank"} & families),
        )
        return on_device(tables, self.device)

    def step(
        self,
        steer: Steer,
        rows: torch.Tensor,
        positions: Sequence[int],
        table: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, hidden] after one step over rows of these positions, in this order."""
        h = rows.to(self.device, self.dtype, copy=True)
        if table is None or slots is None:
            table, slots = torch.zeros_like(h[:1]), torch.zeros(len(h), dtype=torch.int32)
        self.tables.program[: len(h)] = self.of_position[list(positions)].to(self.device)
        if self.keeper:
            self.tables.runs[0, : len(h)] = -1
            self.tables.runs[0, 0] = len(h)
            self.tables.runs[1, : len(h)] = torch.tensor(list(positions)) % self.depth + 1
        steer(h, table.to(self.device, self.dtype), slots.to(self.device), self.tables, shift)
        return h.cpu()

    def expected(self, rows: torch.Tensor, additive: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [length, hidden]: all rows of the request, by the reference."""
        added = torch.zeros_like(rows) if additive is None else additive
        ops = [plain(asked, op) for asked, op in zip(self.asked, self.ops, strict=True)]
        result = op_reference.apply_site(
            rows.double().numpy(), added.double().numpy(), ops, self.num_prompt
        )
        return torch.from_numpy(result)


def on_device(tables: TermTables, device: str) -> TermTables:
    """A copy there."""
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in vars(tables).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(tables, **moved)


def plain(asked: Mapping[str, Any], op: Op) -> dict[str, Any]:
    """The operation as the reference takes it: positions resolved, arrays float64."""
    fields = {key: _array(value) for key, value in asked.items() if key != "positions"}
    given = asked.get("positions")
    if op.positions is not None:
        fields["positions"] = given if isinstance(given, list) else op.positions.array().tolist()
    if "gate" in fields:
        fields["gate"] = {key: _array(value) for key, value in asked["gate"].items()}
    return fields


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double().numpy()
    return np.array(value, dtype=np.float64) if isinstance(value, list) else value


def worst(got: torch.Tensor, want: torch.Tensor, *passed: torch.Tensor) -> float:
    """The worst row's, relative to the largest row among `want` and `passed`."""
    largest = max(float(t.double().norm(dim=-1).max()) for t in (want, *passed))
    return float((got.double() - want).norm(dim=-1).max()) / largest
