# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of the general update on a GPU: against torch, the float64 reference, itself in
a CUDA graph, and how long it takes. Exit status 1 on a failure.

    python -m tests.gpu.terms

Needs the fork on sys.path (CONTRIBUTING.md), no model. Prints one JSON object a check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.terms import FAMILIES, LENGTH, Maker, Site, entry, worst
from vllm.config.operations import STREAM_OPERATIONS
from vllm.model_executor.layers.steering_terms import (
    TermTables,
    steer_rows_torch,
    steer_rows_triton,
    steer_terms,
)

NUM_PROMPT = 5
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of a row: float32 sums, or half a unit of the dtype."""


def asked_of(maker: Maker, gated: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each operation alone, and all of them with gates of both kinds."""
    for name in STREAM_OPERATIONS:
        more = {"gate": maker.gate()} if gated else {}
        yield name, [maker.op("add"), maker.op(name, **more)]
    mixed = [maker.op(name) for name in ("norm_match", "clamp", "replace", "ablate", "normalize")]
    if gated:
        mixed[2:2] = [
            maker.op("add", gate=maker.gate("last_prompt")),
            maker.op("pin", gate=maker.gate("last_prompt"), positions="all_generated"),
            maker.op("add", gate={**maker.gate(), "latch": True}),
        ]
    yield "mixed", mixed


def compare(hidden: int, dtype: torch.dtype, gated: bool) -> dict[str, Any]:
    """Kernel and torch against the reference, all rows in one step."""
    maker = Maker(hidden, hidden, 30.0)
    families = FAMILIES if gated else FAMILIES - {"gate"}
    kernel = plain = 0.0
    for _, asked in asked_of(maker, gated):
        rows = maker.rows().to(dtype)
        site = Site(asked, hidden, LENGTH, NUM_PROMPT, families, dtype, "cuda")
        want = site.expected(rows.float())
        by_kernel = site.step(steer_rows_triton, rows, range(LENGTH))
        by_torch = site.step(steer_rows_torch, rows, range(LENGTH))
        kernel = max(kernel, worst(by_kernel, want, rows))
        plain = max(plain, worst(by_torch, want, rows))
    limit = TOLERANCE[dtype]
    return {"error": kernel, "torch": plain, "limit": limit, "ok": kernel < limit}


def exact(dtype: torch.dtype) -> dict[str, Any]:
    """`replace` puts its row in bit for bit; rows of nobody are not touched."""
    maker = Maker(1, 4096, 5.0)
    rows, values = maker.rows().to(dtype), maker.rows(2).to(dtype)
    rows[3] = torch.nan
    site = Site(
        [entry("replace", values=values, positions=[3, 7])],
        4096,
        LENGTH,
        dtype=dtype,
        device="cuda",
    )
    after = site.step(steer_rows_triton, rows, range(LENGTH))
    replaced = torch.equal(after[[3, 7]], values)
    rest = [p for p in range(LENGTH) if p not in (3, 7)]
    kept = torch.equal(after[rest], rows[rest])
    moved = not torch.equal(after[7], rows[7])
    return {"replaced": replaced, "kept": kept, "ok": replaced and kept and moved}


def in_graph() -> dict[str, Any]:
    """Compiled, in a CUDA graph: a replay does what the tables say then, not at capture."""
    maker = Maker(2, 1024, 10.0)
    site = Site([maker.op("add"), maker.op("pin")], 1024, LENGTH, device="cuda")
    h, r = maker.rows().cuda(), maker.rows().cuda()
    table = torch.zeros(1, 1024, device="cuda")
    slots = torch.zeros(LENGTH, dtype=torch.int32, device="cuda")

    @torch.compile(fullgraph=True)
    def tap(h: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        whole = h + r
        steer_terms(whole, table, slots, site.tables)
        return whole * 2

    site.tables.program.zero_()
    for _ in range(3):
        tap(h, r)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tap(h, r)
    graph.replay()
    idle = bool(torch.equal(out, (h + r) * 2))
    site.tables.program.copy_(site.of_position)
    graph.replay()
    error = worst(out.cpu(), 2 * site.expected((h + r).cpu()))
    return {"idle": idle, "error": error, "ok": idle and error < 5e-6}


def timed(tokens: int, hidden: int, busy: bool, terms: int) -> dict[str, Any]:
    """Microseconds of one op, of a graph of 20."""
    maker = Maker(3, hidden, 10.0)
    asked = [maker.op("clamp") for _ in range(terms)]
    site = Site(asked, hidden, LENGTH, families=FAMILIES - {"gate"}, device="cuda")
    program = torch.full((tokens,), int(site.of_position[0]) if busy else 0, dtype=torch.int32)
    tables = TermTables(**vars(site.tables) | {"program": program.cuda()})
    h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(1, hidden, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    steer_rows_triton(h, table, slots, tables)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            steer_rows_triton(h, table, slots, tables)
    times = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / 20)
    return {"us": round(sorted(times)[5], 2), "ok": True}


def checks() -> Iterator[tuple[str, dict[str, Any]]]:
    for hidden in (64, 1000, 4096, 5120, 16384):
        for dtype in TOLERANCE:
            for gated in (False, True):
                yield f"{hidden} {dtype} gated={gated}", compare(hidden, dtype, gated)
    for dtype in TOLERANCE:
        yield f"exact {dtype}", exact(dtype)
    yield "compiled in a graph", in_graph()
    for tokens in (256, 8192):
        for hidden in (4096, 16384):
            for busy, terms in ((False, 1), (True, 1), (True, 4)):
                name = f"time: {tokens} tokens, hidden {hidden}, {terms if busy else 0} terms"
                yield name, timed(tokens, hidden, busy, terms)


def main() -> int:
    ok = True
    for name, result in checks():
        print(json.dumps({"check": name, **result}), flush=True)
        ok = ok and result["ok"]
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
