# SPDX-License-Identifier: Apache-2.0
"""Rows of one completion as results have them: made by site when they are first read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch

from vllm.config.points import QUERIES
from vllm.v1.capture.attention import AttentionRows
from vllm.v1.capture.copies import CopyThreads, integers
from vllm.v1.capture.features import FeatureRows
from vllm.v1.capture.lens import LensRows
from vllm.v1.capture.made_rows import MadeRows
from vllm.v1.capture.results import CapturedRows, RowSource, SiteRows
from vllm.v1.capture.transport.selected import Selected
from vllm.v1.interventions.frontend.request.capture import TOKENS
from vllm.v1.interventions.frontend.results.memory import KeptMemory
from vllm.v1.interventions.frontend.results.pieces import Piece, Steps, StreamRows
from vllm.v1.interventions.makings import Attention, Features, Lens, Making
from vllm.v1.interventions.plan import CapturePlan, Selection, Site, dtype_of
from vllm.v1.interventions.positions import in_a_row
from vllm.v1.interventions.shape import LayerShape

Texts = Callable[[Sequence[int]], list[str]]
"""A function that returns the text of each of some tokens."""


_RESULTS: dict[type[Making], type[MadeRows[Any]]] = {
    Attention: AttentionRows,
    Lens: LensRows,
    Features: FeatureRows,
}
"""Making of several fields -> the result that gives them."""

_OF_ALL = ("attn", None)
"""Key of what is summed over all sites."""


def keys_of(selection: Selection) -> Mapping[Any, Site]:
    """Return the keys of a result, each with the site of the rows that it is made of: of one that
    is summed over all sites, the first."""
    making = selection.making
    if not making.fields:
        return {site: site for site in selection.sites}
    sites = selection.heads or selection.sites
    if (weights := making.weights) is not None and weights.sum == "all":
        return {_OF_ALL: next(iter(sites))}
    return {making.named(site): site for site in sites}


@dataclass
class GatheredRows(RowSource):
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
        return SiteRows([*self._keys], self._maker(), self)

    @cached_property
    def _keys(self) -> Mapping[Any, Site]:
        return keys_of(self.selection)

    def at(self, key: Any) -> CapturedRows | MadeRows[Any]:
        """Return the rows at one of `keys_of`."""
        return self._maker()(key)

    def _maker(self) -> Callable[[Any], CapturedRows | MadeRows[Any]]:
        return self._made if self.selection.making.fields else self._captured

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

    def _of_tokens(self) -> Callable[[], list[str]]:
        return lambda: self._tokens

    def _values(self, site: Site) -> Callable[[], torch.Tensor]:
        for index, rows in self.streams:
            if site in index:
                return partial(rows.site, index[site])
        raise KeyError(site)

    def _captured(self, site: Site) -> CapturedRows:
        """Return the rows at a site."""
        as_is, is_queries = self.selection.making.as_is, site[0] == QUERIES
        rule = self.layers[site[1]].rule if as_is and is_queries else None
        heads, at = self.selection.heads.get(site, ()), (self.positions, self.token_ids)
        values, texts = self._values(site), self.texts and self._of_tokens()
        return CapturedRows(*at, values, self.versions, heads, rule, texts)

    def _made(self, key: Any) -> MadeRows[Any]:
        """Return what was made of the rows of a site, or of all."""
        making, at = self.selection.making, (self.positions, self.token_ids)
        values, heads = self._sum, tuple[int, ...]()
        if key != _OF_ALL:
            site = self._keys[key]
            values, heads = self._values(site), self.selection.heads.get(site, ())
        texts = self.texts and self._of_tokens()
        return _RESULTS[type(making)](*at, values, self.versions, making, texts, heads)

    def _sum(self) -> torch.Tensor:
        parts = [rows.site(i) for sites, rows in self.streams for i in range(len(sites))]
        return torch.stack(parts).sum(0)


@dataclass
class MeanRow(RowSource):
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


@dataclass(frozen=True)
class ResultMaker:
    """Makes results of rows of one completion. It holds none of them, so a result that nobody has
    read keeps no later ones."""

    plan: CapturePlan
    prompt_token_ids: list[int]
    layers: Mapping[int, LayerShape]
    """Layers of the model; rows of queries have the rule of their attention beside."""
    threads: CopyThreads
    """Threads that copy rows."""
    memory: KeptMemory
    """Memory that rows are copied to."""
    texts: Texts

    @cached_property
    def places(self) -> list[dict[Site, int]]:
        """The index of each site in its stream."""
        return [{site: i for i, site in enumerate(s.sites)} for s in self.plan.streams]

    def rows(
        self,
        selection: Selection,
        pieces: list[Piece],
        at: np.ndarray,
        of_pieces: tuple[np.ndarray, np.ndarray],
        generated: Sequence[int],
    ) -> GatheredRows:
        """Gather some of the rows that lie in pieces.

        Args:
            at: indices of the rows, int64 [n].
            of_pieces: positions and versions of all rows there.
            generated: the generated tokens so far.
        """
        positions, versions = (each[at] for each in of_pieces)
        streams = list[tuple[Mapping[Site, int], StreamRows]]()
        for index in selection.streams:
            stream = self.plan.streams[index]
            dtype, copied = dtype_of(stream.dtype), (self.threads, self.memory)
            rows = StreamRows(pieces, index, dtype, at, *copied)
            if not pieces:
                none = integers(torch.empty(0, len(stream.sites), stream.width, dtype=dtype))
                nothing = [Piece(at, at, [[[none]]], slice(None))]
                rows = StreamRows(nothing, 0, dtype, at, *copied)
            streams.append((self.places[index], rows))
        texts = self.texts if selection.fields.get(TOKENS) else None
        ids = self._tokens_at(positions, generated)
        return GatheredRows(positions, ids, versions, streams, selection, self.layers, texts)

    def _tokens_at(self, positions: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Return the tokens at some positions, int64 [n]."""
        prompt, length = self.prompt_token_ids, len(self.prompt_token_ids)
        at_each = (prompt[p] if p < length else generated[p - length] for p in positions.tolist())
        return np.fromiter(at_each, np.int64, len(positions))


@dataclass(eq=False)
class RowsSoFar:
    """Rows of one completion up to some step, gathered when those of a site are first read: few
    results of a stream are.

    Args:
        selected: the rows that are wanted.
        moved: pieces in memory of their own.
        runs: steps of runs; rows of the completion in each step, and the first of its steps.
        generated: the generated tokens, those past `num_tokens` included.
        num_tokens: tokens of the completion at that step, with its prompt.
    """

    maker: ResultMaker
    selected: Selected
    moved: list[Piece]
    runs: list[tuple[Steps, slice, int]]
    generated: Sequence[int]
    num_tokens: int

    @cached_property
    def _rows(self) -> GatheredRows:
        pieces = self.moved + [Piece.of(*run) for run in self.runs]
        positions, versions = rows_in(pieces)
        at = np.flatnonzero(self.selected.mask(positions, self.selected.num_rows(self.num_tokens)))
        of_pieces = positions, versions
        return self.maker.rows(self.selected.selection, pieces, at, of_pieces, self.generated)

    def __call__(self, key: Any) -> CapturedRows | MadeRows[Any]:
        """Return the rows at one of `keys_of`."""
        return self._rows.at(key)


def rows_in(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and versions of all rows of some pieces, int64 [n] each."""
    return (
        in_a_row([piece.positions for piece in pieces]),
        in_a_row([piece.versions for piece in pieces]),
    )
