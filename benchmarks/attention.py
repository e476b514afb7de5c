# SPDX-License-Identifier: Apache-2.0
"""What it costs to read attention: heads, and weights of few queries, beside upstream.

    python -m benchmarks.attention --model CONFIG_DIR [--stock DIR] [--batch 32] [--json FILE]
        [--processes]

TPOT, as in `benchmarks.tpot`, of a batch with prompts of --prompt tokens: "tracker" reads the
attention of each generated token to two ranges of keys (`mass`), of 4 heads of 6 layers, "q and z"
captures those of all layers. And prompt tokens a second of --requests prompts of --long tokens:
"last token, all heads" is the mass of their last token, of all heads of all layers. No two requests
name the same ranges, so nothing that a step does for one serves another.

With --context, TPOT of a batch with prompts of so many tokens, in which all heads of all layers
are focused, for every request, or for one of eight ("others").

"heads" was started with what the others need and is asked for nothing. --cases starts those engines
alone that its cases need.

On a CPU, in a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.attention --model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --tokens 16
--prompt 60 --batch 4 --requests 4 --long 100 --stock build/upstream-cpu-*
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

from benchmarks import results
from benchmarks.engines import (
    NOTHING,
    Asks,
    Batch,
    Engine,
    Engines,
    add_arguments,
    model_shape,
    run_name,
)
from benchmarks.results import Row, Run
from benchmarks.tpot import SHORT

PLAIN = {"stock": ("stock", NOTHING), "off": ("off", NOTHING), "heads": ("heads", NOTHING)}
STEPS: dict[str, tuple[str, Asks]] = {
    **PLAIN,
    "tracker": ("heads", Asks(capture="a few")),
    "mass, all heads": ("heads", Asks(capture="mass")),
    "q and z": ("heads", Asks(capture="q and z")),
}
FOCUSED: dict[str, tuple[str, Asks]] = {
    **PLAIN,
    "focus, idle": ("focus", NOTHING),
    "focus, others": ("focus", Asks(focus=4.0, every=8)),
    "focus": ("focus", Asks(focus=4.0)),
}
PROMPTS: dict[str, tuple[str, Asks]] = {
    **PLAIN,
    "last token, all heads": ("heads", Asks(capture="mass", positions="last_prompt")),
}
HEADS: dict[str, Any] = {
    "capture_consumers": ["inline"],
    "capture_points": ["q", "z"],
    "capture_inline_max_bytes": 1 << 34,
}


FOCUS: dict[str, Any] = {
    **HEADS,
    "enable_steering": True,
    "steering_families": ["add", "focus"],
    "max_steering_configs": 256,
}


class Measured:
    """Seconds a token, and prompt tokens a second, of each case in each round."""

    def __init__(self, args: argparse.Namespace, engines: Engines) -> None:
        self._args, self._engines = args, engines
        self._steps: dict[tuple[int, int, str], list[float]] = defaultdict(list)
        self._kinds = [(STEPS, args.prompt)]
        if args.context:
            self._kinds.append((FOCUSED, args.context))
        self._prompts: dict[str, list[float]] = defaultdict(list)

    def _cases(self, cases: dict[str, tuple[str, Asks]], number: int) -> list[str]:
        names = [name for name in cases if name in self._args.cases]
        return names if number % 2 else names[::-1]

    def round(self, number: int) -> None:
        """Round 0 warms up, and is not kept."""
        args = self._args
        for batch in args.batch:
            for cases, prompt in self._kinds:
                for name in self._cases(cases, number):
                    engine, asks = cases[name]
                    ends = [
                        max(self._engines.ask(engine, Batch(batch, prompt, n, asks)).finished)
                        for n in (SHORT, SHORT + args.tokens)
                    ]
                    if number:
                        took = (ends[1] - ends[0]) / args.tokens * 1e3
                        self._steps[batch, prompt, name].append(took)
        for name in self._cases(PROMPTS, number):
            engine, asks = PROMPTS[name]
            took = max(self._engines.ask(engine, Batch(args.requests, args.long, 1, asks)).finished)
            if number:
                self._prompts[name].append(args.requests * args.long / took)

    def rows(self) -> list[Row]:
        steps = [
            Row(name, "TPOT", "ms", values, {"batch": batch, "prompt": prompt})
            for (batch, prompt, name), values in self._steps.items()
        ]
        at = {"prompt": self._args.long}
        return steps + [Row(n, "prefill", "tok/s", v, at) for n, v in self._prompts.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=24 << 30)
    results.add_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=5)
    every = list(dict.fromkeys([*STEPS, *FOCUSED, *PROMPTS]))
    parser.add_argument("--cases", nargs="+", choices=every, metavar="CASE", default=every)
    parser.add_argument("--tokens", type=int, default=64, help="that the difference is over")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt of a batch")
    parser.add_argument("--context", type=int, default=0, help="tokens of focused prompts, 0: none")
    parser.add_argument("--requests", type=int, default=64, help="with long prompts")
    parser.add_argument("--long", type=int, default=2048, help="tokens of each of these")
    parser.add_argument(
        "--settle", type=float, default=0, help="seconds before the first round, without requests"
    )
    args = parser.parse_args()
    if not args.stock:
        args.cases = [name for name in args.cases if name != "stock"]
    known = {
        "stock": Engine(stock=True), "off": Engine(), "heads": Engine(HEADS),
        "focus": Engine(FOCUS),
    }  # fmt: skip
    cases = {**STEPS, **PROMPTS, **(FOCUSED if args.context else {})}
    asked = {cases[name][0] for name in args.cases if name in cases}
    started = {name: engine for name, engine in known.items() if name in asked}
    common: dict[str, Any] = {
        "max_model_len": max(args.long + 1, max(args.prompt, args.context) + SHORT + args.tokens),
        "max_num_seqs": max(*args.batch, args.requests),
        "max_num_batched_tokens": 8192,
    }
    if not args.eager:
        common["compilation_config"] = {"cudagraph_capture_sizes": sorted({1, *args.batch})}
    name = run_name("attention", args)
    with Engines(started, args, **common) as engines:
        setup = results.setup(args, model=model_shape(args.model), engines=engines.versions)
        measured = Measured(args, engines)
        measured.round(0)
        time.sleep(args.settle)
        for number in range(1, args.rounds + 1):
            if number > 1 and engines.time_is_up:
                break
            measured.round(number)
            run = Run(name, setup, measured.rows())
            results.write(run, args.json)
    results.publish(run, args.json)


if __name__ == "__main__":
    main()
