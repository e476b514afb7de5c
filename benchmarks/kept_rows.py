# SPDX-License-Identifier: Apache-2.0
"""Questions about a document whose blocks are cached: rows that are kept, and rows that are not.

    python -m benchmarks.kept_rows --model CONFIG_DIR [--document 8192] [--json FILE]

--requests documents of random tokens get a question, and then three further ones; all documents at
once, each time. Rows of --document and question are captured at every position, of the middle
layer or of all. "computed" has no `capture_keep_bytes`, "kept" has, and "no capture" asks for no
rows: then only the questions are computed. A time ends when `LLM.generate` has returned all
results, whose rows are where they landed. Each engine has its core in a process of its own, one
after the other on one GPU.

On a CPU, in half a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.kept_rows --model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --requests
1 --document 64 --question 10 --keep-bytes 16777216 --landing-bytes 16777216
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.engines import add_arguments, common_options, model_shape
from benchmarks.results import Row, Run

LAYERS = ("middle", "all")
FURTHER = 3
"""Questions after the first one."""


def start(args: argparse.Namespace, keep: int) -> Any:
    """An engine with a prefix cache; `keep` is its `capture_keep_bytes`."""
    from vllm import LLM

    options = common_options(args) | {"load_format": "dummy", "enable_prefix_caching": True}
    length = args.document + args.question + 1
    return LLM(
        str(args.model),
        **options,
        capture_consumers=["inline"],
        capture_points=["post_block"],
        capture_inline_max_bytes=1 << 40,
        capture_landing_bytes=args.landing_bytes,
        capture_keep_bytes=keep,
        max_model_len=length,
        max_num_batched_tokens=max(args.step_tokens, length) if args.eager else args.step_tokens,
    )


def measure(llm: Any, args: argparse.Namespace, layers: str, seed: int) -> Iterator[float]:
    """Milliseconds of the first question about new documents, and of each further one."""
    from vllm import SamplingParams

    capture = None
    if layers:
        asked = llm.llm_engine.model_config.get_total_num_hidden_layers() // 2
        hooks = {"post_block": "all" if layers == "all" else [asked]}
        capture = {"inline": {"hooks": hooks, "positions": "all_prompt"}}
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, capture=capture)
    random = np.random.default_rng(seed)
    documents = random.integers(0, 100, (args.requests, args.document)).tolist()
    for _ in range(1 + FURTHER):
        prompts: Any = [
            {"prompt_token_ids": each + random.integers(0, 100, args.question).tolist()}
            for each in documents
        ]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = (time.perf_counter() - begun) * 1e3
        for output in outputs if layers else ():
            for rows in output.outputs[0].capture_results["inline"].payload.values():
                assert len(rows) == args.document + args.question
        yield took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=8 << 30)
    results.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=4, help="documents, asked at once")
    parser.add_argument("--document", type=int, default=8192, help="tokens of each")
    parser.add_argument("--question", type=int, default=64, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    parser.add_argument("--keep-bytes", type=int, default=24 << 30)
    parser.add_argument("--landing-bytes", type=int, default=24 << 30)
    args = parser.parse_args()
    rows = []
    for case, keep in (("computed", 0), ("kept", args.keep_bytes)):
        llm = start(args, keep)
        for layers in ("", *LAYERS) if case == "computed" else LAYERS:
            first: list[float] = []
            further: list[float] = []
            for number in range(-1, args.rounds):  # the first is a warm-up
                times = list(measure(llm, args, layers, 100 + number))
                llm.reset_prefix_cache()
                if number >= 0:
                    first.append(times[0])
                    further.append(float(np.median(times[1:])))
            name = case if layers else "no capture"
            beside = () if case == "computed" else ("computed",)
            for layer in [layers] if layers else LAYERS:
                at = {"layers": layer, "documents": args.requests, "tokens": args.document}
                rows.append(Row(name, "first question", "ms", first, at, beside=beside))
                rows.append(Row(name, "further question", "ms", further, at, beside=beside))
        llm.llm_engine.engine_core.shutdown()
        del llm
    setup = results.setup(args, model=model_shape(args.model))
    results.publish(Run("kept_rows", setup, rows, baselines=("no capture",)), args.json)


if __name__ == "__main__":
    main()
