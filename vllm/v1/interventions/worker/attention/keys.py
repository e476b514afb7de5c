# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer, read from its pages for the queries of a step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.positions import END
from vllm.v1.interventions.worker.attention.formula import LayerTable
from vllm.v1.interventions.worker.attention.pages import pages_of, sight_of
from vllm.v1.interventions.worker.attention.products import FEW, grouped_heads, paged_products


class Queriers(NamedTuple):
    """The requests whose queries are read together, one request's after the other's."""

    places: Sequence[tuple[int, int]]
    """The place in the batch and the number of queries of each."""
    requests: torch.Tensor
    """int32 [n] on the device: the place of each query's request."""
    bases: torch.Tensor
    """int64 [all requests, ranges] there: where position 0 of each one's key ranges lies on a line
    that has all ranges of all requests behind each other, `END` positions for each."""
    edges: torch.Tensor
    """int64 [edges] there, sorted: where the ranges' runs begin and end on that line, in turn."""
    programs: torch.Tensor | None = None
    """int [n] there: what focus does at each query; None where there is no focus."""
    rule: int = 0
    """Rule of all programs, where the host knows that they have one, as in `Focus`; else 0."""
    first: int = 0
    """Number of requests before these, of all."""

    @staticmethod
    def of(
        places: Sequence[int],
        counts: Sequence[int],
        ranges: Sequence[Sequence[Sequence[int]]],
        device: torch.device,
    ) -> "Queriers":
        """Put on the device what is known of requests.

        Args:
            ranges: of each request, as `Attention.ranges`.
        """
        bases = np.arange(len(ranges) * len(ranges[0])).reshape(len(ranges), -1) * END
        flat = [
            np.array(runs, np.int64) + base
            for own, begin in zip(ranges, bases, strict=True)
            for runs, base in zip(own, begin, strict=True)
        ]
        edges = async_tensor_h2d(np.concatenate([np.empty(0, np.int64), *flat]), device)
        requests = async_tensor_h2d(np.repeat(np.array(places, np.int32), counts), device)
        begins = async_tensor_h2d(bases, device)
        return Queriers(list(zip(places, counts, strict=True)), requests, begins, edges)

    def alike(self, most: int) -> Iterator[tuple[range, slice]]:
        """Neighbouring requests with as many queries each, at most `most` at a time: which of all
        requests, and where their queries are."""
        first, done = self.first, 0
        for count, members in groupby(count for _, count in self.places):
            left = len(list(members))
            while left:
                some = min(left, most)
                own = slice(done, done + some * count)
                yield range(first, first + some), own
                first, done, left = first + some, own.stop, left - some

    def masks(self, which: range, keys: int) -> torch.Tensor:
        """Mark the keys that are in each range of the requests `which`, of the first `keys` ones:
        float32 [requests, ranges, keys], 1 or 0."""
        bases = self.bases[which.start : which.stop, :, None]
        every = bases + torch.arange(keys, device=bases.device)
        # A range has an even number of edges, so the parity counts its own alone.
        return (torch.bucketize(every, self.edges, right=True) % 2).float()

    def part(self, own: slice) -> "Queriers":
        """Return some of the queries, with their requests."""
        places, first, before = [], 0, self.first
        for place, count in self.places:
            inside = min(first + count, own.stop) - max(first, own.start)
            if inside > 0:
                places.append((place, inside))
            first += count
            before += first <= own.start
        programs = None if self.programs is None else self.programs[own]
        return self._replace(
            places=places, requests=self.requests[own], programs=programs, first=before
        )


class LayerReader:
    """The attention of one layer.

    Args:
        module: whose weights can be read.
        table: int32 [requests, blocks] on the device, the runner's own of the layer's KV group:
            which blocks have the keys of each request of the batch, in batch order.
        rank: the tensor-parallel one. The heads here are its part of the model's; only `within`
            knows the model's numbers.
        focus: what programs of focus do here; None where there are none.
    """

    def __init__(
        self,
        module: Attention | MLAAttention,
        table: torch.Tensor,
        rank: int = 0,
        focus: LayerTable | None = None,
    ) -> None:
        self.focus = focus
        self.width = module.head_size
        self.pages, self.sight = pages_of(module), sight_of(module)
        self.table = table
        self.group = module.num_heads // module.num_kv_heads
        self.heads = range(rank * module.num_heads, (rank + 1) * module.num_heads)
        """The model's numbers of the heads here."""

    def within(self, heads: Sequence[int]) -> slice:
        """Return the slice of sorted heads of the model that are here."""
        return slice(bisect_left(heads, self.heads.start), bisect_left(heads, self.heads.stop))

    def products(
        self,
        queries: torch.Tensor,
        heads: Sequence[int],
        key_heads: torch.Tensor,
        positions: torch.Tensor,
        queriers: Queriers,
        out: torch.Tensor,
    ) -> None:
        """Write queries' products with the keys that they may see, or more of them, scaled.

        Args:
            queries: [n, heads, D].
            heads: their numbers, sorted.
            key_heads: int32 [heads] on the device: which keys they use.
            positions: int64 [n] there.
            out: float32 [n, heads, keys].
        """
        scale, queries = self.sight.scale, self.for_pages(queries, heads)
        if queries.is_cuda and len(queries) <= FEW * len(queriers.places):
            paged_products(
                queries.contiguous(), self.pages.keys, key_heads, self.table, queriers.requests,
                positions, scale, out,
            )  # fmt: skip
            return
        first = 0
        for request, count in queriers.places:
            own = slice(first, first + count)
            first = own.stop
            rows = queries[own].float()
            for key_head, which in grouped_heads(heads, self.group):
                keys = self.rows(self.pages.keys, request, key_head, out.shape[2]).float()
                out[own, which] = rows[:, which] @ keys.T * scale

    def for_pages(self, queries: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Queries [n, heads, D] as they are multiplied with what the pages have."""
        return queries

    def rows(self, pages: torch.Tensor, request: int, head: int, stop: int) -> torch.Tensor:
        """Keys or values of a request's first positions, [stop, width]."""
        tokens = self.pages.tokens
        blocks = self.table[request, : -(-stop // tokens)].long()
        return pages[blocks, head].reshape(len(blocks) * tokens, -1)[:stop]

    def attended(self, weights: torch.Tensor, request: int, heads: Sequence[int]) -> torch.Tensor:
        """The sums of weights times values of a request's first positions.

        Args:
            weights: float32 [n, heads, positions].
            heads: their numbers here, sorted.

        Returns:
            float32 [n, heads, E].
        """
        stop = weights.shape[2]
        made = [
            weights[:, which] @ self.rows(self.pages.values, request, key_head, stop).float()
            for key_head, which in grouped_heads(heads, self.group)
        ]
        return torch.cat(made, 1)
