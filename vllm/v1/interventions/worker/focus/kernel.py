# SPDX-License-Identifier: Apache-2.0
"""Focused attention on a GPU: of focused tokens alone, from the pages of the KV cache, exactly.

Two kernels, which a CUDA graph may hold: their grids follow from the number of tokens alone, and
all that differs between steps is read from the device. The first makes partial sums of some keys,
the second joins them and writes the rows that differ. The formula is that of `logits_of` in
attention/keys.py and of attention/formula.py; tests hold all of them against float64.

Where the backend gives the log of each row's sum, its own row stands for all keys, and only those
of the span are read: of a short span by one program, which writes the row itself. Not where a key
loses weight: what is left may be the small difference of two large numbers, so both sums are made
anew.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm.triton_utils import triton
from vllm.v1.interventions.focus import MAX_FACTORS, MAX_RUNS
from vllm.v1.interventions.worker.attention.formula import LayerTable
from vllm.v1.interventions.worker.attention.pages import Pages, Sight
from vllm.v1.interventions.worker.focus.triton import join_kernel, sum_kernel

TOKENS = 512
"""Tokens times splits of their keys that one launch has partial sums of."""
MAX_SPLITS = 16
"""Into how many parts the keys of a token are split, at most: a long context is read by many."""
ROWS = 32
"""Rows of a program in large steps: heads of some tokens that use one key head. Else of a token."""
PARTS = 2
"""Sums of a row: over the span, and over the rest; of factors all are in one."""
TILE_BYTES = 32 << 10
"""Most bytes of keys that a program loads at a time, and of values as many."""
ALONE = 256
"""The longest span, in keys, that one program reads alone where others could help it."""
STATS = 4
"""The largest logit of a sum, the sum, and the smallest and largest bias of keys that were seen."""


class TokenTable(NamedTuple):
    """The program, request and position of tokens: tensors of all tokens that a step may have."""

    focus: torch.Tensor
    """int32: the program of each token, which is of one request; 0 for none."""
    requests: torch.Tensor
    """int32: the place in the batch of each token's request, where there is a program."""
    positions: torch.Tensor
    """int64: of each token, where there is a program."""


class Workspace(NamedTuple):
    """Partial sums, float32: those of one layer at a time."""

    sums: torch.Tensor
    stats: torch.Tensor

    @staticmethod
    def of(rows: int, width: int, device: torch.device) -> "Workspace":
        """Room for layers of up to `rows` heads whose values have up to `width` numbers."""
        number = TOKENS * PARTS * rows
        sums = torch.zeros(number * width, device=device)
        return Workspace(sums, torch.zeros(number * STATS, device=device))


def splits_of(tokens: int) -> int:
    """Into how many parts the keys of each of so many tokens are split."""
    return max(1, min(MAX_SPLITS, TOKENS // max(tokens, 1) // 4))


def focus_rows(
    query: torch.Tensor,
    output: torch.Tensor,
    pages: Pages,
    block_table: torch.Tensor,
    sight: Sight,
    tokens: TokenTable,
    layer: LayerTable,
    workspace: Workspace,
    lse: torch.Tensor | None = None,
) -> None:
    """Write the rows of focused tokens whose weights are others than without. Waits for nothing.

    Args:
        query: [n, heads, D], the numbers of a head next to each other.
        output: [n, heads, E], likewise; changed in place.
        pages: in the same dtype, the numbers of a key next to each other.
        block_table: int32 [requests, blocks].
        lse: float32 [heads, n], the log of each row's sum, with sinks and slopes if there are any.
    """
    number, heads, width = query.shape
    key_heads, page, width_v = pages.keys.shape[1], pages.keys.shape[2], output.shape[2]
    group = heads // key_heads
    members = triton.next_power_of_2(group)
    at_once = 1 if number <= TOKENS else max(ROWS // members, 1)
    splits = splits_of(number)
    key_bytes = max(16, triton.next_power_of_2(max(width, width_v))) * query.element_size()
    has_slopes, has_sinks = sight.slopes is not None, sight.sinks is not None
    slopes = sight.slopes if sight.slopes is not None else layer.numbers
    sinks = sight.sinks if sight.sinks is not None else layer.numbers
    sum_of = lse if lse is not None else layer.numbers
    alone = ALONE if splits > 1 else np.iinfo(np.int32).max
    for first in range(0, number, TOKENS // splits):
        stop = min(first + TOKENS // splits, number)
        grid = (triton.cdiv(stop - first, at_once), key_heads, splits * PARTS)
        sum_kernel[grid](
            query, output, sum_of, pages.keys, pages.values, block_table, tokens.focus,
            tokens.requests, tokens.positions, layer.forms, layer.runs, layer.numbers, slopes,
            workspace.sums, workspace.stats, first, stop, alone, sight.scale, sight.cap,
            sight.window, sight.chunk, query.stride(0), query.stride(1), output.stride(0),
            output.stride(1), sum_of.stride(0), block_table.stride(0), *pages.keys.stride()[:3],
            *pages.values.stride()[:3], heads, splits, width, width_v,
            PAGE=page, GROUP=group, MEMBERS=members, AT_ONCE=at_once,
            ROWS=max(16, at_once * members), KEYS=min(128, TILE_BYTES // key_bytes),
            WIDTH=max(16, triton.next_power_of_2(width)),
            WIDTH_V=max(16, triton.next_power_of_2(width_v)),
            CAPPED=sight.cap != 0, SLOPES=has_slopes, SINKS=has_sinks, RUNS=MAX_RUNS,
            PLACES=MAX_FACTORS, LSE=lse is not None, num_stages=2,
        )  # fmt: skip
        join_kernel[(stop - first, heads)](
            output, tokens.focus, layer.forms, layer.numbers, sinks, sum_of, workspace.sums,
            workspace.stats, first, alone, output.stride(0), output.stride(1), sum_of.stride(0),
            heads, splits, width_v, WIDTH_V=triton.next_power_of_2(width_v), SPLITS=MAX_SPLITS,
            SINKS=has_sinks, PLACES=MAX_FACTORS, LSE=lse is not None,
        )  # fmt: skip
