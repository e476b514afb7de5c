# SPDX-License-Identifier: Apache-2.0
"""The kernels of focus/kernel.py, which says what they make of what."""

from vllm.triton_utils import tl, triton


@triton.jit
def _reads_alone(  # type: ignore[no-untyped-def]
    forms, program, alone, LSE: tl.constexpr, SINKS: tl.constexpr
):
    """Tell whether one program of `sum_kernel` reads the span of rows and writes them."""
    short = 0
    if LSE and not SINKS:
        length = tl.load(forms + program * 5 + 3) - tl.load(forms + program * 5 + 2)
        short = (length <= alone) & (tl.load(forms + program * 5 + 4) == 1)
    return short != 0


@triton.jit
def _joined(  # type: ignore[no-untyped-def]
    made, rest, rest_top, spanned, span, span_top, least, most, share, rule, gains,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Rows of the sums over the rest (over all keys, for factors and where keys only gain) and
    over the span, each times the exponential of its top, and where they are to be written."""
    if rule < 2:
        # The same bias on all keys changes nothing but what the sink gets.
        written = most > least
        if SINKS:
            written = written | (most != 0)
        if gains == 1:
            top = tl.maximum(rest_top, span_top)
            made = made * tl.exp(rest_top - top) + spanned * tl.exp(span_top - top)
            rest = rest * tl.exp(rest_top - top) + span * tl.exp(span_top - top)
        result = made / rest
    else:
        # What the span has without: exp(span_top) span of it and exp(rest_top) rest.
        odds = tl.exp(tl.minimum(rest_top - span_top, 80.0)) * rest / span
        mass = 1 / (1 + odds)
        if gains == 1:
            mass = tl.minimum(1 / odds, 1.0)
            rest = 1 - mass
            made -= spanned / span * mass
        share_here = tl.where(rule == 3, share / (share + 1 - mass), share)
        written = (mass < share) & (span > 0) & (rest > 0)
        result = share_here * spanned / span + (1 - share_here) * made / rest
    return result, written


# What changes from step to step compiles nothing anew.
@triton.jit(do_not_specialize=["first", "stop", "alone", "splits", "window", "chunk", "lse_stride"])
def sum_kernel(  # type: ignore[no-untyped-def]
    query, output, lse, keys, values, block_table, focus, requests, positions, forms, runs,
    numbers, slopes, sums, stats, first, stop, alone, scale, cap, window, chunk, query_stride,
    query_head_stride, out_stride, out_head_stride, lse_stride, table_stride, key_block,
    key_head_stride, key_token, value_block, value_head_stride, value_token, heads, splits,
    width, width_v,
    PAGE: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    CAPPED: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, RUNS: tl.constexpr,
    PLACES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Make partial sums of some keys of some rows; of rows whose span one program reads, the rows
    themselves. Grid: [tokens / AT_ONCE, key heads, splits * 2]."""
    row = tl.arange(0, ROWS)
    token = first + tl.program_id(0) * AT_ONCE + row // MEMBERS
    there = (row // MEMBERS < AT_ONCE) & (row % MEMBERS < GROUP) & (token < stop)
    left = tl.load(focus + token, mask=there, other=0)
    # Meanwhile: a chain of loads is what takes time here.
    request_of = tl.load(requests + token, mask=there, other=0)
    position_of = tl.load(positions + token, mask=there, other=-1).to(tl.int32)
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
        request = tl.max(tl.where(mine, request_of, 0), axis=0).to(tl.int64)
        at = tl.where(mine, position_of, -1)
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
        by_one = _reads_alone(forms, program, alone, LSE, SINKS)
        parts = tl.where(by_one, 1, splits)
        tiles = (tl.maximum(end - begin, 0) + KEYS - 1) // KEYS
        each = (tiles + parts - 1) // parts * KEYS
        begin += split * each
        end = tl.minimum(end, begin + each)
        q = tl.load(
            query + token[:, None].to(tl.int64) * query_stride
            + head[:, None] * query_head_stride + column[None, :],
            mask=mine[:, None] & (column < tl.where(begin < end, width, 0))[None, :], other=0.0,
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
        of_row = mine[:, None] & (column_v < width_v)[None, :]
        if by_one:
            if (part == 1) & (split == 0):
                out = output + token[:, None].to(tl.int64) * out_stride
                out += head[:, None] * out_head_stride + column_v[None, :]
                plain = tl.load(out, mask=of_row, other=0.0).to(tl.float32)
                top = tl.load(lse + head * lse_stride + token, mask=mine, other=0.0)
                below = tl.where(largest == float("-inf"), 0.0, largest)
                one = tl.full([ROWS], 1.0, tl.float32)
                result, written = _joined(
                    plain, one[:, None], top[:, None], made, total[:, None], below[:, None],
                    least[:, None], most[:, None], n0[:, None], rule, gains, SINKS,
                )  # fmt: skip
                tl.store(out, result.to(output.dtype.element_ty), mask=of_row & written)
        else:
            slot = (token - first).to(tl.int64) * heads + head
            slot = (slot * 2 + part) * splits + split
            tl.store(sums + slot[:, None] * width_v + column_v[None, :], made, mask=of_row)
            tl.store(stats + slot * 4, largest, mask=mine)
            tl.store(stats + slot * 4 + 1, total, mask=mine)
            tl.store(stats + slot * 4 + 2, least, mask=mine)
            tl.store(stats + slot * 4 + 3, most, mask=mine)
        left = tl.where(mine, 0, left)
        program = tl.max(left, axis=0)


@triton.jit(do_not_specialize=["first", "alone", "splits", "lse_stride"])
def join_kernel(  # type: ignore[no-untyped-def]
    output, focus, forms, numbers, sinks, lse, sums, stats, first, alone, out_stride,
    out_head_stride, lse_stride, heads, splits, width_v,
    WIDTH_V: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, PLACES: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Join the partial sums of one row and write it, if it differs. Grid: [tokens, heads]."""
    token = first + tl.program_id(0)
    program = tl.load(focus + token)
    if program == 0:
        return
    if _reads_alone(forms, program, alone, LSE, SINKS):
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
    share = tl.sum(tl.where(place == 0, number, 0.0), axis=0)
    result, written = _joined(
        made, rest, shift, spanned, span, below, least, most, share, rule, gains, SINKS
    )
    tl.store(out, result.to(output.dtype.element_ty), mask=column < tl.where(written, width_v, 0))
