# SPDX-License-Identifier: Apache-2.0
"""Time per output token: nothing enabled, idle, steered, captured. One process an arm.

    python -m benchmarks.tpot --model CONFIG_DIR [--batch 1 32 256] [--rounds 5] [--json FILE]

Dummy weights, random prompts. TPOT = (t(136 tokens) - t(8 tokens)) / 128. "off" is this build with
nothing enabled; ratios are against it, of medians, the spread is (max - min) / median of an arm's
rounds. An engine a process stays loaded, and rounds go around the arms, so that drift of the
machine hits all alike; needs memory for all of them at once (--kv-bytes each).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import time
from typing import Any

POINTS = ("pre_attn", "post_attn", "post_block")
ARMS: dict[str, dict[str, Any]] = {
    "off": {},
    "idle": {"enable_steering": True, "capture_consumers": ["inline"]},
    "steer 3 points x all layers": {"enable_steering": True},
    "capture 1 layer": {"capture_consumers": ["inline"]},
    "capture all layers": {"capture_consumers": ["inline"], "capture_inline_max_bytes": 1 << 34},
}


def request_fields(arm: str, hidden: int, layers: int, index: int) -> dict[str, Any]:
    import torch

    if arm.startswith("steer"):
        vector = torch.randn(hidden, generator=torch.Generator().manual_seed(index % 32)) * 0.1
        return {"steering_vectors": {point: {"all": vector} for point in POINTS}}
    if arm.startswith("capture"):
        which: Any = layers // 2 if "1 layer" in arm else "all"
        hooks = {"post_block": which}
        return {"capture": {"inline": {"hooks": hooks, "positions": "all_generated"}}}
    return {}


def serve(pipe: Any, arm: str, model: str, kv_bytes: int) -> None:
    """One arm's engine: answers (batch, tokens) with seconds until told to stop."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=256,
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=0.1,  # several engines share the GPU; the line above decides
        enable_prefix_caching=False,
        disable_log_stats=True,
        **ARMS[arm],
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
                **request_fields(arm, hidden, layers, i),
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
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--json")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    pipes = {}
    for arm in args.arms:
        ours, theirs = context.Pipe()
        context.Process(
            target=serve, args=(theirs, arm, args.model, args.kv_bytes), daemon=True
        ).start()
        pipes[arm] = ours
    for pipe in pipes.values():
        pipe.recv()
    seen: dict[tuple[int, str], list[float]] = {}
    for batch in args.batch:
        for round_number in range(args.rounds + 1):
            for arm, pipe in pipes.items():
                times = []
                for tokens in (8, 136):
                    pipe.send((batch, tokens))
                    times.append(pipe.recv())
                if round_number:  # the first round warms up
                    seen.setdefault((batch, arm), []).append((times[1] - times[0]) / 128 * 1e3)
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
