# SPDX-License-Identifier: Apache-2.0
"""The general update of a residual stream: one opaque op a site, `torch.ops.vllm.steer_rows`.

`vllm/v1/steering_formula.py` has the formula, `tests/support/op_reference.py` its meaning in
float64. A token's *program* is a row of `programs`: the terms that act on it at this site, in
order. On CUDA a Triton kernel does the work, elsewhere torch; both compute in float32 and cast
once.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from vllm.model_executor.layers.reconstruction import flat
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.steering_formula import Scalars

_COLUMN = {name: column for column, name in enumerate(Scalars._fields)}

HUGE, TINY, SHRINK = 2.0**60, 2.0**-40, 2.0**-70
"""Rows with a number above the first, or none above the second, have squares that float32 cannot
hold; the third makes them others."""


@dataclass(frozen=True)
class TermTables:
    """Tables that the terms of one site read. They change in place and live as long as the
    engine.

    R rows in the pool, P programs, T terms at most at one site. Row 0 of the pool is no term,
    program 0 has no terms. All but `programs` and `gates` are shared by the sites. Where the stream
    has several lanes, `vectors` are [R, lanes * hidden], and `scalars` and `gates` have a dimension
    of lanes before theirs.
    """

    program: torch.Tensor
    """int32 [max tokens], the program of each token of this step."""
    runs: torch.Tensor
    """int32 [2, max tokens]. Of a request with gates that latch, the first token of this step has
    the number of its tokens, the others -1, and all others 0; beside it each token of such a
    request has the place of its position in `gates`, from 1 to D, one after the other and
    around."""
    programs: torch.Tensor
    """int32 [P, T], term rows in order, 0 for none, also between others."""
    vectors: torch.Tensor
    """float32 [R, hidden], row 0 zeros; vectors of terms, probes of gates and encoders."""
    scalars: torch.Tensor
    """float32 [R, len(Scalars)]."""
    probes: torch.Tensor
    """int32 [R], the row in `vectors` of the term's probe, 0 for no gate."""
    encoders: torch.Tensor
    """int32 [R], the row in `vectors` of the term's encoder, 0 for a term that reads by its own
    vector."""
    gate_owners: torch.Tensor
    """int32 [2, P]. A program p with frozen gates: p itself on the last prompt row, which decides
    and stores gates[0, p]; elsewhere the program whose decision it reads, column by column. Then,
    with gates that latch, the program of the same request at which its latched gates are kept."""
    gates: torch.Tensor
    """float32 [1 + D, P, T], this site's own tensor: the op changes it, and no view of what another
    site's op changes. First what is decided once, then latched gates as they are after each of the
    last D positions, of which drafts that are rejected are the last. [1, 1, 1] and shared if
    `gated` is False."""
    norms: bool
    """True if the engine has norm_match or normalize."""
    gated: bool
    """True if the engine has gates."""
    encodes: bool
    """True if the engine has operations with encoders: feature, low_rank or reconstruct."""
    autoencoders: tuple[Autoencoder, ...] = ()
    """Autoencoders of this site, on the device, for rows that become reconstructions."""


def steer_terms(
    h: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, terms: TermTables
) -> None:
    """Steer `h` in place: the additive table first, then each token's terms.

    Args:
        h: [tokens, hidden] or [lanes, tokens, hidden] in the model's dtype, rows contiguous;
            `h + r` or a clone.
        table: [slots, hidden] or [slots, lanes * hidden] in the model's dtype, row 0 zeros.
        slots: int32 [>= tokens], the table row of each token.
    """
    shift = table[:0]
    if terms.autoencoders:
        tensors, numbers = flat(terms.autoencoders)
        program, programs = terms.program, terms.programs
        shift = torch.ops.vllm.reconstruct_rows(
            h, table, slots, program, programs, terms.scalars, tensors, numbers
        )
    torch.ops.vllm.steer_rows(
        h,
        table,
        slots,
        shift,
        terms.program,
        terms.runs,
        terms.programs,
        terms.vectors,
        terms.scalars,
        terms.probes,
        terms.encoders,
        terms.gate_owners,
        terms.gates,
        terms.norms,
        terms.gated,
        terms.encodes,
    )


def steer_rows(
    h: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    shift: torch.Tensor,
    program: torch.Tensor,
    runs: torch.Tensor,
    programs: torch.Tensor,
    vectors: torch.Tensor,
    scalars: torch.Tensor,
    probes: torch.Tensor,
    encoders: torch.Tensor,
    gate_owners: torch.Tensor,
    gates: torch.Tensor,
    norms: bool,
    gated: bool,
    encodes: bool,
) -> None:
    """Steer `h` in place, as `steer_terms` does; an op, so the fields of `TermTables` come one by
    one. A token of slot 0 and program 0 is not touched."""
    terms = TermTables(
        program=program,
        runs=runs,
        programs=programs,
        vectors=vectors,
        scalars=scalars,
        probes=probes,
        encoders=encoders,
        gate_owners=gate_owners,
        gates=gates,
        norms=norms,
        gated=gated,
        encodes=encodes,
    )
    steer = steer_rows_triton if HAS_TRITON and h.is_cuda else steer_rows_torch
    if h.dim() == 2:
        steer(h, table, slots, terms, shift)
        return
    for lane, row in enumerate(h):
        own = slice(lane * h.shape[2], (lane + 1) * h.shape[2])
        gate = gates[lane] if gated else gates
        of_lane = replace(terms, vectors=vectors[:, own], scalars=scalars[lane], gates=gate)
        steer(row, table[:, own], slots, of_lane)


def _steer_rows_fake(
    h: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    shift: torch.Tensor,
    program: torch.Tensor,
    runs: torch.Tensor,
    programs: torch.Tensor,
    vectors: torch.Tensor,
    scalars: torch.Tensor,
    probes: torch.Tensor,
    encoders: torch.Tensor,
    gate_owners: torch.Tensor,
    gates: torch.Tensor,
    norms: bool,
    gated: bool,
    encodes: bool,
) -> None:
    return None


def steer_rows_torch(
    h: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    terms: TermTables,
    shift: torch.Tensor | None = None,
) -> None:
    """Compute the op in torch; waits for the device where there is one.

    Args:
        shift: float32 [tokens, hidden], what is added to the row that the first encoders read;
            None or without rows for nothing.
    """
    count = h.shape[0]
    slots, program = slots[:count], terms.program[:count].long()
    tokens = ((slots > 0) | (program > 0)).nonzero().squeeze(1)
    if not tokens.numel():
        return
    arrived = h[tokens].float()
    rows = arrived + table[slots[tokens].long()].float()
    program, places = program[tokens], terms.runs[1, tokens].long()
    norm = _norms(arrived) if terms.norms else None
    read = rows.clone() if terms.encodes else rows
    if shift is not None and len(shift):
        rows = rows + shift[tokens]
    # Column by column, since a row may read what another row of this step decides.
    for column, term in enumerate(terms.programs[program].long().unbind(1)):
        acting = (term > 0).nonzero().squeeze(1)
        if terms.encodes:
            opens = (term > 0) & (terms.scalars[term, _COLUMN["opens"]] != 0)
            read = torch.where(opens[:, None], rows, read)
        if acting.numel():
            kept = None if norm is None else norm[acting]
            at = _Acting(term[acting], program[acting], places[acting], column)
            rows[acting] = _apply_term(rows[acting], read[acting], kept, at, terms)
        if terms.encodes:
            # A column whose operation does not act on a token does not part two features.
            closes = terms.scalars[term, _COLUMN["closes"]] != 0
            follows = (term == 0) | ((terms.encoders[term] > 0) & ~closes)
            read = torch.where(follows[:, None], read, rows)
    h[tokens] = rows.to(h.dtype)


class _Acting(NamedTuple):
    """Rows that a term acts on, int64 [n]; `places` are theirs in `TermTables.runs`."""

    term: torch.Tensor
    program: torch.Tensor
    places: torch.Tensor
    column: int


def _apply_term(
    h: torch.Tensor,
    read: torch.Tensor,
    arrived_norm: torch.Tensor | None,
    acting: _Acting,
    terms: TermTables,
) -> torch.Tensor:
    """Rows after one term each, float32 [n, hidden]; `read`, what encoders read, has the same
    shape; `arrived_norm` is [n]."""
    term = acting.term
    numbers = terms.scalars[term]
    at = {name: numbers[:, i] for name, i in _COLUMN.items()}
    v = terms.vectors[term]
    along = (h * v).sum(dim=1)
    if terms.encodes:
        encoder = terms.encoders[term].long()
        before = (read * terms.vectors[encoder]).sum(dim=1) + at["bias"]
        active = before > at["above"]
        along = torch.where(encoder > 0, torch.where(active, before, 0.0), along)
    change = torch.clamp(along, at["lo"], at["hi"]) - along
    # A factor of 0 leaves its part out, also where a huge row makes that part infinite.
    amount = at["constant"] + torch.where(at["strength"] != 0, at["strength"] * change, 0.0)
    if terms.encodes:
        amount = torch.where((at["active"] != 0) & ~active, 0.0, amount)
    gate = torch.ones_like(along)
    if terms.gated:
        judged = torch.where(encoder[:, None] > 0, read, h) if terms.encodes else h
        gate = _gates(judged, acting, at, terms)
    keep = 1.0 - gate * (at["replace"] + at["renorm"])
    if arrived_norm is not None:
        norm = _norms(h)
        amount = amount + torch.where(at["norm"] != 0, at["norm"] * norm, 0.0)
        restored = torch.where(norm > 0, arrived_norm / norm, 1.0)
        keep = keep + torch.where(at["renorm"] != 0, gate * at["renorm"] * restored, 0.0)
    kept = torch.where(keep[:, None] != 0, keep[:, None] * h, 0.0)
    return kept + (gate * amount)[:, None] * v


def _norms(h: torch.Tensor) -> torch.Tensor:
    """The length of each row, float32 [n]. Rows whose squares float32 cannot hold are scaled by a
    power of two for it, others keep their bits."""
    largest = h.abs().amax(dim=1)
    by = torch.where(largest > HUGE, SHRINK, torch.where(largest < TINY, 1 / SHRINK, 1.0))
    return (h * by[:, None]).norm(dim=1) / by


def _gates(
    h: torch.Tensor, acting: _Acting, at: dict[str, torch.Tensor], terms: TermTables
) -> torch.Tensor:
    """The gate of each row, float32 [n], by `h`, what it judges; stores those that are decided
    here."""
    _, program, places, column = acting
    probe = terms.probes[acting.term].long()
    score = (h * terms.vectors[probe]).sum(dim=1)
    norm = _norms(h)
    cosine = torch.where(norm > 0, score / norm, 0.0)  # a row of zeros has no direction
    score = torch.where(at["cosine"] != 0, cosine, score)
    value = torch.sigmoid(at["sharpness"] * (score - at["threshold"]))
    frozen = (probe > 0) & (at["frozen"] != 0)
    home, keeper = terms.gate_owners[:, program].long()
    decides = (frozen & (home == program)).nonzero().squeeze(1)
    decided, latched = terms.gates[0, :, column], (probe > 0) & (at["latched"] != 0)
    decided[program[decides]] = value[decides]
    value = torch.where(frozen, decided[home], value)
    for owner in keeper[latched].unique().tolist():
        mine = (latched & (keeper == owner)).nonzero().squeeze(1)
        kept, own = terms.gates[1:, owner, column], places[mine] - 1
        if not at["begins"][mine[0]]:  # none of the others does: it acts without a gap
            value[mine[0]] = torch.maximum(value[mine[0]], kept[own[0] - 1])
        value[mine] = value[mine].cummax(0).values
        kept[own[-len(kept) :]] = value[mine[-len(kept) :]]
    return torch.where(probe > 0, value, 1.0)


def num_warps(block: int) -> int:
    """Warps for a row of `block` numbers: 16 of them a thread, so that the row stays in registers,
    up to the hardware's 32 warps."""
    return max(4, min(32, block // 512))


if HAS_TRITON:
    from vllm.triton_utils import tl, triton

    # A kernel may read globals of this kind only.
    _CONSTANT = tl.constexpr(_COLUMN["constant"])
    _NORM = tl.constexpr(_COLUMN["norm"])
    _STRENGTH = tl.constexpr(_COLUMN["strength"])
    _LO = tl.constexpr(_COLUMN["lo"])
    _HI = tl.constexpr(_COLUMN["hi"])
    _REPLACE = tl.constexpr(_COLUMN["replace"])
    _RENORM = tl.constexpr(_COLUMN["renorm"])
    _THRESHOLD = tl.constexpr(_COLUMN["threshold"])
    _SHARPNESS = tl.constexpr(_COLUMN["sharpness"])
    _COSINE = tl.constexpr(_COLUMN["cosine"])
    _BIAS = tl.constexpr(_COLUMN["bias"])
    _ABOVE = tl.constexpr(_COLUMN["above"])
    _ACTIVE = tl.constexpr(_COLUMN["active"])
    _OPENS = tl.constexpr(_COLUMN["opens"])
    _CLOSES = tl.constexpr(_COLUMN["closes"])
    _FROZEN = tl.constexpr(_COLUMN["frozen"])
    _LATCHED = tl.constexpr(_COLUMN["latched"])
    _BEGINS = tl.constexpr(_COLUMN["begins"])
    _HUGE, _TINY, _SHRINK = tl.constexpr(HUGE), tl.constexpr(TINY), tl.constexpr(SHRINK)

    @triton.jit
    def _norm(row):  # type: ignore[no-untyped-def]
        """Do as `_norms` does, in the kernel."""
        largest = tl.max(tl.abs(row))
        by = tl.where(largest > _HUGE, _SHRINK, tl.where(largest < _TINY, 1 / _SHRINK, 1.0))
        scaled = row * by
        return tl.sqrt(tl.sum(scaled * scaled)) / by

    @triton.jit
    def _steer_rows_kernel(  # type: ignore[no-untyped-def]
        h,
        table,
        slots,
        shift,
        program,
        runs,
        programs,
        vectors,
        scalars,
        probes,
        encoders,
        gate_owners,
        gates,
        h_stride,
        table_stride,
        runs_stride,
        programs_stride,
        vectors_stride,
        scalars_stride,
        owners_stride,
        gates_depth_stride,
        gates_stride,
        depth,
        num_terms,
        hidden,
        BLOCK: tl.constexpr,
        NORMS: tl.constexpr,
        GATED: tl.constexpr,
        ENCODES: tl.constexpr,
        SHIFTS: tl.constexpr,
        DECIDING: tl.constexpr,
    ):
        """One token, or all of a request with gates that latch, one after the other: the whole row
        is in registers."""
        first = tl.program_id(0).to(tl.int64)
        count = 1
        if GATED:
            run = tl.load(runs + first)
            if run < 0:
                return
            count = tl.maximum(run, 1)
        for i in range(count):
            token = first + i
            slot = tl.load(slots + token).to(tl.int64)
            mine = tl.load(program + token).to(tl.int64)
            skipped = (slot <= 0) & (mine <= 0)
            if GATED:
                home = tl.load(gate_owners + mine).to(tl.int64)
                decides = (mine > 0) & (home == mine)
                skipped = skipped | ((decides & (run == 0)) != DECIDING)
                # Where its latched gates are kept, and those of the row before and of this one.
                kept = gates + tl.load(gate_owners + owners_stride + mine) * gates_stride
                place = tl.load(runs + runs_stride + token)
                last = kept + tl.where(place > 1, place - 1, depth) * gates_depth_stride
                kept += place * gates_depth_stride
            if not skipped:
                cols = tl.arange(0, BLOCK)
                mask = cols < hidden
                row = tl.load(h + token * h_stride + cols, mask=mask, other=0.0).to(tl.float32)
                if NORMS:
                    arrived = _norm(row)
                added = tl.load(table + slot * table_stride + cols, mask=mask, other=0.0)
                row += added.to(tl.float32)
                read = row
                if SHIFTS:
                    row += tl.load(shift + token * hidden + cols, mask=mask, other=0.0)
                for column in range(num_terms):
                    term = tl.load(programs + mine * programs_stride + column).to(tl.int64)
                    if term > 0:
                        at = scalars + term * scalars_stride
                        v = tl.load(vectors + term * vectors_stride + cols, mask=mask, other=0.0)
                        along = tl.sum(row * v)
                        judged = row
                        if ENCODES:
                            read = tl.where(tl.load(at + _OPENS) != 0, row, read)
                            encoder = tl.load(encoders + term).to(tl.int64)
                            judged = tl.where(encoder > 0, read, row)
                            e = vectors + encoder * vectors_stride + cols
                            e = tl.load(e, mask=mask, other=0.0)
                            before = tl.sum(read * e) + tl.load(at + _BIAS)
                            above = tl.load(at + _ABOVE)
                            activation = tl.where(before > above, before, 0.0)
                            along = tl.where(encoder > 0, activation, along)
                            shut = (tl.load(at + _ACTIVE) != 0) & (before <= above)
                        clipped = tl.maximum(along, tl.load(at + _LO))
                        clipped = tl.minimum(clipped, tl.load(at + _HI))
                        strength = tl.load(at + _STRENGTH)
                        # A factor of 0 leaves its part out, also where that part is infinite.
                        amount = tl.load(at + _CONSTANT)
                        amount += tl.where(strength != 0, strength * (clipped - along), 0.0)
                        gate = tl.full((), 1.0, tl.float32)
                        if GATED:
                            probe = tl.load(probes + term).to(tl.int64)
                            if probe > 0:
                                p = vectors + probe * vectors_stride + cols
                                p = tl.load(p, mask=mask, other=0.0)
                                score = tl.sum(judged * p)
                                if tl.load(at + _COSINE) != 0:
                                    length = _norm(judged)
                                    score = tl.where(length > 0, score / length, 0.0)
                                score -= tl.load(at + _THRESHOLD)
                                gate = tl.sigmoid(tl.load(at + _SHARPNESS) * score)
                                if tl.load(at + _FROZEN) != 0:
                                    if decides:
                                        tl.store(gates + mine * gates_stride + column, gate)
                                    else:
                                        gate = tl.load(gates + home * gates_stride + column)
                                if tl.load(at + _LATCHED) != 0:
                                    if tl.load(at + _BEGINS) == 0:
                                        gate = tl.maximum(gate, tl.load(last + column))
                                    tl.store(kept + column, gate)
                        renorm = tl.load(at + _RENORM)
                        keep = 1.0 - gate * (tl.load(at + _REPLACE) + renorm)
                        if NORMS:
                            norm = _norm(row)
                            factor = tl.load(at + _NORM)
                            amount += tl.where(factor != 0, factor * norm, 0.0)
                            restored = tl.where(norm > 0, arrived / norm, 1.0)
                            keep += tl.where(renorm != 0, gate * renorm * restored, 0.0)
                        if ENCODES:
                            amount = tl.where(shut, 0.0, amount)
                        row = tl.where(keep != 0, keep * row, 0.0) + (gate * amount) * v
                        if ENCODES:
                            stays = (encoder > 0) & (tl.load(at + _CLOSES) == 0)
                            read = tl.where(stays, read, row)
                tl.store(h + token * h_stride + cols, row.to(h.dtype.element_ty), mask=mask)
            if GATED:
                tl.debug_barrier()  # the next row reads what this one stored

    def steer_rows_triton(
        h: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        terms: TermTables,
        shift: torch.Tensor | None = None,
    ) -> None:
        """Run the op as a Triton kernel: one program per token, two launches if rows read what
        others of the same step decide."""
        count, hidden = h.shape
        if not count:
            return
        block = triton.next_power_of_2(hidden)
        for deciding in (True, False) if terms.gated else (False,):
            _steer_rows_kernel[(count,)](
                h,
                table,
                slots,
                table if shift is None else shift,
                terms.program,
                terms.runs,
                terms.programs,
                terms.vectors,
                terms.scalars,
                terms.probes,
                terms.encoders,
                terms.gate_owners,
                terms.gates,
                h.stride(0),
                table.stride(0),
                terms.runs.stride(0),
                terms.programs.stride(0),
                terms.vectors.stride(0),
                terms.scalars.stride(0),
                terms.gate_owners.stride(0),
                *terms.gates.stride()[:2],
                len(terms.gates) - 1,
                terms.programs.shape[1],
                hidden,
                BLOCK=block,
                NORMS=terms.norms,
                GATED=terms.gated,
                ENCODES=terms.encodes,
                SHIFTS=shift is not None and len(shift) > 0,
                DECIDING=deciding,
                num_warps=num_warps(block),
            )


direct_register_custom_op(
    op_name="steer_rows",
    op_func=steer_rows,
    mutates_args=["h", "gates"],
    fake_impl=_steer_rows_fake,
    dispatch_key=current_platform.dispatch_key,
)
