# SPDX-License-Identifier: Apache-2.0
"""A sweep: one operation at one place after another, and what it changes of the next token.

`sweep_request.py` checks what is asked. Who runs the cells is another file's, too: `sweep_run.py`
for a server, `vllm/pilot/patching.py` for an engine of this process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from random import Random
from typing import Any

import numpy as np

from vllm.config.points import READ_POINTS
from vllm.v1.interventions.errors import reject

from .sweep_places import AnyCell, Places, Rows

NOISE_CELLS = 16
"""Cells of which it is seen what replacing a row by itself changes; they lie all over the grid."""


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that was checked."""

    op: Mapping[str, Any]
    """The operation, without its place; without `values` if the clean prompt's rows are those."""
    patches: bool
    """True if rows of the clean prompt are put in."""
    places: Places[Any]
    scales: list[float] | None
    answers: list[int]
    """The token ids of `answer` and, if given, `other`."""
    metric: str
    tokens: list[str] | None
    """The text of the token at each position; None without a tokenizer."""

    @cached_property
    def points(self) -> list[str]:
        """The points, in the order of the stream."""
        return sorted({point for point, _ in self.places.sites}, key=READ_POINTS.index)

    @cached_property
    def layers(self) -> list[int]:
        """The layers of any point, ascending."""
        return sorted({layer for _, layer in self.places.sites})

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return self.places.count * len(self.scale_axis)

    @property
    def scale_axis(self) -> Sequence[float | None]:
        """The scales; one None where they are no axis."""
        return self.scales or [None]

    def cells(self) -> Iterator[AnyCell]:
        """Cells, in the order of their places."""
        return map(self._cell, range(self.num_cells))

    def _cell(self, i: int) -> AnyCell:
        """The cell at a place in the order of `cells`."""
        i, scale = divmod(i, len(self.scale_axis))
        return self.places.cell(i, self.scale_axis[scale])

    def noise_cells(self) -> list[AnyCell]:
        """The places where rows are replaced by themselves; none where no rows are put in."""
        if not self.patches:
            return []
        # Drawn, always alike: every n-th cell may be of one point.
        count = min(NOISE_CELLS, self.num_cells)
        return [self._cell(i) for i in sorted(Random(0).sample(range(self.num_cells), count))]

    def asks(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that all requests have."""
        return {
            "max_tokens": 1,
            "temperature": 0.0,
            "detokenize": False,
            "logprob_token_ids": self.answers,
        }

    def of_clean(self) -> dict[str, Any]:
        """Return the fields of the clean prompt's request: its rows are captured."""
        return {"capture": {"inline": self.places.of_clean()}}

    def of_prompt(self) -> dict[str, Any]:
        """Return the fields of the prompt's request: rows of `noise_cells` are captured."""
        cells = self.noise_cells()
        return {"capture": {"inline": self.places.reads(cells)}} if cells else {}

    def of_cell(self, cell: AnyCell, clean: Rows | None) -> dict[str, Any]:
        """Return the fields of a cell's request.

        Args:
            clean: the clean prompt's rows, if they are put in.
        """
        op = self.op if cell.scale is None else {**self.op, "scale": cell.scale}
        return {"steering": self.places.steered(op, cell, clean, self.places.shift)}

    def of_noise(self, cell: AnyCell, prompt: Rows) -> dict[str, Any]:
        """Return the fields of a request in which a cell's row is replaced by itself."""
        return {"steering": self.places.steered(self.op, cell, prompt, 0)}

    def score(self, logprobs: Any) -> float:
        """Return log P(answer), less log P(other) if there is one, in nats.

        Args:
            logprobs: those of the first token of an output, by token id.
        """
        found = [float(logprobs[token].logprob) for token in self.answers]
        return found[0] - found[1] if len(found) > 1 else found[0]


@dataclass
class Grid:
    """Results of a sweep: the scores without the operation, and a value for each cell."""

    plan: SweepPlan
    clean: float | None
    """The score of the clean prompt, nats; None if there is none."""
    corrupt: float
    """The score of the prompt without the operation."""
    noise_floor: float | None = None
    """The largest change, in nats, where a row is replaced by itself; None if none is."""
    values: np.ndarray = field(init=False)
    """float64 [points, layers, positions or heads, scales or 1]; NaN where a layer lacks the point
    or the head."""

    def __post_init__(self) -> None:
        """Raise ValueError where there is nothing to recover."""
        plan = self.plan
        self.values = np.full(tuple(map(len, self._axes)), np.nan)
        if plan.metric == "recovered" and not abs((self.clean or 0.0) - self.corrupt) > 0:
            reject(
                "metric",
                f"both prompts give the answer {self.corrupt:.6g} nats: there is nothing to "
                "recover; ask for logprob or diff, or of other prompts",
            )

    def add(self, cell: AnyCell, score: float) -> float:
        """Note a cell's score; return its value."""
        if self.plan.metric == "recovered":
            assert self.clean is not None
            score = (score - self.corrupt) / (self.clean - self.corrupt)
        at = tuple(names[name] for names, name in zip(self._places, cell, strict=True))
        self.values[at] = score
        return score

    def note_noise(self, scores: Sequence[float]) -> None:
        """Note the scores of rows that were replaced by themselves."""
        if scores:
            self.noise_floor = max(abs(score - self.corrupt) for score in scores)

    def head(self) -> dict[str, Any]:
        """Return what is known before the cells, as JSON."""
        plan = self.plan
        return {
            "metric": plan.metric,
            "points": plan.points,
            "layers": plan.layers,
            "positions": plan.places.positions,
            plan.places.name: list(plan.places.along),
            "tokens": plan.tokens,
            "scales": plan.scales,
            "clean": as_json(self.clean),
            "corrupt": as_json(self.corrupt),
            "noise_floor": as_json(self.noise_floor),
            "cells": plan.num_cells,
        }

    def table(self) -> list[Any]:
        """Return the values as lists, [points][layers][positions or heads] and [scales] if that is
        an axis; null where a layer lacks the place or a value is not finite."""
        values = self.values if self.plan.scales is not None else self.values[..., 0]
        shown = values.astype(object)
        shown[~np.isfinite(values)] = None
        as_lists: list[Any] = shown.tolist()
        return as_lists

    @property
    def _axes(self) -> tuple[Sequence[Any], ...]:
        plan = self.plan
        return plan.points, plan.layers, plan.places.along, plan.scale_axis

    @cached_property
    def _places(self) -> tuple[dict[Any, int], ...]:
        return tuple({name: i for i, name in enumerate(axis)} for axis in self._axes)


def as_json(value: float | None) -> float | None:
    """Return a number as JSON has it: null where it is not finite."""
    return value if value is not None and isfinite(value) else None
