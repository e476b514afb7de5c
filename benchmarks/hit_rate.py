# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hit rate of requests with a shared prefix, by what they capture.

    python -m benchmarks.hit_rate --model CONFIG_DIR [--requests 64] [--prefix 96] [--own 20]

A position that is captured must be computed, so capture of a prompt's start costs its cache hits,
and capture of generated positions or of the prompt's end costs none.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=96, help="shared tokens")
    parser.add_argument("--own", type=int, default=20, help="tokens of each prompt after them")
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.prefix + args.own + args.tokens,
        kv_cache_memory_bytes=1 << 28,
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        capture_consumers=["inline"],
    )
    counters = ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries")

    def counted() -> list[float]:
        values: dict[str, Any] = {m.name: m for m in llm.get_metrics()}
        return [values[name].value for name in counters]

    rng = random.Random(0)
    shared = [rng.randrange(1, 200) for _ in range(args.prefix)]
    prompts = [
        TokensPrompt(prompt_token_ids=shared + [rng.randrange(1, 200) for _ in range(args.own)])
        for _ in range(args.requests)
    ]
    captures: dict[str, Any] = {
        "no capture": None,
        "last_prompt": "last_prompt",
        "all_generated": "all_generated",
        "from the prefix on": {"start": args.prefix},
        "all_prompt": "all_prompt",
    }
    print(f"{args.requests} prompts of {args.prefix} shared and {args.own} own tokens")
    for name, positions in captures.items():
        assert llm.reset_prefix_cache()
        capture = {"inline": {"hooks": {"post_block": "all"}, "positions": positions}}
        params = SamplingParams(
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=False,
            capture=capture if positions is not None else None,
        )
        before = counted()
        # The first alone, so that its blocks are there for the others.
        outputs = llm.generate(prompts[:1], params, use_tqdm=False)
        outputs += llm.generate(prompts[1:], params, use_tqdm=False)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        total = sum(len(output.prompt_token_ids or ()) for output in outputs)
        hits, queries = (b - a for a, b in zip(before, counted(), strict=True))
        print(
            f"{name:20} {cached / total:6.1%} of the prompts' tokens cached; "
            f"prefix cache statistics: {hits / queries:6.1%}"
        )


if __name__ == "__main__":
    main()
