# SPDX-License-Identifier: Apache-2.0
"""Focused attention on a GPU: of focused tokens alone, from the pages of the KV cache, exactly.

Two kernels, which a CUDA graph may hold: their grids follow from the number of tokens alone, and
all that differs between steps is read from the device. The first makes partial sums of some keys,
the second joins them and writes the rows that differ. The formula is that of `logits_of` in
layer_reader.py and of focused_weights.py; tests hold all of them against float64.

Where the backend gives the log of each row's sum, its own row stands for all keys, and only those
of the span are read. Not where a key loses weight: what is left may be the small difference of two
large numbers, so both sums are made anew.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.interventions.focus import MAX_FACTORS, MAX_RUNS
from vllm.v1.interventions.worker.kv_pages import Pages, Sight

TOKENS = 512
"""Tokens times splits of their keys that one launch has partial sums of."""
MAX_SPLITS = 16
"""Into how many parts the keys of a token are split, at most: a long context is read by many."""
ROWS = 32
"""Rows of a program in large steps: heads of some tokens that use one key head. Else of a token."""
PARTS = 2
"""Sums of a row: over the span, and over the rest; of factors all are in one."""
TILE_BYTES = 32 << 10
"""What a program loads of keys at a time, and as much of values."""
STATS = 4
"""The largest logit of a sum, the sum, and the smallest and largest bias of keys that were seen."""


class LayerTable(NamedTuple):
    """What programs do at one layer: views of the worker's table, P programs, the first none."""

    forms: torch.Tensor
    """int32 [P, 5]: the rule, how many runs, the first key of all runs and one past the last, and
    whether keys of the span only gain weight."""
    runs: torch.Tensor
    """int32 [P, 3, MAX_RUNS]: starts of runs, sorted, their stops, and the place of each."""
    numbers: torch.Tensor
    """float32 [P, heads, MAX_FACTORS]: at each place the log of a factor; a share at the first."""


class TokenTable(NamedTuple):
    """What focused tokens are: tensors of all tokens that a step may have."""

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
    for first in range(0, number, TOKENS // splits):
        stop = min(first + TOKENS // splits, number)
        grid = (triton.cdiv(stop - first, at_once), key_heads, splits * PARTS)
        _sum_kernel[grid](
            query, pages.keys, pages.values, block_table, tokens.focus, tokens.requests,
            tokens.positions, layer.forms, layer.runs, layer.numbers, slopes,
            workspace.sums, workspace.stats, first, stop, sight.scale, sight.cap, sight.window,
            sight.chunk, query.stride(0), query.stride(1), block_table.stride(0),
            *pages.keys.stride()[:3], *pages.values.stride()[:3], heads, splits, width, width_v,
            PAGE=page, GROUP=group, MEMBERS=members, AT_ONCE=at_once,
            ROWS=max(16, at_once * members), KEYS=min(128, TILE_BYTES // key_bytes),
            WIDTH=max(16, triton.next_power_of_2(width)),
            WIDTH_V=max(16, triton.next_power_of_2(width_v)),
            CAPPED=sight.cap != 0, SLOPES=has_slopes, RUNS=MAX_RUNS, PLACES=MAX_FACTORS,
            LSE=lse is not None, num_stages=2,
        )  # fmt: skip
        _join_kernel[(stop - first, heads)](
            output, tokens.focus, layer.forms, layer.numbers, sinks, sum_of, workspace.sums,
            workspace.stats, first, output.stride(0), output.stride(1), sum_of.stride(0), heads,
            splits, width_v, WIDTH_V=triton.next_power_of_2(width_v), SPLITS=MAX_SPLITS,
            SINKS=has_sinks, PLACES=MAX_FACTORS, LSE=lse is not None,
        )  # fmt: skip


if HAS_TRITON:
    # What changes from step to step compiles nothing anew.
    @triton.jit(do_not_specialize=["first", "stop", "splits", "window", "chunk"])
    def _sum_kernel(  # type: ignore[no-untyped-def]
        query, keys, values, block_table, focus, requests, positions, forms, runs, numbers, slopes,
        sums, stats, first, stop, scale, cap, window, chunk, query_stride, query_head_stride,
        table_stride, key_block, key_head_stride, key_token, value_block, value_head_stride,
        value_token, heads, splits, width, width_v,
        PAGE: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, AT_ONCE: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
        CAPPED: tl.constexpr, SLOPES: tl.constexpr, RUNS: tl.constexpr, PLACES: tl.constexpr,
        LSE: tl.constexpr,
    ):  # fmt: skip
        row = tl.arange(0, ROWS)
        token = first + tl.program_id(0) * AT_ONCE + row // MEMBERS
        there = (row // MEMBERS < AT_ONCE) & (row % MEMBERS < GROUP) & (token < stop)
        left = tl.load(focus + token, mask=there, other=0)
        program = tl.max(left, axis=0)
        if program == 0:
            return
        key_head = tl.program_id(1)
        split = tl.program_id(2) // 2
        part = tl.program_id(2) % 2
        head = key_head * GROUP + row % MEMBERS
        column = tl.arange(0, WIDTH)
        column_v = tl.arange(0, WIDTH_V)
        # Rows of one program are of one request. Mostly there is one, and then this runs once.
        while program > 0:
            mine = left == program
            request = tl.max(tl.load(requests + token, mask=mine, other=0), axis=0).to(tl.int64)
            at = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
            rule = tl.load(forms + program * 5)
            count = tl.load(forms + program * 5 + 1)
            number = numbers + (program * heads + head) * PLACES
            n0 = tl.load(number, mask=mine, other=0.0)
            n1 = tl.load(number + 1, mask=mine, other=0.0)
            n2 = tl.load(number + 2, mask=mine, other=0.0)
            n3 = tl.load(number + 3, mask=mine, other=0.0)
            acts = tl.max(((n0 != 0) | (n1 != 0) | (n2 != 0) | (n3 != 0)).to(tl.int32), axis=0)
            oldest = tl.zeros([ROWS], tl.int32)
            if window > 0:
                oldest = tl.maximum(oldest, at - window + 1)
            if chunk > 0:
                oldest = tl.maximum(oldest, at // chunk * chunk)
            begin = tl.min(tl.where(mine, oldest, 2147483647), axis=0)
            end = tl.max(at, axis=0) + 1
            span_begin = tl.load(forms + program * 5 + 2)
            span_end = tl.load(forms + program * 5 + 3)
            if part == 1:
                begin = tl.maximum(begin, span_begin)
                end = tl.minimum(end, span_end)
            gains = 0
            if LSE:
                gains = tl.load(forms + program * 5 + 4)
            # Keys that only gain are a sum of their own, beside the row that attention made. Else
            # the span has one only where its share is set.
            if (acts == 0) | tl.where(gains == 1, part == 0, (part == 1) & (rule < 2)):
                end = begin
            tiles = (tl.maximum(end - begin, 0) + KEYS - 1) // KEYS
            each = (tiles + splits - 1) // splits * KEYS
            begin += split * each
            end = tl.minimum(end, begin + each)
            q = tl.load(
                query + token[:, None].to(tl.int64) * query_stride
                + head[:, None] * query_head_stride + column[None, :],
                mask=mine[:, None] & (column < width)[None, :], other=0.0,
            )  # fmt: skip
            largest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            made = tl.zeros([ROWS, WIDTH_V], tl.float32)
            least = tl.full([ROWS], float("inf"), tl.float32)
            most = tl.full([ROWS], float("-inf"), tl.float32)
            if LSE:
                # Keys that a row sees and this does not have a bias of 0.
                outside = ((oldest < span_begin) | (at >= span_end)) & (gains == 1)
                least = tl.where(outside, 0.0, least)
                most = tl.where(outside, 0.0, most)
            for start in range(begin, end, KEYS):
                key = start + tl.arange(0, KEYS)
                inside = key < end
                block = tl.load(
                    block_table + request * table_stride + key // PAGE, mask=inside, other=0
                ).to(tl.int64)
                k = tl.load(
                    keys + block[None, :] * key_block + key_head * key_head_stride
                    + (key % PAGE)[None, :] * key_token + column[:, None],
                    mask=inside[None, :] & (column < width)[:, None], other=0.0,
                )  # fmt: skip
                s = tl.dot(q, k, input_precision="ieee") * scale
                if CAPPED:
                    s = cap * (1 - 2 / (1 + tl.exp(2 * s / cap)))
                behind = at[:, None] - key[None, :]
                if SLOPES:
                    slope = tl.load(slopes + head, mask=mine, other=0.0)
                    s -= slope[:, None] * behind.to(tl.float32)
                seen = inside[None, :] & (behind >= 0) & mine[:, None]
                if window > 0:
                    seen &= behind < window
                if chunk > 0:
                    seen &= key[None, :] // chunk == at[:, None] // chunk
                place = tl.full([KEYS], -1, tl.int32)
                for i in range(0, count):
                    run = runs + program * (3 * RUNS) + i
                    of_run = (key >= tl.load(run)) & (key < tl.load(run + RUNS))
                    place = tl.where(of_run, tl.load(run + 2 * RUNS), place)
                which = place[None, :]
                if rule < 2:
                    bias = tl.where(which == 0, n0[:, None], 0.0)
                    bias = tl.where(which == 1, n1[:, None], bias)
                    bias = tl.where(which == 2, n2[:, None], bias)
                    bias = tl.where(which == 3, n3[:, None], bias)
                    least = tl.minimum(least, tl.min(tl.where(seen, bias, float("inf")), axis=1))
                    most = tl.maximum(most, tl.max(tl.where(seen, bias, float("-inf")), axis=1))
                    if LSE:
                        # A factor w has the key once more w - 1 times.
                        once = tl.maximum(tl.exp(tl.minimum(bias, 20)) - 1, 1e-30)
                        more = tl.where(bias > 20, bias, tl.log(once))
                        seen = seen & ((gains == 0) | (bias > 0))
                        bias = tl.where(gains == 0, bias, tl.where(bias > 0, more, 0.0))
                    s += bias
                else:
                    seen = seen & tl.where(part == 1, which >= 0, which < 0)
                s = tl.where(seen, s, float("-inf"))
                new = tl.maximum(largest, tl.max(s, axis=1))
                shift = tl.where(new == float("-inf"), 0.0, new)
                weight = tl.exp(s - shift[:, None])
                fade = tl.exp(largest - shift)
                v = tl.load(
                    values + block[:, None] * value_block + key_head * value_head_stride
                    + (key % PAGE)[:, None] * value_token + column_v[None, :],
                    mask=inside[:, None] & (column_v < width_v)[None, :], other=0.0,
                )  # fmt: skip
                total = total * fade + tl.sum(weight, axis=1)
                made = made * fade[:, None]
                made += tl.dot(weight.to(v.dtype), v, input_precision="ieee")
                largest = new
            slot = (token - first).to(tl.int64) * heads + head
            slot = (slot * 2 + part) * splits + split
            tl.store(
                sums + slot[:, None] * width_v + column_v[None, :], made,
                mask=mine[:, None] & (column_v < width_v)[None, :],
            )  # fmt: skip
            tl.store(stats + slot * 4, largest, mask=mine)
            tl.store(stats + slot * 4 + 1, total, mask=mine)
            tl.store(stats + slot * 4 + 2, least, mask=mine)
            tl.store(stats + slot * 4 + 3, most, mask=mine)
            left = tl.where(mine, 0, left)
            program = tl.max(left, axis=0)

    @triton.jit(do_not_specialize=["first", "splits"])
    def _join_kernel(  # type: ignore[no-untyped-def]
        output, focus, forms, numbers, sinks, lse, sums, stats, first, out_stride, out_head_stride,
        lse_stride, heads, splits, width_v,
        WIDTH_V: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, PLACES: tl.constexpr,
        LSE: tl.constexpr,
    ):  # fmt: skip
        token = first + tl.program_id(0)
        program = tl.load(focus + token)
        if program == 0:
            return
        head = tl.program_id(1)
        rule = tl.load(forms + program * 5)
        place = tl.arange(0, PLACES)
        number = tl.load(numbers + (program * heads + head) * PLACES + place)
        if tl.max((number != 0).to(tl.int32), axis=0) == 0:
            return
        column = tl.arange(0, WIDTH_V)
        here = column < width_v
        split = tl.arange(0, SPLITS)
        inside = split < splits
        slot = ((token - first).to(tl.int64) * heads + head) * 2 * splits
        out = output + token.to(tl.int64) * out_stride + head * out_head_stride + column
        gains = 0
        if LSE:
            gains = tl.load(forms + program * 5 + 4)
        # The sum over the rest, or over all keys: `rest` and `made` times exp(rest_top).
        stat = stats + (slot + split) * 4
        tops = tl.load(stat, mask=inside, other=float("-inf"))
        rest_top = tl.max(tops, axis=0)
        sink = float("-inf")
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            rest_top = tl.maximum(rest_top, sink)
        shift = tl.where(rest_top == float("-inf"), 0.0, rest_top)
        rest = tl.sum(tl.load(stat + 1, mask=inside, other=0.0) * tl.exp(tops - shift), axis=0)
        rest += tl.exp(sink - shift)
        made = tl.zeros([WIDTH_V], tl.float32)
        for i in range(0, tl.where(gains == 1, 0, splits)):
            fade = tl.exp(tl.load(stats + (slot + i) * 4) - shift)
            part = sums + (slot + i) * width_v + column
            made += fade * tl.load(part, mask=here, other=0.0)
        biases = stat + tl.where(gains == 1, splits * 4, 0)
        least = tl.min(tl.load(biases + 2, mask=inside, other=float("inf")), axis=0)
        most = tl.max(tl.load(biases + 3, mask=inside, other=float("-inf")), axis=0)
        # That over the span, likewise.
        stat += splits * 4
        tops = tl.load(stat, mask=inside, other=float("-inf"))
        span_top = tl.max(tops, axis=0)
        below = tl.where(span_top == float("-inf"), 0.0, span_top)
        span = tl.sum(tl.load(stat + 1, mask=inside, other=0.0) * tl.exp(tops - below), axis=0)
        spanned = tl.zeros([WIDTH_V], tl.float32)
        for i in range(0, splits):
            fade = tl.exp(tl.load(stats + (slot + splits + i) * 4) - below)
            part = sums + (slot + splits + i) * width_v + column
            spanned += fade * tl.load(part, mask=here, other=0.0)
        if gains == 1:
            shift = tl.load(lse + head * lse_stride + token)
            rest = 1.0
            made = tl.load(out, mask=here, other=0.0).to(tl.float32)
        if rule < 2:
            # The same bias on all keys changes nothing but what the sink gets.
            written = tl.where(most > least, width_v, 0)
            if SINKS:
                written = tl.where(most != 0, width_v, written)
            if gains == 1:
                top = tl.maximum(shift, below)
                made = made * tl.exp(shift - top) + spanned * tl.exp(below - top)
                rest = tl.exp(shift - top) + span * tl.exp(below - top)
            result = made / rest
            tl.store(out, result.to(output.dtype.element_ty), mask=column < written)
        else:
            share = tl.sum(tl.where(place == 0, number, 0.0), axis=0)
            # What the span has without: exp(span_top) span of it and exp(rest_top) rest.
            odds = tl.exp(tl.minimum(shift - below, 80.0)) * rest / span
            mass = 1 / (1 + odds)
            if gains == 1:
                mass = tl.minimum(1 / odds, 1.0)
                rest = 1 - mass
                made -= spanned / span * mass
            share_here = tl.where(rule == 3, share / (share + 1 - mass), share)
            written = tl.where(mass < share, width_v, 0)
            written = tl.where(span > 0, written, 0)
            written = tl.where(rest > 0, written, 0)
            result = share_here * spanned / span + (1 - share_here) * made / rest
            tl.store(out, result.to(output.dtype.element_ty), mask=column < written)
