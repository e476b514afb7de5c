# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens a second: upstream, nothing enabled, idle, steered, every prompt token captured.

    python -m benchmarks.prefill --model CONFIG_DIR [--stock DIR] [--json FILE] [--processes]

--requests prompts of --prompt random tokens are sent at once and each generates one token; prefix
caching is off. Also requests a second with short prompts of which the last token is captured at all
layers, and, in the same rounds, the rate of copies from the device into pinned memory, which bounds
capture. Engines, rounds and "stock" are as in `benchmarks.tpot`.

"32 features" are the most active of the 65,536 of an autoencoder of the middle layer.
"capture all prompt" captures `post_block` of all layers at every prompt token; the clock stops when
all rows are in host memory and the requests' outputs hold them.

On a CPU, in a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.prefill --model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --requests 4
--prompt 100 --last-requests 8 --last-prompt 20 --step-tokens 256 --stock build/upstream-cpu-*
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.autoencoders import save_autoencoder
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

COPIED = 256 << 20
"""Bytes of a copy whose rate is measured."""


CONTENTS = 16
"""Distinct ones among steered requests."""

PLAIN = {"stock": ("stock", NOTHING), "off": ("off", NOTHING), "idle": ("both", NOTHING)}
CASES: dict[str, dict[str, tuple[str, Asks]]] = {
    "prefill": {
        **PLAIN,
        "steer": ("steering", Asks(distinct=CONTENTS)),
        "capture all prompt": ("capture", Asks(capture="all", positions="all_prompt")),
        "32 features": ("features", Asks(capture="features", positions="all_prompt")),
    },
    "requests": {
        **PLAIN,
        "capture last prompt": ("capture", Asks(capture="all", positions="last_prompt")),
    },
}
"""quantity -> case -> the engine, and what its requests ask for."""


@dataclass(frozen=True)
class Load:
    """Requests of a kind, and how their rate is told."""

    unit: str
    each: int
    """What a request counts."""
    batch: Batch


CAPTURE: dict[str, Any] = {"capture_consumers": ["inline"], "capture_inline_max_bytes": 1 << 34}


def post_block_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of an engine that captures `post_block` of every token of a step."""
    model = model_shape(args.model)
    # All rows of a step fit, so that capture need not make steps smaller.
    row_bytes = model["hidden_size"] * (4 if args.dtype == "float32" else 2)
    buffer = args.step_tokens * model["num_hidden_layers"] * row_bytes
    return {**CAPTURE, "capture_points": ["post_block"], "capture_buffer_bytes": buffer}


def engines_of(args: argparse.Namespace, features: str) -> dict[str, Engine]:
    """The engines by name; `features` is the entry of an autoencoder."""
    steering = {"enable_steering": True}
    return {
        "stock": Engine(stock=True),
        "off": Engine(),
        "both": Engine({**steering, **CAPTURE}),
        "steering": Engine(steering, modules=CONTENTS),
        "capture": Engine(post_block_options(args)),
        "features": Engine({**post_block_options(args), "features": [features]}),
    }


def loads_of(args: argparse.Namespace) -> dict[str, Load]:
    """quantity -> how it is measured."""
    return {
        "prefill": Load("tok/s", args.prompt, Batch(args.requests, args.prompt, 1)),
        "requests": Load("requests/s", 1, Batch(args.last_requests, args.last_prompt, 1)),
    }


class Measured:
    """Rates of each case of each load in each round."""

    def __init__(self, engines: Engines, args: argparse.Namespace) -> None:
        self._engines = engines
        self._loads = loads_of(args)
        self._cases = {
            quantity: {n: case for n, case in cases.items() if n in args.cases}
            for quantity, cases in CASES.items()
        }
        self._any = self._cases["prefill"][args.cases[0]][0]
        """An engine that copies are measured with."""
        self._rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._captured: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._copies: list[float] = []

    def round(self, number: int) -> None:
        """Round 0 warms up, and is not kept."""
        copied = self._engines.copy_rate(self._any, COPIED) / 1e9
        if number:
            self._copies.append(copied)
        for quantity, load in self._loads.items():
            cases = self._cases[quantity]
            for name in [*cases] if number % 2 else [*reversed(cases)]:
                engine, asks = cases[name]
                answer = self._engines.ask(engine, replace(load.batch, asks=asks))
                seconds = max(answer.finished)
                if number:
                    rate = load.each * load.batch.requests / seconds
                    self._rates[quantity, name].append(rate)
                    self._captured[quantity, name].append(answer.captured / seconds / 1e9)

    def rows(self) -> Iterator[Row]:
        for quantity, load in self._loads.items():
            at = {"prompt": load.batch.prompt}
            for name in self._cases[quantity]:
                facts: dict[str, Any] = {}
                captured = self._captured[quantity, name]
                if any(captured):
                    shares = [a / b for a, b in zip(captured, self._copies, strict=True)]
                    facts["captured GB/s"] = statistics.median(captured)
                    facts["of the copy rate"] = statistics.median(shares)
                yield Row(name, quantity, load.unit, self._rates[quantity, name], at, facts)
        yield Row("copy to pinned memory", "copy", "GB/s", self._copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=5 << 30)
    results.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--last-requests", type=int, default=256)
    parser.add_argument("--last-prompt", type=int, default=128, help="tokens of each of these")
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    names = [*CASES["prefill"], *CASES["requests"]]
    parser.add_argument(
        "--cases", nargs="+", default=[*CASES["prefill"], "capture last prompt"], choices=names
    )
    args = parser.parse_args()
    if args.stock is None:
        args.cases = [name for name in args.cases if name != "stock"]
    used = {case[n][0] for case in CASES.values() for n in case if n in args.cases}
    folder = tempfile.TemporaryDirectory()
    features = ""
    if "features" in used:
        features = save_autoencoder(Path(folder.name) / "sae", args.model)
    started = {name: each for name, each in engines_of(args, features).items() if name in used}
    common: dict[str, Any] = {
        "max_model_len": max(args.prompt, args.last_prompt) + 1,
        "max_num_seqs": max(args.requests, args.last_requests),
        "max_num_batched_tokens": args.step_tokens,
    }
    if not args.eager:
        # Prefill uses no graphs; to make them is most of an engine's start.
        common["compilation_config"] = {"cudagraph_capture_sizes": [1]}
    name = run_name("prefill", args)
    with Engines(started, args, **common) as engines:
        setup = results.setup(args, model=model_shape(args.model), engines=engines.versions)
        measured = Measured(engines, args)
        for number in range(args.rounds + 1):
            if number > 1 and engines.time_is_up:
                break
            measured.round(number)
            if number:
                results.write(Run(name, setup, [*measured.rows()]), args.json)
    results.publish(Run(name, setup, [*measured.rows()]), args.json)


if __name__ == "__main__":
    main()
