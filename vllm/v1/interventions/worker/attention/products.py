# SPDX-License-Identifier: Apache-2.0
"""The products of queries with the keys of their requests, in the pages of a KV cache."""

from collections.abc import Sequence
from itertools import groupby

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton

FEW = 16
"""Queries of a request, on average, up to which one launch for all requests is faster than a matrix
product for each of them."""

_KEYS = 64
"""Keys of one program, at most."""

_NUMBERS = 1 << 14
"""Numbers of keys that one program holds at once: of absorbed queries (MLA) a key has 1,024."""


def paged_products(
    queries: torch.Tensor,
    pages: torch.Tensor,
    key_heads: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write each query's products with the keys up to its own, in one launch. On a GPU, or under
    Triton's interpreter.

    Args:
        queries: [n, heads, D], contiguous.
        pages: the keys, [blocks, key heads, tokens of a block, D], the numbers of a key next to
            each other.
        key_heads: int32 [heads]: which of them each head uses.
        table: int32 [requests, blocks], contiguous: the pages of each.
        requests: int32 [n]: whose each query is.
        positions: int64 [n], of the queries.
        scale: what products are multiplied with.
        out: float32 [n, heads, keys], a token's numbers next to each other. What belongs to later
            keys is left as it is.
    """
    number, heads, width = queries.shape
    stop = out.shape[2]
    keys, padded = block_sizes(width)
    grid = (number, heads, triton.cdiv(stop, keys))
    _products_kernel[grid](
        queries, pages, key_heads, table, requests, positions, scale, out, heads, width, stop,
        table.stride(0), out.stride(0), *pages.stride()[:3],
        TOKENS=pages.shape[2], WIDTH=padded, KEYS=keys,
    )  # fmt: skip


def block_sizes(width: int) -> tuple[int, int]:
    """Number of keys of a width that one program reads, and the width they are padded to."""
    padded = triton.next_power_of_2(width)
    return max(min(_KEYS, _NUMBERS // padded), 1), padded


if HAS_TRITON:
    # What changes from step to step compiles nothing anew.
    @triton.jit(
        do_not_specialize=["heads", "stop", "out_stride"],
        do_not_specialize_on_alignment=["queries", "key_heads", "requests", "positions", "out"],
    )
    def _products_kernel(  # type: ignore[no-untyped-def]
        queries, pages, key_heads, table, requests, positions, scale, out, heads, width, stop,
        table_stride, out_stride, block_stride, head_stride, token_stride,
        TOKENS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        query = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        key = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
        last = tl.load(positions + query)
        if tl.program_id(2) * KEYS > last:
            return
        seen = (key <= last) & (key < stop)
        request = tl.load(requests + query).to(tl.int64)
        block = tl.load(table + request * table_stride + key // TOKENS, mask=seen, other=0)
        at = block.to(tl.int64) * block_stride + key % TOKENS * token_stride
        at += tl.load(key_heads + head).to(tl.int64) * head_stride
        column = tl.arange(0, WIDTH)
        there = column < width
        values = tl.load(queries + (query * heads + head) * width + column, mask=there, other=0.0)
        keys = tl.load(
            pages + at[:, None] + column[None, :], mask=seen[:, None] & there[None, :], other=0.0
        )
        made = tl.sum(keys.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
        tl.store(out + query * out_stride + head * stop + key, made * scale, mask=seen)


def grouped_heads(heads: Sequence[int], group: int) -> list[tuple[int, slice]]:
    """Group sorted heads that use the same keys: (key head, where they are among `heads`)."""
    found, done = [], 0
    for key_head, members in groupby(heads, lambda head: head // group):
        found.append((key_head, slice(done, done + len(list(members)))))
        done = found[-1][1].stop
    return found
