# SPDX-License-Identifier: Apache-2.0
"""Taps without torch.compile: torch and Triton, and the native ops of csrc/.

    python -m benchmarks.kernels [--library FILE] [--tokens 1 32] [--hidden 4096] [--json FILE]

Builds csrc/ unless given its library. For each size and each operation:

    capture none / all    rows wanted by no / every token
    steer                 every token on a row of its own choice of 33
    leave none / all      steer a deferred stream, capture its sum

"present" is what taps do without csrc/ (torch's ops and the Triton kernel). Two quantities:

    device    us of a call in a replayed CUDA graph: what the GPU does
    eager     us of a call in a loop, synchronized at its end: what Python, dispatcher and GPU do

`at` names the operation and size. "copy" moves as many bytes as the operation has to (each row
that it reads or writes counted once, the 33 rows of the table not at all): the ratio to it is how
far one is from the best possible at that size. Streams take turns among `STREAMS` buffers; what
fits in L2 stays there, as it does in a model. Rounds go around the cases.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.results import At, Row, Run, add_arguments, publish, setup
from tools import native
from vllm.model_executor.layers.native_rows import load
from vllm.model_executor.layers.residual_taps import rows_of
from vllm.model_executor.layers.row_capture import capture_rows

Call = Callable[[int], object]

TABLE_ROWS = 33
STREAMS = 4
CALLS = 20
"""Calls recorded in one graph."""
WARM_UP = 3


@dataclass(frozen=True)
class Timed:
    """One operation at one size in one way. `call` gets the number of a stream."""

    operation: str
    case: str
    call: Call
    bytes: int


class Site:
    """Tensors of one size, and the ways to do each operation on them."""

    def __init__(self, tokens: int, hidden: int, device: str, dtype: torch.dtype) -> None:
        def rows(count: int) -> torch.Tensor:
            return torch.randn(count, hidden, device=device, dtype=dtype)

        self.tokens, self.hidden = tokens, hidden
        self.row_bytes = tokens * hidden * dtype.itemsize
        self.h = [rows(tokens) for _ in range(STREAMS)]
        self.r = [rows(tokens) for _ in range(STREAMS)]
        self.table = rows(TABLE_ROWS)
        self.slots = torch.randint(TABLE_ROWS, (tokens,), device=device).int()
        self.arena = rows(tokens)
        self.wanted = {
            "none": torch.full((tokens,), -1, device=device, dtype=torch.int32),
            "all": torch.randperm(tokens, device=device).int(),
        }
        self.switch = torch.tensor(True)
        self.copied = rows(2 * tokens), rows(2 * tokens)

    def copy(self, count: int) -> Call:
        """Reads and writes `count` times the stream's bytes in all; `count` is 2 or 4."""
        source, target = (flat.flatten()[: count * flat.numel() // 4] for flat in self.copied)
        return lambda _: target.copy_(source)

    def steer(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + rows_of(self.table, self.slots[: rows.shape[0]])

    def captures(self) -> Iterator[Timed]:
        vllm, pilot, h, arena = torch.ops.vllm, torch.ops.pilot, self.h, self.arena
        for wanted, dest in self.wanted.items():
            name, moved = f"capture {wanted}", 2 if wanted == "all" else 0

            def present(i: int, dest: torch.Tensor = dest) -> object:
                return vllm.capture_rows(h[i], arena, dest, self.switch)

            def one(i: int, dest: torch.Tensor = dest) -> object:
                return pilot.capture_rows(h[i], None, arena, dest)

            total = moved * self.row_bytes
            yield Timed(name, "present", present, total)
            yield Timed(name, "native", one, total)
            if moved:
                yield Timed(name, "copy", self.copy(moved), total)

    def steers(self) -> Iterator[Timed]:
        pilot, total = torch.ops.pilot, 2 * self.row_bytes
        yield Timed("steer", "present", lambda i: self.steer(self.r[i]), total)
        yield Timed(
            "steer", "native", lambda i: pilot.add_rows(self.r[i], self.table, self.slots), total
        )
        yield Timed("steer", "copy", self.copy(2), total)

    def leaves(self) -> Iterator[Timed]:
        pilot = torch.ops.pilot
        for wanted, dest in self.wanted.items():
            name, moved = f"leave {wanted}", 4 if wanted == "all" else 2

            def present(i: int, dest: torch.Tensor = dest) -> object:
                steered = self.steer(self.r[i])
                return torch.ops.vllm.capture_rows(
                    self.h[i] + steered, self.arena, dest, self.switch
                )

            def one(i: int, dest: torch.Tensor = dest) -> object:
                return pilot.add_and_capture_rows(
                    self.r[i], self.h[i], self.table, self.slots, self.arena, dest
                )

            total = moved * self.row_bytes
            yield Timed(name, "present", present, total)
            yield Timed(name, "native", one, total)
            yield Timed(name, "copy", self.copy(moved), total)

    def all(self) -> list[Timed]:
        return [*self.captures(), *self.steers(), *self.leaves()]

    def check(self) -> None:
        """The ways agree here, so that what is timed is the same work."""
        dest = self.wanted["all"]
        steered = self.steer(self.r[0])
        assert torch.equal(steered, torch.ops.pilot.add_rows(self.r[0], self.table, self.slots))
        capture_rows(self.h[0] + steered, self.arena, dest, self.switch)
        arena = torch.zeros_like(self.arena)
        torch.ops.pilot.add_and_capture_rows(
            self.r[0], self.h[0], self.table, self.slots, arena, dest
        )
        assert torch.equal(arena, self.arena)


def record(call: Call) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(WARM_UP):
            call(i % STREAMS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % STREAMS)
    graph.replay()
    return graph


def device_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1000 / (3 * CALLS)


def eager_us(call: Call, calls: int, synchronize: Callable[[], None]) -> float:
    synchronize()
    started = time.perf_counter()
    for i in range(calls):
        call(i % STREAMS)
    synchronize()
    return (time.perf_counter() - started) * 1e6 / calls


def copy_gbps(cuda: bool) -> float:
    """GB/s read and written by a copy of 1 GiB (CPU: 64 MiB), best of five."""
    source = torch.empty(
        1 << 30 if cuda else 1 << 26, dtype=torch.uint8, device="cuda" if cuda else "cpu"
    )
    target = torch.empty_like(source)
    if not cuda:
        best = min(eager_us(lambda _: target.copy_(source), 1, lambda: None) for _ in range(5))
    else:
        graph = record(lambda _: target.copy_(source))
        best = min(device_us(graph) for _ in range(5))
    return 2 * source.numel() / best / 1e3


def measure(site: Site, rounds: int, calls: int, cuda: bool) -> Iterator[Row]:
    """Rows of one size."""
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    work = site.all()
    graphs = [record(timed.call) for timed in work] if cuda else []
    device: list[list[float]] = [[] for _ in work]
    eager: list[list[float]] = [[] for _ in work]
    for timed in work:
        eager_us(timed.call, WARM_UP, synchronize)
    for _ in range(rounds):
        for index, timed in enumerate(work):
            if cuda:
                device[index].append(device_us(graphs[index]))
            eager[index].append(eager_us(timed.call, calls, synchronize))
    for index, timed in enumerate(work):
        at: At = {"operation": timed.operation, "tokens": site.tokens, "hidden": site.hidden}
        for quantity, values in (("device", device[index]), ("eager", eager[index])):
            if values:
                rate = timed.bytes / statistics.median(values) / 1e3
                facts = {"GB/s": rate} if timed.bytes else {}
                yield Row(timed.case, quantity, "us", values, at, facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="csrc/ built already")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 2048, 8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="of a loop of eager calls")
    add_arguments(parser)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        library = args.library or native.build(Path(scratch))
        if not load(library, device.upper()):
            raise SystemExit(f"{library} has nothing for {device}")
        torch.manual_seed(0)
        peak = copy_gbps(cuda)
        rows: list[Row] = []
        with torch.inference_mode():
            for hidden in args.hidden:
                for tokens in args.tokens:
                    site = Site(tokens, hidden, device, torch.bfloat16)
                    site.check()
                    rows += measure(site, args.rounds, args.calls, cuda)
        where = setup(args, device=device, copy_bandwidth=f"{peak:.0f} GB/s, read and written")
        publish(Run("csrc", where, rows, baselines=("present", "copy")), args.json)


if __name__ == "__main__":
    main()
