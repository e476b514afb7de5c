# SPDX-License-Identifier: Apache-2.0
"""Time per output token: nothing enabled, idle, steered, captured. One process an arm.

    python -m benchmarks.tpot --model CONFIG_DIR [--batch 1 32 256] [--rounds 5] [--json FILE]

Dummy weights, random prompts. TPOT = (t(8 + n tokens) - t(8 tokens)) / n, n of --tokens. "off" is
this build with nothing enabled; ratios are against it, of medians, the spread is (max - min) /
median of an arm's rounds. An engine a process stays loaded, and rounds go around the arms, so that
drift of the machine hits all alike; needs memory for all of them at once (--kv-bytes each).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("add", "norm_match", "ablate", "clamp", "pin", "replace", "normalize", "gate")
POINTS = ("pre_attn", "post_attn", "post_block")

STEERING = {"enable_steering": True, "max_steering_configs": 256}
CAPTURE = {"capture_consumers": ["inline"], "capture_inline_max_bytes": 1 << 34}


@dataclass(frozen=True)
class Arm:
    """What one engine is started with, and what its requests ask for.

    `steer`: layers, `distinct`: contents among the requests of a batch; `capture`: layers.
    """

    options: dict[str, Any] = field(default_factory=dict)
    steer: str = ""
    distinct: int = 32
    capture: str = ""


ARMS = {
    "off": Arm(),
    "idle": Arm({"enable_steering": True, "capture_consumers": ["inline"]}),
    "steer 1 layer": Arm({"enable_steering": True}, steer="middle"),
    "steer 3 points x all layers": Arm({"enable_steering": True}, steer="all"),
    "steer all, 1 distinct": Arm(STEERING, steer="all", distinct=1),
    "steer all, 8 distinct": Arm(STEERING, steer="all", distinct=8),
    "steer all, 64 distinct": Arm(STEERING, steer="all", distinct=64),
    "steer all, 256 distinct": Arm(STEERING, steer="all", distinct=256),
    "idle, all families": Arm(
        {"enable_steering": True, "steering_families": [*FAMILIES]},
    ),
    "capture 1 layer": Arm(CAPTURE, capture="middle"),
    "capture all layers": Arm(CAPTURE, capture="all"),
}
DEFAULT_ARMS = (
    "off",
    "idle",
    "steer 3 points x all layers",
    "capture 1 layer",
    "capture all layers",
)


def request_fields(arm: Arm, hidden: int, layers: int, index: int) -> dict[str, Any]:
    import torch

    fields: dict[str, Any] = {}
    if arm.steer:
        seed = torch.Generator().manual_seed(index % arm.distinct)
        vector = torch.randn(hidden, generator=seed) * 0.1
        where = {"all": vector} if arm.steer == "all" else {layers // 2: vector}
        fields["steering_vectors"] = {point: where for point in POINTS}
    if arm.capture:
        hooks = {"post_block": "all" if arm.capture == "all" else layers // 2}
        fields["capture"] = {"inline": {"hooks": hooks, "positions": "all_generated"}}
    return fields


def serve(pipe: Any, arm: str, args: argparse.Namespace) -> None:
    """One arm's engine: answers (batch, tokens) with seconds until told to stop."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=256,
        kv_cache_memory_bytes=args.kv_bytes,
        gpu_memory_utilization=0.1,  # several engines share the GPU; the line above decides
        dtype=args.dtype,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **ARMS[arm].options,
    )
    config = llm.llm_engine.model_config
    hidden, layers = config.get_hidden_size(), config.hf_config.num_hidden_layers
    vocabulary = config.get_vocab_size()
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        batch, tokens = work
        generator = torch.Generator().manual_seed(batch)
        prompts = [
            {"prompt_token_ids": torch.randint(0, vocabulary, (32,), generator=generator).tolist()}
            for _ in range(batch)
        ]
        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                **request_fields(ARMS[arm], hidden, layers, i),
            )
            for i in range(batch)
        ]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        pipe.send(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=6 << 30)
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), choices=list(ARMS))
    parser.add_argument("--tokens", type=int, default=128, help="that the difference is over")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="no compilation, as on a CPU")
    parser.add_argument("--json")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    pipes = {}
    for arm in args.arms:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, arm, args), daemon=True).start()
        pipes[arm] = ours
    for pipe in pipes.values():
        pipe.recv()
    seen: dict[tuple[int, str], list[float]] = {}
    for batch in args.batch:
        for round_number in range(args.rounds + 1):
            for arm, pipe in pipes.items():
                times = []
                for tokens in (8, 8 + args.tokens):
                    pipe.send((batch, tokens))
                    times.append(pipe.recv())
                if round_number:  # the first round warms up
                    seen.setdefault((batch, arm), []).append(
                        (times[1] - times[0]) / args.tokens * 1e3
                    )
    for pipe in pipes.values():
        pipe.send(None)
    rows = []
    for (batch, arm), values in seen.items():
        median = statistics.median(values)
        ratio = median / statistics.median(seen[batch, args.arms[0]])
        spread = (max(values) - min(values)) / median
        rows.append(
            {"batch": batch, "arm": arm, "tpot_ms": median, "ratio": ratio, "spread": spread}
        )
        print(f"batch {batch:4} {arm:30} {median:8.3f} ms  {ratio:6.3f}  spread {spread:.1%}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
