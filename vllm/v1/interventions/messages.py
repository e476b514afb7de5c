# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes in a step: decisions down to the workers, rows back up."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from vllm.v1.capture.copies import joined
from vllm.v1.interventions.plan import Site, Stream, VectorSet
from vllm.v1.steering_formula import Scalars

NOTHING, GLOBALS_ALONE = 0, 1
"""Slots that belong to nobody: zeros, and what plain requests get while global tiers are set."""


FIRST_SLOT = 2
"""The first slot that requests get."""

ROWS_PER_SLOT = 2
"""Rows of a slot: for prompt positions, and for generated ones (global tiers may differ)."""


def num_table_rows(max_steering_configs: int) -> int:
    """Rows of the steering table, those of slots that belong to nobody included."""
    return ROWS_PER_SLOT * (FIRST_SLOT + max_steering_configs)


def table_row(slot: int, generated: bool) -> int:
    """The table row of a slot in one phase. Slot 0 has one row, so that plain tokens have row 0."""
    if slot < GLOBALS_ALONE:
        return 0
    assert slot >= FIRST_SLOT or slot == GLOBALS_ALONE
    return ROWS_PER_SLOT * slot + generated


class GlobalTiers(msgspec.Struct, frozen=True):
    """The vectors that act on every request that does not opt out."""

    version: int
    """Number of changes so far."""
    tiers: dict[str, VectorSet]
    """Tier -> its vectors; a tier without any is left out."""

    @property
    def active(self) -> bool:
        """True if any tier has vectors."""
        return bool(self.tiers)


class WorkerRequest(msgspec.Struct, frozen=True):
    """A request as a worker keeps it, from its admission to its end."""

    firsts: np.ndarray
    """int64 [segments]: the first position of each."""
    table_rows: np.ndarray
    """int32 [segments]: the row of the steering table."""
    programs: np.ndarray
    """int32 [segments]: the row of the program table, 0 for no ops."""
    streams: tuple[Stream, ...] = ()
    """Streams of what it captures, without positions."""
    focus: tuple[int, ...] = ()
    """The row of the table of focus programs of each segment, 0 for none; () for none anywhere."""
    latches: bool = False
    """True if it has gates that latch."""


class PlacedTerm(msgspec.Struct, frozen=True, gc=False):
    """A term, or the probe of a gate or an encoder, as workers know it."""

    vector: bytes
    """Bytes of `Term.vector`, of `Term.probe` or of `Term.encoder`."""
    scalars: Scalars
    probe_row: int
    """The row of its gate's probe in the same table; 0 for no gate."""
    encoder_row: int
    """The row of its encoder in the same table; 0 for none."""


class PlacedProgram(msgspec.Struct, frozen=True, gc=False):
    """A program of a request as workers know it."""

    op_sites: list[tuple[Site, list[int]]]
    """Sites of `SteeringPlan.op_sites`: one object for all programs of a request, sent once."""
    terms: list[int]
    """The row of each op's term, 0 for none."""
    gate_owner_row: int
    """The row of the program that decides all gates of the request; 0 if none are decided once."""
    latch_owner_row: int
    """The row that keeps what latched gates of the request know; 0 if none latch."""


TableName = Literal["sums", "terms", "programs", "focus", "matrices"]


class StepInterventions(msgspec.Struct):
    """The scheduler's decisions for one step. A worker applies them in the order of the fields."""

    version: int
    """Version of the global steering."""
    new_sets: list[VectorSet] = []
    tiers: GlobalTiers | None = None
    """The global tiers, if they changed."""
    dropped_sets: list[str] = []
    placed: dict[TableName, list[tuple[int, Any]]] = {}
    """Contents to write into each table before this step's forward, each with the first of its
    rows. Sums: (`VectorSum`, True if the global tiers are added). Terms: `PlacedTerm`.
    Programs: `PlacedProgram`. Focus: `FocusOp`s that act together. Matrices: float32 [k, hidden], C
    order, native endian."""
    admitted: dict[str, WorkerRequest] = {}
    rows: dict[str, np.ndarray] = {}
    """Rows to capture: request id -> int32 offsets into the request's tokens of this step."""
    split: bool = False
    """True if all senders capture and send them, each of its share; else the first alone."""

    @property
    def empty(self) -> bool:
        """True if there is nothing to tell the workers."""
        return not (
            self.new_sets
            or self.tiers
            or self.dropped_sets
            or self.placed
            or self.admitted
            or self.rows
        )


class CapturedChunk(msgspec.Struct, array_like=True, gc=False):
    """Rows of requests in one step, those of a request in position order next to each other."""

    positions: np.ndarray
    """int64 [n]; those of all streams together."""
    values: list[torch.Tensor]
    """One tensor per stream of the capture plan: [n, its sites, its width], its dtype, CPU; of sums
    [owners, its sites, its width]. Where several workers sent a part, those of the first one, then
    of the next, each with the sites it has: `parts` and `stream` pick those of a stream."""
    version: int
    """Version of the global steering that the step ran under."""
    owners: list[tuple[str, int]]
    """Owners of the rows, in the rows' order: (request id, number of rows)."""
    summed: np.ndarray | None = None
    """The positions that sums were made of, int64 [m], where they are not `positions`: rows of one
    request were left out."""
    senders: int = 1
    """Number of workers that sent a part."""

    @property
    def num_streams(self) -> int:
        """Number of streams of the capture plan."""
        return len(self.values) // self.senders

    def parts(self, stream: int) -> list[torch.Tensor]:
        """Return the values of a stream, by its index: [n, sites, width] of each sender."""
        return self.values[stream :: self.num_streams]

    def stream(self, stream: int) -> torch.Tensor:
        """Return the values of a stream, by its index: [n, its sites, its width]."""
        parts = self.parts(stream)
        return parts[0] if len(parts) == 1 else joined(parts, axis=1)

    def of_streams(self) -> list[int]:
        """Return the index of the stream that each of `values` is of."""
        return [*range(self.num_streams)] * self.senders

    def by_owner(self) -> "Iterator[CapturedChunk]":
        """Cut into those of its owners, views."""
        counts = [count for _, count in self.owners]
        stops = accumulate(counts)
        at = [self.positions[b - n : b] for n, b in zip(counts, stops, strict=True)]
        # Views of all requests at once: of each by itself takes several times longer.
        number = len(self.positions)
        parts = [values.split(counts if len(values) == number else 1) for values in self.values]
        for owner, here, *mine in zip(self.owners, at, *parts, strict=True):
            yield CapturedChunk(here, mine, self.version, [owner], self.summed, self.senders)
