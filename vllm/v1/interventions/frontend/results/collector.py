# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion, gathered as they come: what `inline` returns."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.copies import CopyThreads, Filled, copies_of, integers, steps_into
from vllm.v1.capture.results import CaptureResult, SiteRows
from vllm.v1.capture.transport.mean import RunningMean
from vllm.v1.capture.transport.selected import RowsLost, Selected
from vllm.v1.interventions.frontend.results.gathered import (
    MeanRow,
    ResultMaker,
    RowsSoFar,
    Texts,
    keys_of,
    rows_in,
)
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.frontend.results.pieces import Piece, Run, Steps
from vllm.v1.interventions.plan import CapturePlan, Site, dtype_of
from vllm.v1.interventions.shape import LayerShape

ALL_ROWS = sys.maxsize - 1
"""Limit of rows that leaves none out."""


class RowCollector:
    """The rows of one completion.

    They arrive in position order, each position once (the scheduler sees to that). What is past
    the final length (stop strings are found here, after the engine sampled on) is trimmed here.

    Args:
        layers: of the model; rows of queries have the rule of their attention beside.
        threads: copy rows.
        memory: what they are copied to.
        texts: says the tokens, for captures that ask for it.
    """

    def __init__(
        self,
        plan: CapturePlan,
        prompt_token_ids: list[int],
        consumers: Iterable[str],
        layers: Mapping[int, LayerShape],
        threads: CopyThreads,
        memory: KeptMemory,
        texts: Texts,
    ) -> None:
        self._plan, self._threads, self._memory = plan, threads, memory
        self._prompt_token_ids = prompt_token_ids
        self._maker = ResultMaker(plan, prompt_token_ids, layers, threads, memory, texts)
        self._selected = {
            name: Selected(plan.consumers[name], len(prompt_token_ids)) for name in consumers
        }
        self._means = {
            i: RunningMean(stream)
            for i, stream in enumerate(plan.streams)
            if stream.making.adds_up
            and any(i in s.selection.streams for s in self._selected.values())
        }
        """By stream."""
        self._summed: list[tuple[Run, slice, int, int]] = []
        """Runs with sums of this completion: its rows and place in each step, and the first step
        that was not added up."""
        self._moved: list[Piece] = []
        """Rows in memory of their own, before those of `_runs`."""
        self._runs: list[tuple[Run, slice, int]] = []
        """Runs with rows of this completion: where in each step, and from which step on."""
        self._gone: list[np.ndarray] = []
        """Positions of rows that were returned and let go."""
        self._delivered = 0
        self.num_rows = dict.fromkeys(self._selected, 0)
        """Rows that each consumer has got of a site."""

    def add(self, run: Run, name: str) -> None:
        """Take what a request, this completion, has in all steps that a run is going to have."""
        self._runs.append((run, run.rows[name], len(run.chunks)))
        if self._means:
            self._summed.append((run, run.rows[name], run.places[name], len(run.chunks)))

    def _add_up(self) -> None:
        """Add up the sums of new steps. Only the last run may go on."""
        for run, rows, place, first in self._summed:
            for chunk in run.chunks[first:]:
                at = chunk.positions[rows] if chunk.summed is None else chunk.summed
                for i, mean in self._means.items():
                    mean.add(at, chunk.stream(i)[place], chunk.version)
        self._summed = [(run, r, p, len(run.chunks)) for run, r, p, _ in self._summed[-1:]]

    def _unmoved(self) -> list[Piece]:
        return [
            Piece.of(run.steps(), rows, first)
            for run, rows, first in self._runs
            if first < len(run.chunks)
        ]

    @property
    def lies_in_landing(self) -> bool:
        """True if all rows that were not moved lie where they landed."""
        return all(run.last_ordinary < first for run, _, first in self._runs)

    def move(self) -> None:
        """Have rows copied to memory of their own; none of their runs may go on. Whoever reads them
        waits for that."""
        self._add_up()
        pieces = self._unmoved()
        self._runs, self._summed = [], []
        if not pieces:
            return
        values, filled = list[list[np.ndarray]](), list[Filled]()
        positions, versions = rows_in(pieces)
        for i, stream in enumerate(self._plan.streams):
            if stream.making.adds_up:
                values.append([np.empty(0)])  # added up by now
                continue
            steps = [step for piece in pieces for step in piece.parts(i)]
            num_sites, width = sum(p.shape[1] for p in steps[0]), steps[0][0].shape[2]
            shape = len(positions), num_sites, width
            values.append([integers(self._memory.of_rows(shape, dtype_of(stream.dtype)))])
            filled += steps_into(values[-1], steps)
        started = self._threads.follow(copies_of(filled))
        # Another list: results so far have this one.
        self._moved = [*self._moved, Piece(positions, versions, [values], slice(None), started)]

    def cut(self, stop: int) -> None:
        """Let go of rows at positions from `stop` on, and of all that their steps still bring:
        they come anew."""
        self.move()
        moved = []
        for piece in self._moved:
            if rows := int(np.searchsorted(piece.positions, stop)):
                kept = slice(0, rows)
                moved.append(
                    piece._replace(
                        positions=piece.positions[kept], versions=piece.versions[kept], rows=kept
                    )
                )
        self._moved, self._delivered = moved, min(self._delivered, stop)

    @cached_property
    def _keys(self) -> dict[str, dict[Any, Site]]:
        """The keys of each consumer's result."""
        return {name: dict(keys_of(s.selection)) for name, s in self._selected.items()}

    def so_far(
        self, output_token_ids: Sequence[int], most_rows: int = ALL_ROWS
    ) -> dict[str, CaptureResult]:
        """The results so far of a completion that goes on; the arguments are those of `results`."""
        num_tokens = min(len(self._prompt_token_ids) + len(output_token_ids), most_rows + 1)
        runs = list[tuple[Steps, slice, int]]()
        for run, rows_of, first in self._runs:
            if first < (number := len(run.chunks)):
                steps = run.made if len(run.made.values) == number else run.steps()
                runs.append((steps, rows_of, first))
        results = {}
        for name, selected in self._selected.items():
            stream = selected.selection.streams[0]
            if (mean := self._means.get(stream)) is not None:
                payload: SiteRows[Any] = self._mean_row(selected, mean, finished=False).by_site()
            else:
                rows = RowsSoFar(
                    self._maker, selected, self._moved, runs, output_token_ids, num_tokens
                )
                payload = SiteRows(self._keys[name], rows)
            results[name] = CaptureResult(None, None, payload)
        return results

    def results(
        self,
        output_token_ids: Sequence[int],
        *,
        finished: bool,
        aborted: bool,
        only_new: bool,
        most_rows: int = ALL_ROWS,
    ) -> dict[str, CaptureResult]:
        """The results at the end, or those that are new. Rows may still be on their way to where
        they are read.

        Args:
            output_token_ids: the generated tokens so far.
            finished: whether these are all there will be.
            aborted: whether the request was cut off, so that rows may be missing.
            only_new: leave out rows that an earlier call returned (streaming of deltas).
            most_rows: the position from which on none come, with an answer that ends in tokens
                that a rule put there.
        """
        self._add_up()
        num_tokens = min(len(self._prompt_token_ids) + len(output_token_ids), most_rows + 1)
        pieces = self._moved + self._unmoved()
        positions, versions = rows_in(pieces)
        results = {}
        for name, selected in self._selected.items():
            num_rows = selected.num_rows(num_tokens)
            if (mean := self._means.get(selected.selection.streams[0])) is not None:
                made, came = self._mean_row(selected, mean, finished), [mean.positions]
                payload: SiteRows[Any] = made.by_site()
                results[name] = self._result(selected, payload, came, num_rows, finished, aborted)
                self.num_rows[name] = len(made.positions)
                continue
            at = self._wanted(selected, positions, num_rows, finished, only_new)
            self.num_rows[name] = len(at) + self.num_rows[name] * only_new
            came_with = selected.selection, pieces, at, (positions, versions)
            payload = self._maker.rows(*came_with, output_token_ids).by_site()
            came = [*self._gone, positions] if finished else []
            results[name] = self._result(selected, payload, came, num_rows, finished, aborted)
        if only_new:
            self._delivered = num_tokens - 1
            self._forget(pieces)
        return results

    def _wanted(
        self,
        selected: Selected,
        positions: np.ndarray,
        num_rows: int,
        finished: bool,
        only_new: bool,
    ) -> np.ndarray:
        """Indices of the rows that go into a result, int64 [n]."""
        keep = selected.mask(positions, num_rows)
        if only_new:
            keep &= positions >= self._delivered
        if finished and selected.selection.last_generated:
            keep |= selected.last(num_rows).mask(positions)  # so never delivered before
        return np.flatnonzero(keep)

    def _mean_row(self, selected: Selected, mean: RunningMean, finished: bool) -> MeanRow:
        """One row a site, at the last position; none before the end, or without all of them."""
        stream = self._plan.streams[selected.selection.streams[0]]
        value = mean.value() if finished else None
        at = mean.positions[-1:] if value is not None else mean.positions[:0]
        ids = np.array([self._prompt_token_ids[i] for i in at], dtype=np.int64)
        none = torch.empty(0, len(stream.sites), stream.width)
        rows = none if value is None else value[None]
        index = self._maker.places[selected.selection.streams[0]]
        versions = np.full(len(at), mean.version, dtype=np.int64)
        return MeanRow(at, ids, versions, rows, index, selected.selection)

    def _result(
        self,
        selected: Selected,
        payload: SiteRows[Any],
        came: list[np.ndarray],
        num_rows: int,
        finished: bool,
        aborted: bool,
    ) -> CaptureResult:
        if not finished:
            return CaptureResult(status=None, error=None, payload=payload)
        try:
            error = selected.missing(num_rows, came, aborted)
        except RowsLost as lost:
            return CaptureResult(status="error", error=str(lost), payload=payload)
        return CaptureResult("ok" if error is None else "partial_error", error, payload)

    def _forget(self, pieces: list[Piece]) -> None:
        """Let go of all rows but those of the last step: the last one may be wanted once more, as
        the last generated one, when none follows."""
        if not pieces:
            return
        last = pieces[-1]
        kept = len(last.positions) // len(last.steps)
        # Copies: a view would keep the positions of all steps before it, for each step anew.
        self._gone += [piece.positions.copy() for piece in pieces[:-1]]
        self._gone.append(last.positions[:-kept].copy())
        is_moved = len(pieces) == len(self._moved)
        self._moved = [last] if is_moved else []
        self._runs = [
            (run, rows, max(len(run.chunks) - (not is_moved), first))
            for run, rows, first in self._runs[-1:]
        ]
