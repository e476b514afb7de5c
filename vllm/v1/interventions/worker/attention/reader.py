# SPDX-License-Identifier: Apache-2.0
"""Attention weights of captured queries, of the pages of the KV cache, after the forward.

A bounded number of weights at a time: on the stream of the forward, outside all graphs, before the
next step can write to a block. Layers that see keys alike are read together, whatever the number
of requests, so that a step launches little more for many than for one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup, all_reduce

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.makings import Attention
from vllm.v1.interventions.worker.attention.formula import Focus, normalised
from vllm.v1.interventions.worker.attention.keys import LayerReader, Queriers
from vllm.v1.interventions.worker.attention.pages import Sight
from vllm.v1.interventions.worker.tables.matrices import CHUNK_BYTES


class AlikeSites(NamedTuple):
    """Sites with as many heads each, whose layers see keys alike but for slopes and sinks."""

    places: Sequence[int]
    """Their indices among the stream's sites."""
    layers: Sequence["LayerReader"]
    heads: Sequence[tuple[int, ...]]
    """The heads of each that are here, by their numbers here."""
    elsewhere: tuple[int, int]
    """Number of heads of each capture on other ranks: before these and behind them."""
    columns: Sequence[slice]
    """Columns of each site's queries in a row of the queries of all sites."""
    key_heads: torch.Tensor
    """int32 [sites, heads] on the device: which keys they use."""
    sight: Sight
    """With slopes and sinks as [sites, heads, 1]."""

    def cut(self, size: int) -> Iterator["AlikeSites"]:
        """Some sites at a time."""
        for first in range(0, len(self.places), size):
            part = slice(first, first + size)
            slopes, sinks = self.sight.slopes, self.sight.sinks
            sight = self.sight._replace(
                slopes=None if slopes is None else slopes[part],
                sinks=None if sinks is None else sinks[part],
            )
            yield AlikeSites(
                self.places[part],
                self.layers[part],
                self.heads[part],
                self.elsewhere,
                self.columns[part],
                self.key_heads[part],
                sight,
            )

    def weights(
        self, queries: torch.Tensor, positions: torch.Tensor, queriers: Queriers, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of queries, and which of them focus made others.

        Args:
            queries: [n, numbers of all sites' heads].
            positions: int64 [n] on the device.
            queriers: n queries.
            stop: of keys.

        Returns:
            float32 [n, sites, heads, stop], and bool [n, sites, heads].
        """
        shape = (len(queries), *self.key_heads.shape, stop)
        scores = torch.empty(shape, device=queries.device)
        for i, layer in enumerate(self.layers):
            rows = queries[:, self.columns[i]].unflatten(1, (len(self.heads[i]), -1))
            keys = self.key_heads[i]
            layer.products(rows, self.heads[i], keys, positions, queriers, scores[:, i])
        logits = logits_of(scores, positions, self.sight)
        weights = normalised(logits, self.sight.sinks)
        changed = torch.zeros(shape[:3], dtype=torch.bool, device=queries.device)
        for i, layer in enumerate(self.layers):
            if queriers.programs is not None and layer.focus is not None:
                focus = Focus.of(layer.focus, queriers.programs, stop, self.heads[i])
                sinks = None if self.sight.sinks is None else self.sight.sinks[i]
                focus = focus._replace(rule=queriers.rule)
                changed[:, i] = focus.apply(logits[:, i], weights[:, i], sinks)
        return weights, changed


def queries_at_once(query_bytes: int, focused: bool) -> int:
    """Number of queries that are read together whose weights take so many bytes each: focus makes
    about sixteen things as large."""
    return max(CHUNK_BYTES // (16 if focused else 1) // query_bytes, 1)


def logits_of(scores: torch.Tensor, positions: torch.Tensor, sight: Sight) -> torch.Tensor:
    """The logits of docs/attention.md, in float32; -inf for what a query does not see.

    Args:
        scores: float32 [n, sites, heads, k], products of queries with keys of positions from 0 on,
            scaled; what a query does not see may be anything.
        positions: int64 [n], of the queries.
        sight: with slopes and sinks as [sites, heads, 1].

    Returns:
        float32 [n, sites, heads, k]; `normalised` makes weights of them.
    """
    if sight.cap:
        scores = sight.cap * torch.tanh(scores / sight.cap)
    at = positions.view(-1, 1, 1, 1)
    key = torch.arange(scores.shape[3], device=scores.device)
    if sight.slopes is not None:
        scores = scores + sight.slopes * (key - at)
    seen = key <= at
    if sight.window:
        seen &= key > at - sight.window
    if sight.chunk:
        seen &= key // sight.chunk == at // sight.chunk
    # What lies in a block behind the request's last token may be anything.
    return scores.where(seen, -torch.inf)


class AttentionReader:
    """Reads what steps want of attention. Tensor-parallel ranks each read their heads, in the same
    order, and all have the result.

    Args:
        layers: those whose weights can be read.
        device: of the arena and the caches.
        ranks: the tensor-parallel ones that have the other heads, where there are several.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerReader],
        device: torch.device,
        ranks: ProcessGroup | None = None,
    ) -> None:
        self._layers, self._device, self._ranks = layers, device, ranks

    def sites(self, heads: Sequence[tuple[int, tuple[int, ...]]]) -> list[AlikeSites]:
        """Put together what is read together.

        Args:
            heads: of each site of a stream: (layer, its heads).
        """
        alike: dict[object, list[int]] = {}
        for i, (layer, chosen) in enumerate(heads):
            here = self._layers[layer].within(chosen)
            scale, cap, window, chunk, slopes, sinks = self._layers[layer].sight
            parts = (here.start, here.stop, len(chosen))
            kind = (*parts, scale, cap, window, chunk, slopes is None, sinks is None)
            alike.setdefault(kind, []).append(i)
        stops = np.cumsum([len(own) * self._layers[layer].width for layer, own in heads])
        return [self._alike(places, heads, stops.tolist()) for places in alike.values()]

    def _alike(
        self,
        places: list[int],
        heads: Sequence[tuple[int, tuple[int, ...]]],
        stops: Sequence[int],
    ) -> AlikeSites:
        layers = [self._layers[heads[i][0]] for i in places]
        asked = heads[places[0]][1]
        here = layers[0].within(asked)
        chosen = [
            tuple(head - layer.heads.start for head in heads[i][1][here])
            for i, layer in zip(places, layers, strict=True)
        ]
        key_heads = np.array(
            [
                [head // layer.group for head in own]
                for layer, own in zip(layers, chosen, strict=True)
            ]
        )

        def of_heads(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            found = [v[list(own)] for v, own in zip(values, chosen, strict=True) if v is not None]
            return torch.stack(found)[:, :, None] if found else None

        sight = layers[0].sight._replace(
            slopes=of_heads([layer.sight.slopes for layer in layers]),
            sinks=of_heads([layer.sight.sinks for layer in layers]),
        )
        elsewhere = here.start, len(asked) - here.stop
        columns = []
        for i, layer in zip(places, layers, strict=True):
            begin = stops[i - 1] if i else 0
            columns.append(
                slice(begin + elsewhere[0] * layer.width, stops[i] - elsewhere[1] * layer.width)
            )
        on_device = async_tensor_h2d(key_heads.astype(np.int32), self._device)
        return AlikeSites(places, layers, chosen, elsewhere, columns, on_device, sight)

    def read(
        self,
        read: Attention,
        sites: Sequence[AlikeSites],
        queries: torch.Tensor,
        positions: torch.Tensor,
        queriers: Queriers,
        stop: int,
    ) -> torch.Tensor:
        """Compute the numbers that leave the device in place of queries.

        Args:
            sites: those of the stream.
            queries: [n, numbers of all sites' heads].
            positions: int64 [n] on the device.
            queriers: the requests of the n queries.
            stop: one past the last query, or more.

        Returns:
            float32 [n, sites, `read.width`], as `Attention` says.
        """
        made: dict[int, torch.Tensor] = {}
        # A prompt's queries are read in many parts, and have the same ranges in all.
        masks = lru_cache(1)(queriers.masks)
        # Queries of the request's other captures may lie behind: what is made of them is not read.
        stop = min(stop, read.stop or stop)
        for alike in sites:
            heads = len(alike.heads[0])
            before, behind = (read.width(number, 0) for number in alike.elsewhere)
            for some in alike.cut(max(CHUNK_BYTES // (4 * stop * max(heads, 1)), 1)):
                shape = (len(queries), len(some.places), read.width(heads, 0))
                into = torch.zeros(shape, device=self._device)
                each = 4 * stop * len(some.places) * max(heads, 1)
                at_once = queries_at_once(each, queriers.programs is not None)
                for first in range(0, len(queries) if heads else 0, at_once):
                    own = slice(first, first + at_once)
                    part = queriers.part(own)
                    weights, _ = some.weights(queries[own], positions[own], part, stop)
                    _reduce(read, weights, part, masks, into[own])
                if self._ranks is not None and not read.sum:
                    into = torch.nn.functional.pad(into, (before, behind))
                made |= zip(some.places, into.unbind(1), strict=True)
        if not made:  # all sites are at other pipeline stages
            return queries.new_zeros(len(queries), 0, dtype=torch.float32)
        values = torch.stack([made[i] for i in range(len(made))], 1)
        if self._ranks is not None:
            # A number of a head is 0 but where the head is, so whole numbers add up bit for bit.
            all_reduce(values if read.sum else values.view(torch.int32), group=self._ranks)
        return values


def _reduce(
    read: Attention,
    weights: torch.Tensor,
    queriers: Queriers,
    masks: Callable[[range, int], torch.Tensor],
    into: torch.Tensor,
) -> None:
    """Write what is given of weights [n, sites, heads, keys] to [n, sites, width].

    Args:
        masks: as `Queriers.masks`.
    """
    keys = weights.shape[3]
    if read.sum:
        into[..., :keys] = weights.sum(2)
        return
    widths = [field.width for field in read.fields]
    parts = into.unflatten(2, (weights.shape[2], -1)).split(widths, dim=3)
    mass, peak, top_positions, top_weights, every = parts
    # Five numbers of a range's mask: the keys on the line and the counts have two each.
    most = max(CHUNK_BYTES // (20 * keys * max(len(read.ranges), 1)), 1)
    for which, own in queriers.alike(most) if read.ranges else ():
        inside = masks(which, keys)
        rows = weights[own].reshape(len(which), -1, keys)
        if "mass" in read.give:
            mass[own] = (rows @ inside.transpose(1, 2)).view(mass[own].shape)
        if "peak" in read.give:
            for i in range(len(read.ranges)):
                largest = (rows * inside[:, i : i + 1]).amax(-1)
                peak[own][..., i] = largest.view(peak[own].shape[:3])
    if "top" in read.give:
        found = weights.topk(min(read.top, keys))
        numbers = found.indices.to(torch.int32).where(found.values > 0, -1)
        top_positions.view(torch.int32).fill_(-1)[..., : numbers.shape[3]] = numbers
        top_weights[..., : numbers.shape[3]] = found.values
    if "weights" in read.give:
        every[..., :keys] = weights
