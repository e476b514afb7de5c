# SPDX-License-Identifier: Apache-2.0
"""Where the device's time goes when every token is steered (captured), kernel by kernel.

    python -m benchmarks.kernel_times --model CONFIG_DIR [--capture] [--json FILE]    prefill
    python -m benchmarks.kernel_times --model CONFIG_DIR --decode 256 [--json FILE]

One engine in this process. Rounds go around the cases, forth and back:

    plain               asks for nothing, so upstream's form of the model runs
    steer, no change    every token, 3 points of all layers, with vectors too small to change a row
    steer               the same with vectors of a tenth of the stream
    capture             (--capture) `post_block` of all layers, every token

"steer, no change" has the data of "plain" and the work of "steer": what it costs is our kernels',
and what "steer" costs beyond it is that other data need more power, and so lower clocks.

Each ask is made twice, alone and under torch.profiler. Quantities, in ms:

    wall            of all requests, alone; "wall, profiled" under the profiler
    busy            some kernel or copy ran: the union of them, as copies run beside kernels
    gaps            between the first and the last of them none did: the device waits for the host
    a family        the sum of its kernels, see `FAMILIES`

Then the kernels themselves, the largest differences from "plain" first. With --decode all this is
of 64 steps of so many requests: of 72 generated tokens less of 8, so that prefill cancels.

On a CPU the families are of torch's ops, and only show that the script works:
VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m benchmarks.kernel_times
--model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --requests 4 --prompt 100
--step-tokens 256 --capture
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import results
from benchmarks.engine_process import QUIET, Served
from benchmarks.engines import NOTHING, Asks, Batch, Start, common_options, model_shape
from benchmarks.prefill import CONTENTS, post_block_options
from benchmarks.results import Row, Run

FAMILIES = {
    "taps": r"_(capture|steer)_rows|vllm::\w*rows",
    "triton fused": r"^triton_",
    "copies": r"^Mem(cpy|set)|^aten::(copy_|clone|fill_|zero_)",
    "attention": r"flash|fmha|attn|attention|fwd|reshape_and_cache",
    "gemm": r"nvjet|cutlass|gemm|gemv|xmma|cublas|splitk|onednn_mm|^aten::(\w*mm|linear|matmul)$",
}
"""Family -> names of its kernels, on a CPU of torch's ops; the first that fits. Else "other"."""
FAINT = 1e-12
"""Of vectors that change no row."""
DECODE_PROMPT, SHORT, STEPS = 32, 8, 64
SHOWN = 90
"""Characters of a kernel's name."""


@dataclass(frozen=True)
class Times:
    """Of one ask, in ms. By name of the kernel: its time, and how often it ran."""

    whole: dict[str, float]
    kernels: dict[str, float]
    calls: Counter[str]
    tokens: tuple[int, ...]

    def less(self, other: Times) -> Times:
        calls = self.calls - other.calls
        return Times(
            {name: value - other.whole[name] for name, value in self.whole.items()},
            {name: self.kernels[name] - other.kernels.get(name, 0.0) for name in calls},
            calls,
            self.tokens,
        )

    def families(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for name, value in self.kernels.items():
            sums[family(name)] += value
        return {name: sums[name] for name in (*FAMILIES, "other") if name in sums}


def family(kernel: str) -> str:
    found = (name for name, pattern in FAMILIES.items() if re.search(pattern, kernel))
    return next(found, "other")


class Cases:
    """What is asked of the engine, and how long it took in each round."""

    def __init__(self, args: argparse.Namespace, served: Served) -> None:
        self._served = served
        self._decode = bool(args.decode)
        self._batch = Batch(args.requests, args.prompt, 1)
        positions = "all_prompt"
        if self._decode:
            self._batch = Batch(args.decode, DECODE_PROMPT, SHORT + STEPS)
            positions = "all_generated"
        steer = Asks(distinct=CONTENTS)
        self._asks = {
            "plain": NOTHING,
            "steer, no change": replace(steer, modules="faint"),
            "steer": steer,
        }
        if args.capture:
            self._asks["capture"] = Asks(capture="all", positions=positions)
        self._found: dict[str, list[Times]] = defaultdict(list)

    def round(self, number: int) -> None:
        """Round 0 warms up, and is not kept."""
        for name in [*self._asks] if number % 2 else [*reversed(self._asks)]:
            batch = replace(self._batch, asks=self._asks[name])
            times = self._times(batch)
            if self._decode:
                times = times.less(self._times(replace(batch, tokens=SHORT)))
            if not number:
                continue
            self._found[name].append(times)
            told = {**times.whole, **times.families()}
            print(f"round {number}, {name}:", *(f"{n} {v:.3f}" for n, v in told.items()), sep="  ")

    def _times(self, batch: Batch) -> Times:
        alone = max(self._served.answer(batch).finished)
        on_gpu = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiled:
            answer = self._served.answer(batch)
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        kernels: dict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        spans = []
        for event in profiled.events():
            # A range that someone named is also told as the device's.
            if event.device_type != device or event.is_user_annotation:
                continue
            spans.append((event.time_range.start, event.time_range.end))
            took = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            kernels[event.name] += took / 1e3
            calls[event.name] += 1
        if not spans:
            raise SystemExit("the profiler saw nothing run on the device: does CUPTI work here?")
        busy, gaps = union(spans)
        whole = {"wall": alone * 1e3, "wall, profiled": max(answer.finished) * 1e3}
        return Times(
            {**whole, "busy": busy / 1e3, "gaps": gaps / 1e3}, kernels, calls, answer.digests
        )

    def rows(self) -> Iterator[Row]:
        at = {"batch" if self._decode else "requests": self._batch.requests}
        plain = self._found["plain"][-1].tokens
        for name, found in self._found.items():
            same = [a == b for a, b in zip(found[-1].tokens, plain, strict=True)]
            facts: dict[str, Any] = {"same tokens": sum(same) / len(same)}
            for quantity in found[0].whole:
                more = facts if quantity == "wall" and name != "plain" else {}
                yield Row(name, quantity, "ms", [t.whole[quantity] for t in found], at, more)
            for quantity in found[0].families():
                values = [times.families().get(quantity, 0.0) for times in found]
                if min(values) > 0:  # a ratio to it means something
                    yield Row(name, quantity, "ms", values, at)

    def kernels(self, top: int) -> Iterator[str]:
        """The kernels of all cases beside each other: ms and calls, medians of the rounds."""

        def ms(case: str, kernel: str) -> float:
            return statistics.median(t.kernels.get(kernel, 0.0) for t in self._found[case])

        def difference(kernel: str) -> float:
            return max(abs(ms(case, kernel) - ms("plain", kernel)) for case in cases)

        cases = [*self._asks]
        names = {name for found in self._found.values() for t in found for name in t.kernels}
        yield " ".join(f"{case:>24}" for case in cases) + "  kernel (ms x calls)"
        for name in sorted(names, key=difference, reverse=True)[:top]:
            cells = (f"{ms(c, name):.3f} x {self._found[c][-1].calls[name]}" for c in cases)
            shown = " ".join(name.split())[:SHOWN]
            yield " ".join(f"{cell:>24}" for cell in cells) + f"  {family(name)}: {shown}"


def union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Time in which something was going on, and in which nothing was between the first and the
    last."""
    busy = gaps = 0.0
    reached = min(start for start, _ in spans)
    for start, end in sorted(spans):
        gaps += max(0.0, start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, gaps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    parser.add_argument("--decode", type=int, metavar="BATCH", help="profile decoding instead")
    parser.add_argument("--capture", action="store_true", help="an engine that can capture, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--top", type=int, default=25, help="kernels to print")
    parser.add_argument("--kv-bytes", type=int, default=10 << 30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="no compilation, as on a CPU")
    results.add_arguments(parser)
    args = parser.parse_args()
    os.environ.update(QUIET, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    decoded = DECODE_PROMPT + SHORT + STEPS
    options: dict[str, Any] = {
        **common_options(args),
        "max_model_len": decoded if args.decode else args.prompt + 1,
        "max_num_seqs": args.decode or args.requests,
        "max_num_batched_tokens": args.step_tokens,
        "enable_steering": True,
        **(post_block_options(args) if args.capture else {}),
    }
    if not args.eager:
        # The graphs that are used; prefill uses none.
        options["compilation_config"] = {"cudagraph_capture_sizes": [args.decode or 1]}
    served = Served(Start(str(args.model.resolve()), options, CONTENTS, "", False, False))
    for index in range(CONTENTS):
        served.register(f"faint-{index}", index, FAINT)
    cases = Cases(args, served)
    setup = results.setup(args, model=model_shape(args.model))
    for number in range(args.rounds + 1):
        cases.round(number)
        if number:  # each time, so that what is there is kept if the machine is taken away
            results.write(Run("kernel-times", setup, [*cases.rows()], ("plain",)), args.json)
    results.publish(Run("kernel-times", setup, [*cases.rows()], ("plain",)), args.json)
    print("\n" + "\n".join(cases.kernels(args.top)))
    served.shut_down()


if __name__ == "__main__":
    main()
