# SPDX-License-Identifier: Apache-2.0
"""Python calls of our own code in one step of a whole engine, and their time under a profiler.

    python -m benchmarks.host_calls [--requests 256] [--tokens 64] [--top 0] [--json FILE]

An `LLM` of a small Llama with random weights decodes `--requests` requests in this process, with
steering and capture enabled. `cProfile` watches the steps in which all of them decode, and counts
calls of functions in our files, and what these call that is not ours:

    scheduler  all of `vllm/v1/interventions` and `vllm/v1/capture` that is none of the others
    worker     `vllm/v1/interventions/worker`, taps
    frontend   `vllm/v1/interventions/frontend`, results
    own time   of these calls; a profiler makes short ones about three times as long, and
               on a CPU the worker's are the copies of rows, too

Cases: `idle`, in which no request asks for anything; `captured`, one layer of every token;
`cumulative`, the same with the results of all tokens so far at each step; `mixed`, half captured
and half steered; `deltas`, idle with an output for each token.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.results import Row, Run, add_arguments, publish, setup

CASES = ("idle", "deltas", "captured", "cumulative", "mixed")
OURS = ("/vllm/v1/interventions/", "/vllm/v1/capture/", "/layers/row_capture", "/layers/steering")
HIDDEN = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="profiled steps")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--top", type=int, default=0, help="functions to print")
    add_arguments(parser)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        llm = _engine(folder, args.requests)
        rows = [row for case in args.cases for row in _rows(args, case, *_profile(llm, case, args))]
    publish(Run("host_calls", setup(args), rows), args.json)


def _engine(folder: str, requests: int) -> Any:
    import torch

    from vllm import LLM

    small: dict[str, Any] = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 28}
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=requests,
        enforce_eager=True,
        enable_steering=True,
        max_steering_configs=requests,
        capture_consumers=["inline"],
        **small,
    )


def _profile(llm: Any, case: str, args: argparse.Namespace) -> tuple[list[float], cProfile.Profile]:
    """Time steps in which all requests decode, then profile further ones."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    kinds = {"cumulative": RequestOutputKind.CUMULATIVE, "deltas": RequestOutputKind.DELTA}
    kind = kinds.get(case, RequestOutputKind.FINAL_ONLY)
    captures = {"inline": {"hooks": {"post_block": [1]}, "positions": "all_generated"}}
    engine = llm.llm_engine
    for i in range(args.requests):
        fields: dict[str, Any] = {}
        if case == "mixed" and i % 2:
            fields["steering_vectors"] = {"post_block": {1: [0.01 * i] * HIDDEN}}
        elif case not in ("idle", "deltas"):
            fields["capture"] = captures
        params = SamplingParams(
            max_tokens=2 * args.tokens + 16,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=kind,
            **fields,
        )
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=[i % 200 + 1] * 4), params)
    for _ in range(8):
        engine.step()
    gc.collect()
    gc.disable()
    seconds = []
    for _ in range(args.tokens):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(args.tokens):
        engine.step()
    profile.disable()
    gc.enable()
    while engine.has_unfinished_requests():
        engine.step()
    return seconds, profile


def _rows(
    args: argparse.Namespace, case: str, seconds_of: list[float], profile: cProfile.Profile
) -> list[Row]:
    stats = pstats.Stats(profile)
    functions, calls, seconds = Counter[str](), Counter[str](), Counter[str]()
    found = []
    for function, (_, times, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if part := _part(function[0]):
            functions[part] += times
            calls[part] += times
            seconds[part] += own
            found.append((own, times, part, function))
            continue
        for caller, (count, _, spent, _) in callers.items():
            if part := _part(caller[0]):
                calls[part] += count
                seconds[part] += spent
                found.append((spent, count, part, (function[2], *caller)))
    for own, times, part, name in sorted(found, reverse=True)[: args.top]:
        per_step = times / args.tokens, 1e3 * own / args.tokens
        print(f"{case:10} {part:9} {per_step[0]:8.1f} {per_step[1]:8.4f} ms {name}")
    facts = {"requests": args.requests}
    quantities = (
        ("our functions", "", functions, 1),
        ("calls", "", calls, 1),
        ("own time", "ms", seconds, 1e3),
    )
    steps = Row(f"{case}, whole step", "wall time", "ms", [1e3 * s for s in seconds_of], facts)
    return [steps] + [
        Row(f"{case}, {part}", name, unit, [factor * values[part] / args.tokens], facts)
        for part in ("scheduler", "worker", "frontend")
        for name, unit, values, factor in quantities
    ]


def _part(file: str) -> str | None:
    if not any(part in file for part in OURS):
        return None
    if "/frontend/" in file or file.endswith("/capture/results.py"):
        return "frontend"
    return "worker" if "/worker/" in file or "/layers/" in file else "scheduler"


if __name__ == "__main__":
    main()
