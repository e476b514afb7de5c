# SPDX-License-Identifier: Apache-2.0
"""Attention weights of captured queries, of the pages of the KV cache, after the forward.

In plain PyTorch, a bounded number of weights at a time: on the stream of the forward, outside all
graphs, before the next step can write to a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.interventions.plan import AttentionRead
from vllm.v1.interventions.worker.kv_pages import Sight, pages_of, sight_of
from vllm.v1.interventions.worker.projection_table import CHUNK_BYTES
from vllm.v1.interventions.worker.token_map import to_device


class LayerReader:
    """The attention of one layer.

    Args:
        module: whose weights can be read.
        table: int32 [requests, blocks] on the device, the runner's own of the layer's KV group:
            which blocks have the keys of each request of the batch, in batch order.
    """

    def __init__(self, module: Attention, table: torch.Tensor) -> None:
        self.width = module.head_size
        self.pages, self.sight = pages_of(module), sight_of(module)
        self.table = table
        self.group = module.num_heads // module.num_kv_heads

    def weights(
        self,
        queries: torch.Tensor,
        heads: Sequence[int],
        positions: torch.Tensor,
        request: int,
        stop: int,
    ) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Weights of some queries of one request, some at a time.

        Args:
            queries: [n, len(heads), D].
            heads: their numbers, sorted.
            positions: int64 [n] on the device.
            request: its place in the batch.
            stop: of keys; none is beyond the positions.

        Yields:
            (first query, which of the heads, float32 [some, those heads, stop]).
        """
        done = 0
        for key_head, members in groupby(heads, lambda head: head // self.group):
            own = slice(done, done + len(list(members)))
            done = own.stop
            keys = self.rows(self.pages.keys, request, key_head, stop).float()
            numbers = list(heads[own])
            some = max(CHUNK_BYTES // (4 * stop * len(numbers)), 1)
            parts = zip(queries[:, own].split(some), positions.split(some), strict=True)
            for i, (rows, at) in enumerate(parts):
                yield i * some, own, attend(rows, keys, at, numbers, self.sight)

    def rows(self, pages: torch.Tensor, request: int, head: int, stop: int) -> torch.Tensor:
        """Keys or values of a request's first positions, [stop, width]."""
        blocks = self.table[request, : -(-stop // pages.shape[2])].long()
        return pages[blocks, head].flatten(0, 1)[:stop]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    heads: Sequence[int],
    sight: Sight,
) -> torch.Tensor:
    """The formula of docs/attention.md, in float32.

    Args:
        queries: [n, heads, D], of heads that use the same keys.
        keys: float32 [k, D], of positions from 0 on.
        positions: int64 [n], of the queries.
        heads: the numbers of the heads.

    Returns:
        float32 [n, heads, k].
    """
    scores = queries.float() @ keys.T * sight.scale
    if sight.cap:
        scores = sight.cap * torch.tanh(scores / sight.cap)
    at = positions.view(-1, 1, 1)
    key = torch.arange(len(keys), device=keys.device)
    if sight.slopes is not None:
        scores = scores + sight.slopes[list(heads)].view(1, -1, 1) * (key - at)
    seen = key <= at
    if sight.window:
        seen &= key > at - sight.window
    if sight.chunk:
        seen &= key // sight.chunk == at // sight.chunk
    # What lies in a block behind the request's last token may be anything.
    scores = scores.where(seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if sight.sinks is None:
        weights = (scores - largest).exp()
        return weights / weights.sum(-1, keepdim=True)
    sinks = sight.sinks[list(heads)].view(1, -1, 1)
    largest = largest.maximum(sinks)
    weights = (scores - largest).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - largest).exp())


class AttentionReader:
    """Reads what steps want of attention.

    Args:
        layers: those whose weights can be read.
        device: of the arena and the caches.
    """

    def __init__(self, layers: Mapping[int, LayerReader], device: torch.device) -> None:
        self._layers, self._device = layers, device

    def read(
        self,
        read: AttentionRead,
        sites: Sequence[tuple[int, tuple[int, ...]]],
        queries: torch.Tensor,
        positions: torch.Tensor,
        members: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """What leaves the device of queries.

        Args:
            sites: (layer, heads) of each.
            queries: [n, numbers of all sites' heads].
            positions: int64 [n] on the device.
            members: (place in the batch, number of queries) of each request, n together.

        Returns:
            float32 [n, sites, `read.width`], as `AttentionRead` says.
        """
        heads = len(sites[0][1]) if sites else 0
        made = torch.zeros(len(queries), len(sites), read.width(heads), device=self._device)
        # Queries of the request's other captures may lie behind: what is made of them is not read.
        stop = read.stop
        if not queries.is_cuda:  # a host would wait for the device
            stop = min(stop, int(positions.max()) + 1)
        masks = (
            torch.stack([self._mask(runs, stop) for runs in read.ranges]) if read.ranges else None
        )
        widths = [len(heads) * self._layers[layer].width for layer, heads in sites]
        for i, rows in enumerate(queries.split(widths, dim=1) if sites else ()):
            layer, heads_of_site = sites[i]
            rows = rows.unflatten(1, (len(heads_of_site), -1))
            first = 0
            for request, count in members:
                own = slice(first, first + count)
                first = own.stop
                parts = self._layers[layer].weights(
                    rows[own], heads_of_site, positions[own], request, stop
                )
                for start, which, weights in parts:
                    into = made[own][start : start + len(weights), i]
                    if read.sum:
                        into[:, :stop] += weights.sum(1)
                    else:
                        into = into.unflatten(1, (len(heads_of_site), -1))[:, which]
                        _reduce(read, weights, masks, into)
        return made

    def _mask(self, runs: Sequence[int], stop: int) -> torch.Tensor:
        """Which keys are in a range: float32 [stop]."""
        edges = to_device(np.array(runs, dtype=np.int64), self._device)
        keys = torch.arange(stop, device=self._device)
        return (torch.bucketize(keys, edges, right=True) % 2 == 1).float()


def _reduce(
    read: AttentionRead, weights: torch.Tensor, masks: torch.Tensor | None, into: torch.Tensor
) -> None:
    """Write what is given of weights [n, heads, keys] to [n, heads, width]."""
    parts = iter(into.split(read.widths, dim=2))
    if "mass" in read.give:
        assert masks is not None
        next(parts).copy_(weights @ masks.T)
    if "peak" in read.give:
        assert masks is not None
        there = next(parts)
        for i, mask in enumerate(masks):
            there[:, :, i] = (weights * mask).amax(-1)
    if "top" in read.give:
        found = weights.topk(min(read.top, weights.shape[2]))
        numbers = found.indices.to(torch.int32).where(found.values > 0, -1)
        next(parts).view(torch.int32).fill_(-1)[..., : numbers.shape[2]] = numbers
        next(parts)[..., : numbers.shape[2]] = found.values
    if "weights" in read.give:
        next(parts)[..., : weights.shape[2]] = weights
