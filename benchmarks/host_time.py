# SPDX-License-Identifier: Apache-2.0
"""Host time a step of `apply_updates` and `map_rows`, 256 requests running with a content each.

    python -m benchmarks.host_time --model CONFIG_DIR [--requests 256] [--tokens 64]

On a CPU the device's work counts, too: what is measured is an upper bound of the host's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any


def timed(target: Any, name: str, seconds: list[float]) -> None:
    """Have `target.name` note how long each of its calls takes."""
    method: Callable[..., Any] = getattr(target, name)

    def wrapper(*args: Any) -> Any:
        started = time.perf_counter()
        result = method(*args)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(target, name, wrapper)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=args.requests,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        disable_log_stats=True,
        enable_steering=True,
        max_steering_configs=args.requests,
    )
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    interventions = core.model_executor.driver_worker.worker.model_runner.interventions
    seconds: dict[str, list[float]] = {"apply_updates": [], "map_rows": []}
    for name, values in seconds.items():
        timed(interventions, name, values)
    hidden = llm.llm_engine.model_config.get_hidden_size()
    params = [
        SamplingParams(
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=False,
            steering_vectors={
                p: {"all": torch.randn(hidden) * 0.1} for p in ("pre_attn", "post_block")
            },
        )
        for _ in range(args.requests)
    ]
    prompts = [TokensPrompt(prompt_token_ids=[i % 200 + 1] * 16) for i in range(args.requests)]
    llm.generate(prompts, params, use_tqdm=False)
    print(f"{args.requests} requests, {len(interventions.sites)} sites, hidden size {hidden}")
    for name, values in seconds.items():
        # The last steps: all requests decode. The first ones take in their contents.
        steady = [1e6 * value for value in values[-args.tokens // 2 :]]
        first = [1e6 * value for value in values[: -args.tokens // 2]]
        print(
            f"{name:14} decoding: median {statistics.median(steady):7.1f} us, "
            f"worst {max(steady):7.1f} us; before: median {statistics.median(first):9.1f} us, "
            f"worst {max(first):9.1f} us"
        )


if __name__ == "__main__":
    main()
