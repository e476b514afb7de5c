# SPDX-License-Identifier: Apache-2.0
"""Time per output token of an engine without torch.compile and graphs: taps of torch, or native.

    python -m benchmarks.eager_taps --model CONFIG_DIR --library FILE [--batch 1 256] [--json FILE]

One engine with steering and capture; between batches all its taps change their class (`SiteTap`,
`NativeTap`), so both are measured side by side. TPOT = (t(8 + n tokens) - t(8 tokens)) / n. "plain"
asks for nothing and runs no taps; the others run every tap of every layer:

    steer          all points of all layers; each of up to 32 requests a content of its own
    capture        `post_block` of the middle layer, every generated token
    capture all    of all layers
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_process import QUIET, Served
from benchmarks.engines import NOTHING, Asks, Batch, Start, model_shape
from benchmarks.results import Row, Run, add_arguments, publish, setup
from vllm.v1.interventions.worker import runner

SHORT = 8
CONTENTS = 32
ASKS = {
    "steer": Asks(distinct=CONTENTS),
    "capture": Asks(capture="middle"),
    "capture all": Asks(capture="all"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--library", type=Path, required=True, help="csrc/, built")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40, help="that the difference is over")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-bytes", type=int, default=8 << 30)
    add_arguments(parser)
    args = parser.parse_args()
    os.environ.update(QUIET, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    from vllm.model_executor.layers.native_rows import NativeTap, load
    from vllm.model_executor.layers.residual_taps import SiteTap

    if not load(args.library, "CUDA" if torch.cuda.is_available() else "CPU"):
        raise SystemExit(f"{args.library} has no kernels for this device")
    options = {
        "load_format": "benchmark",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": args.kv_bytes,
        "gpu_memory_utilization": 0.05,  # the line above decides
        "dtype": args.dtype,
        "max_model_len": 2 * (args.prompt + SHORT + args.tokens),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "enable_steering": True,
        "max_steering_configs": CONTENTS,
        "capture_consumers": ["inline"],
        "capture_inline_max_bytes": 1 << 34,
    }
    taps: list[SiteTap] = []

    class Kept(SiteTap):
        def __init__(self, *tensors: Any) -> None:
            super().__init__(*tensors)
            taps.append(self)

    runner.SiteTap = Kept  # type: ignore[assignment,misc]
    served = Served(Start(str(args.model.resolve()), options, CONTENTS, "", False, False))

    def tpot(asks: Asks, kind: type[SiteTap], requests: int) -> tuple[float, tuple[int, ...]]:
        for tap in taps:
            tap.__class__ = kind
        ends = []
        for tokens in (SHORT, SHORT + args.tokens):
            answer = served.answer(Batch(requests, args.prompt, tokens, asks))
            ends.append(max(answer.finished))
        return (ends[1] - ends[0]) / args.tokens * 1e3, answer.digests

    kinds = {"torch": SiteTap, "native": NativeTap}
    cases = {"plain": (NOTHING, SiteTap)}
    cases |= {f"{n}, {k}": (a, kind) for n, a in ASKS.items() for k, kind in kinds.items()}
    rows = []
    for requests in args.batch:
        times: dict[str, list[float]] = {name: [] for name in cases}
        answers: dict[str, tuple[int, ...]] = {}
        for asks, _ in cases.values():  # warms up
            served.answer(Batch(requests, args.prompt, SHORT, asks))
        for number in range(args.rounds):
            for name in [*cases] if number % 2 else [*reversed(cases)]:
                took, answers[name] = tpot(*cases[name], requests)
                times[name].append(took)
        for name, values in times.items():
            other = name.replace("native", "torch")
            facts = {"same tokens": answers[name] == answers[other]} if other != name else {}
            beside = (other,) if other != name else ()
            rows.append(Row(name, "TPOT", "ms", values, {"batch": requests}, facts, beside))
        # After each size, as time may be up.
        where = setup(args, model=model_shape(args.model), taps=len(taps))
        publish(Run("eager", where, rows, baselines=("plain",)), args.json)


if __name__ == "__main__":
    main()
