# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion, gathered as they come: what `inline` returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch

from vllm.config.points import QUERIES
from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.copies import CopyThreads, Filled, copies_of, integers, steps_into
from vllm.v1.capture.lens import LensRows
from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.capture.results import CapturedRows, CaptureResult, RowSource, SiteRows
from vllm.v1.capture.transport.mean import RunningMean
from vllm.v1.capture.transport.selected import RowsLost, Selected
from vllm.v1.interventions.frontend.request.capture import TOKENS
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.frontend.results.pieces import Piece, Run, StreamRows
from vllm.v1.interventions.makings import Attention, Lens, Making
from vllm.v1.interventions.plan import CapturePlan, Selection, Site, dtype_of
from vllm.v1.interventions.positions import in_a_row
from vllm.v1.interventions.shape import LayerShape

Texts = Callable[[Sequence[int]], list[str]]
"""A function that returns the text of each of some tokens."""


_RESULTS: dict[type[Making], type[MadeRows[Any]]] = {Attention: AttentionRows, Lens: LensRows}
"""Making of several fields -> the result that gives them."""


@dataclass
class _Rows(RowSource):
    """The rows of a result, from which those of a site are made."""

    positions: np.ndarray
    token_ids: np.ndarray
    versions: np.ndarray
    streams: list[tuple[Mapping[Site, int], StreamRows]]
    """Each with the indices of its sites."""
    selection: Selection
    layers: Mapping[int, LayerShape]
    texts: Texts | None
    """The function that says the tokens, if the capture asks for their texts."""

    def by_site(self) -> SiteRows[Any]:
        """Return the rows as a user gets them."""
        selection, making = self.selection, self.selection.making
        if not making.fields:
            return SiteRows(selection.sites, self._captured, self)
        if (weights := making.weights) is not None and weights.sum == "all":
            return SiteRows([("attn", None)], self._made_of_all, self)
        return SiteRows([*self._named], self._made, self)

    @cached_property
    def _named(self) -> dict[Site, Site]:
        """The site that a result names -> the site of the rows that it is made of."""
        selection = self.selection
        sites = selection.heads or selection.sites
        return {selection.making.named(site): site for site in sites}

    def joined(self, later: Self) -> SiteRows[Any]:
        """Return these rows and then `later`'s, of the same completion and capture."""
        streams = [
            (sites, rows.joined(more))
            for (sites, rows), (_, more) in zip(self.streams, later.streams, strict=True)
        ]
        return replace(
            self,
            positions=np.concatenate([self.positions, later.positions]),
            token_ids=np.concatenate([self.token_ids, later.token_ids]),
            versions=np.concatenate([self.versions, later.versions]),
            streams=streams,
        ).by_site()

    @cached_property
    def _tokens(self) -> list[str]:
        """The text of each row's token, which all sites share."""
        assert self.texts is not None
        return self.texts(self.token_ids.tolist())

    def _of_tokens(self) -> Callable[[], list[str]] | None:
        return None if self.texts is None else lambda: self._tokens

    def _values(self, site: Site) -> Callable[[], torch.Tensor]:
        of_site = (partial(r.site, s[site]) for s, r in self.streams if site in s)
        return next(of_site)

    def _captured(self, site: Site) -> CapturedRows:
        """Return the rows at a site."""
        as_is, is_queries = self.selection.making.as_is, site[0] == QUERIES
        rule = self.layers[site[1]].rule if as_is and is_queries else None
        heads, at = self.selection.heads.get(site, ()), (self.positions, self.token_ids)
        values, texts = self._values(site), self._of_tokens()
        return CapturedRows(*at, values, self.versions, heads, rule, texts)

    def _made(self, named: Site) -> MadeRows[Any]:
        """Return what was made of the rows of a site."""
        site = self._named[named]
        return self._made_of(self._values(site), self.selection.heads.get(site, ()))

    def _made_of_all(self, _: Any) -> MadeRows[Any]:
        """Return the sum of what was made at all sites."""
        return self._made_of(self._sum, ())

    def _made_of(self, values: Callable[[], torch.Tensor], heads: tuple[int, ...]) -> MadeRows[Any]:
        making, at = self.selection.making, (self.positions, self.token_ids)
        return _RESULTS[type(making)](*at, values, self.versions, making, self._of_tokens(), heads)

    def _sum(self) -> torch.Tensor:
        parts = [rows.site(i) for sites, rows in self.streams for i in range(len(sites))]
        return torch.stack(parts).sum(0)


@dataclass
class _MeanRow(RowSource):
    """The mean of a stream: one row a site, or none yet."""

    positions: np.ndarray
    token_ids: np.ndarray
    versions: np.ndarray
    values: torch.Tensor
    """[0 or 1, sites, hidden]."""
    index: Mapping[Site, int]
    selection: Selection

    def by_site(self) -> SiteRows[CapturedRows]:
        """Return the mean as a user gets it."""
        return SiteRows(self.selection.sites, self._of_site, self)

    def joined(self, later: Self) -> SiteRows[CapturedRows]:
        """Return the later one: a mean comes once."""
        return later.by_site()

    def _of_site(self, site: Site) -> CapturedRows:
        values, heads = self.values[:, self.index[site]], self.selection.heads.get(site, ())
        return CapturedRows(self.positions, self.token_ids, values, self.versions, heads)


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
        self._plan, self._layers, self._threads, self._memory = plan, layers, threads, memory
        self._prompt_token_ids, self._texts = prompt_token_ids, texts
        self._places = [{site: i for i, site in enumerate(s.sites)} for s in plan.streams]
        """The index of each site in its stream."""
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
            Piece.of(run, rows, first) for run, rows, first in self._runs if first < len(run.chunks)
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
        positions = in_a_row([piece.positions for piece in pieces])
        for i, stream in enumerate(self._plan.streams):
            if stream.making.adds_up:
                values.append([np.empty(0)])  # added up by now
                continue
            steps = [step for piece in pieces for step in piece.parts(i)]
            num_sites, width = sum(p.shape[1] for p in steps[0]), steps[0][0].shape[2]
            shape = len(positions), num_sites, width
            values.append([integers(self._memory.of_rows(shape, dtype_of(stream.dtype)))])
            filled += steps_into(values[-1], steps)
        versions = in_a_row([piece.versions for piece in pieces])
        started = self._threads.follow(copies_of(filled))
        self._moved.append(Piece(positions, versions, [values], slice(None), started))

    def results(
        self,
        output_token_ids: Sequence[int],
        *,
        finished: bool,
        aborted: bool,
        only_new: bool,
    ) -> dict[str, CaptureResult]:
        """The results so far. Rows may still be on their way to where they are read.

        Args:
            output_token_ids: the generated tokens so far.
            finished: whether these are all there will be.
            aborted: whether the request was cut off, so that rows may be missing.
            only_new: leave out rows that an earlier call returned (streaming of deltas).
        """
        self._add_up()
        num_tokens = len(self._prompt_token_ids) + len(output_token_ids)
        pieces = self._moved + self._unmoved()
        positions = in_a_row([piece.positions for piece in pieces])
        versions = in_a_row([piece.versions for piece in pieces])
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
            rows = positions[at], self._tokens_at(positions[at], output_token_ids), versions[at]
            payload = self._payload(selected, pieces, at, *rows)
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

    def _tokens_at(self, positions: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Return the tokens at some positions, int64 [n]."""
        prompt, length = self._prompt_token_ids, len(self._prompt_token_ids)
        at_each = (prompt[p] if p < length else generated[p - length] for p in positions.tolist())
        return np.fromiter(at_each, np.int64, len(positions))

    def _payload(
        self,
        selected: Selected,
        pieces: list[Piece],
        at: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
        versions: np.ndarray,
    ) -> SiteRows[Any]:
        selection, streams = selected.selection, list[tuple[Mapping[Site, int], StreamRows]]()
        for index in selection.streams:
            stream = self._plan.streams[index]
            dtype, copied = dtype_of(stream.dtype), (self._threads, self._memory)
            rows = StreamRows(pieces, index, dtype, at, *copied)
            if not pieces:
                none = integers(torch.empty(0, len(stream.sites), stream.width, dtype=dtype))
                nothing = [Piece(at, at, [[[none]]], slice(None))]
                rows = StreamRows(nothing, 0, dtype, at, *copied)
            streams.append((self._places[index], rows))
        texts = self._texts if selection.fields.get(TOKENS) else None
        made = _Rows(positions, token_ids, versions, streams, selection, self._layers, texts)
        return made.by_site()

    def _mean_row(self, selected: Selected, mean: RunningMean, finished: bool) -> _MeanRow:
        """One row a site, at the last position; none before the end, or without all of them."""
        stream = self._plan.streams[selected.selection.streams[0]]
        value = mean.value() if finished else None
        at = mean.positions[-1:] if value is not None else mean.positions[:0]
        ids = np.array([self._prompt_token_ids[i] for i in at], dtype=np.int64)
        none = torch.empty(0, len(stream.sites), stream.width)
        rows = none if value is None else value[None]
        index = self._places[selected.selection.streams[0]]
        versions = np.full(len(at), mean.version, dtype=np.int64)
        return _MeanRow(at, ids, versions, rows, index, selected.selection)

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
