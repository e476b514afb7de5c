# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens a second of an engine that ends after a layer, beside the whole model's.

    python -m benchmarks.early_stop --model CONFIG_DIR [--last-layer N] [--json FILE]

--requests prompts of --prompt random tokens are sent at once, and `post_block` of --last-layer is
captured at every prompt token; by default that layer is the last of the first half. "whole" loads
all layers and the head, "stopped" has `capture_stop_after`; both are measured in each round, on one
GPU. The facts of a row say how many GB of weights the engine holds. Weights are random, so that a
folder with config.json is a model: of 70B, of which a GPU has no room for the whole,

    python -m benchmarks.early_stop --model LLAMA_70B --last-layer 26 --cases stopped

Engines and rounds are as in `benchmarks.tpot`. On a CPU, in half a minute:
VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m benchmarks.early_stop --model
TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --requests 4 --prompt 100
--step-tokens 256
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import results
from benchmarks.engines import (
    Asks,
    Batch,
    Engine,
    Engines,
    add_arguments,
    model_shape,
    run_name,
)
from benchmarks.prefill import CAPTURE
from benchmarks.results import Row, Run

CASES = ("whole", "stopped")


def engines_of(args: argparse.Namespace) -> dict[str, Engine]:
    """The engines by name, each of which captures `post_block` of all tokens of a step."""
    row_bytes = model_shape(args.model)["hidden_size"] * (4 if args.dtype == "float32" else 2)
    buffer = args.step_tokens * row_bytes
    options = {**CAPTURE, "capture_points": ["post_block"], "capture_buffer_bytes": buffer}
    stop = {"capture_stop_after": args.last_layer}
    return {"whole": Engine(options), "stopped": Engine({**options, **stop})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=5 << 30)
    results.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    parser.add_argument("--last-layer", type=int, help="default: the last of the first half")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    args = parser.parse_args()
    model = model_shape(args.model)
    if args.last_layer is None:
        args.last_layer = model["num_hidden_layers"] // 2 - 1
    common: dict[str, Any] = {
        "max_model_len": args.prompt + 1,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": args.step_tokens,
    }
    if not args.eager:
        # Prefill uses no graphs; to make them is most of an engine's start.
        common["compilation_config"] = {"cudagraph_capture_sizes": [1]}
    started = {name: each for name, each in engines_of(args).items() if name in args.cases}
    asks = Asks(capture=f"layer {args.last_layer}", positions="all_prompt")
    batch = Batch(args.requests, args.prompt, 1, asks)
    rates: dict[str, list[float]] = {name: [] for name in args.cases}
    name = run_name("early-stop", args)
    with Engines(started, args, **common) as engines:
        setup = results.setup(args, model=model, engines=engines.versions)
        facts = {case: {"GB of weights": engines.weight_bytes(case) / 1e9} for case in rates}
        at = {"prompt": args.prompt, "last layer": args.last_layer}

        def made() -> Run:
            rows = [
                Row(case, "prefill", "tok/s", values, at, facts[case])
                for case, values in rates.items()
            ]
            return Run(name, setup, rows, baselines=("whole",))

        for number in range(args.rounds + 1):
            if number > 1 and engines.time_is_up:
                break
            for case in [*rates] if number % 2 else [*reversed(rates)]:
                seconds = max(engines.ask(case, batch).finished)
                if number:  # the first one warms up
                    rates[case].append(args.prompt * args.requests / seconds)
            if number:
                results.write(made(), args.json)
    results.publish(made(), args.json)


if __name__ == "__main__":
    main()
