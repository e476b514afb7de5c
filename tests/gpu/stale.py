# SPDX-License-Identifier: Apache-2.0
"""Requests that are steered to NaN, and plain ones after and beside them, by attention backend.

    python -m tests.gpu.stale [--only NAME ...] [--jobs 2]

Of each backend: forty requests with vectors of 1.6e38 at every site fill a small KV cache, some
greedy and some sampled, then plain requests, whose prompts end at every place of a block, must get
the bits that they got before. Then plain requests run in one batch with steered ones.
Last, the whole cache is filled with NaN. Backends whose blocks are not cleared
(`vllm/v1/interventions/worker/attention/layers.py:reads_masked`) must still get those bits; in the
others, the twin, plain requests must differ. The vocabulary is no multiple of any kernel's block.
Prints one JSON object a check; exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.model import HIDDEN, LAYERS, save_model
from tests.gpu.processes import Processes, all_good
from vllm.config.points import STREAM_POINTS

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MODES: dict[str, dict[str, Any]] = {
    **{name.lower(): {"attention_config": {"backend": name}} for name in BACKENDS},
    **{
        f"{name.lower()}_eager": {"attention_config": {"backend": name}, "enforce_eager": True}
        for name in BACKENDS
    },
    "chunks": {"max_num_batched_tokens": 64},
    "ngram": {"speculative_config": NGRAM},
    "v1": {},
    "v1_ngram": {"speculative_config": NGRAM},
}
VOCAB = 2011
PLAIN = 32
CLOSE = 0.05
"""Most that the logprob of a plain request's first token may differ by between two batches."""


def run_mode(processes: Processes, name: str, model: Path) -> list[Any]:
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(not name.startswith("v1"))),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.gpu.stale", "--model", str(model), "--mode", name]
    return processes.checks(command, env, 300, "end")


def fill_cache(worker: Any) -> None:
    """Fill a worker's KV cache with NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(math.nan)


def check_mode(name: str, model: Path) -> None:
    """Run one mode in this process, and print its checks."""
    from vllm import LLM, SamplingParams

    def report(check: str, value: Any, ok: bool) -> None:
        print(json.dumps({"mode": name, "check": check, "value": value, "ok": ok}), flush=True)

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=512,
        num_gpu_blocks_override=200,
        gpu_memory_utilization=0.2,
        enable_steering=True,
        disable_log_stats=True,
        seed=0,
        **MODES[name],
    )
    huge = {p: {n: [1.6e38] * HIDDEN for n in range(LAYERS)} for p in STREAM_POINTS}
    greedy: dict[str, Any] = {"temperature": 0, "detokenize": False}
    sampled: dict[str, Any] = {
        "temperature": 1,
        "top_k": 7,
        "top_p": 0.9,
        "seed": 1,
        "detokenize": False,
    }

    def prompt(seed: int, salt: str) -> Any:
        tokens = [(seed * 7919 + i * 104729) % 2000 for i in range(17 + seed % 32)]
        return {"prompt_token_ids": tokens, "cache_salt": salt}

    def logprobs(outputs: list[Any]) -> list[list[float]]:
        return [
            [next(iter(row.values())).logprob for row in output.outputs[0].logprobs]
            for output in outputs
        ]

    asks = [prompt(i, f"plain {i}") for i in range(PLAIN)]
    params = SamplingParams(max_tokens=8, logprobs=0, **greedy)

    def plain() -> list[list[float]]:
        llm.reset_prefix_cache()
        return logprobs(llm.generate(asks, params, use_tqdm=False))

    def poisons(count: int) -> tuple[list[Any], list[Any]]:
        how = [
            SamplingParams(max_tokens=60, steering_vectors=huge, **(sampled if i % 2 else greedy))
            for i in range(count)
        ]
        return [prompt(100 + i, f"steered {i}") for i in range(count)], how

    def num_different(left: list[list[float]], right: list[list[float]]) -> int:
        return sum(a != b for a, b in zip(left, right, strict=True))

    right = plain()
    finite = all(math.isfinite(value) for row in right for value in row)
    report("plain requests are finite", finite, finite)
    repeated = num_different(plain(), right)
    report("the same batch has the same bits", repeated, repeated == 0)
    llm.generate(*poisons(40), use_tqdm=False)
    after = num_different(plain(), right)
    report("plain requests that differ after steered ones", after, after == 0)
    prompts, how = poisons(8)
    beside = llm.generate([*asks, *prompts], [params] * len(asks) + how, use_tqdm=False)
    found = logprobs(beside[: len(asks)])
    apart = max(abs(a[0] - b[0]) for a, b in zip(found, right, strict=True))
    finite = all(math.isfinite(value) for row in found for value in row)
    report("plain requests beside steered ones", [finite, apart], finite and apart <= CLOSE)
    llm.collective_rpc(fill_cache)
    differ = num_different(plain(), right)
    multiplies = llm.llm_engine.vllm_config.tap_shape.reads_masked
    report(f"a cache full of NaN, cleared: {multiplies}", differ, (differ > 0) == multiplies)
    report("end", True, True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--mode")
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    if args.mode:
        check_mode(args.mode, args.model)
        return
    processes = Processes()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), vocab=VOCAB)
        modes = [partial(run_mode, processes, name, Path(folder)) for name in args.only or MODES]
        good = all_good(processes, modes, args.jobs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
