# SPDX-License-Identifier: Apache-2.0
"""Requests that are changed while they run: what a change costs, and when it acts.

    python -m benchmarks.changes --model CONFIG_DIR [--batch 32] [--tokens 256] [--json FILE]

One request of eight gets another module, of all points of all layers, each `--every` tokens; the
others are steered by one module throughout. Rounds take turns with the same batch that nobody
changes. "to act" is the time from the call to the output whose token is the first that the change
acts on. The time per token has the prompt in it; it is of the requests that nobody changes, and of
those that are changed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.engines import add_arguments, common_options, model_shape
from benchmarks.results import Row, Run

NAMES = [f"module{i}" for i in range(8)]
"""Modules; the first is that of requests that nobody changes."""
EVERY = 8
"""Of so many requests one is changed."""


def start(args: argparse.Namespace) -> Any:
    """An engine with its modules."""
    from vllm import LLM

    options = common_options(args) | {"load_format": "dummy", "enable_prefix_caching": True}
    steering = {"enable_steering": True, "max_steering_configs": 32 * args.batch}
    llm = LLM(str(args.model), **options, **steering, max_model_len=args.prompt + args.tokens)
    random = np.random.default_rng(0)
    for name in NAMES:
        vectors = {
            point: {
                layer: random.standard_normal(llm.llm_engine.model_config.get_hidden_size()) * 1e-3
                for layer, points in llm.steering.layers().items()
                if point in points
            }
            for point in ("pre_attn", "post_attn", "post_block")
        }
        llm.steering.register_module(name, {"vectors": vectors})
    return llm


def measure(llm: Any, args: argparse.Namespace, changes: bool) -> tuple[float, float, list[float]]:
    """Answer a batch; milliseconds a token of those that nobody changes and of the others, and the
    milliseconds that each change took to act."""
    from vllm import SamplingParams

    engine, random = llm.llm_engine, np.random.default_rng(1)
    params = SamplingParams(
        max_tokens=args.tokens, ignore_eos=True, temperature=0.0, steering_modules=NAMES[:1]
    )
    for i in range(args.batch):
        prompt = random.integers(0, 100, args.prompt).tolist()
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    begun = time.perf_counter()
    ended: dict[str, float] = {}
    waiting: dict[str, tuple[float, Future[dict[int, int]]]] = {}
    took: list[float] = []
    while engine.has_unfinished_requests():
        outputs: Sequence[Any] = engine.step()
        now = time.perf_counter()
        for output in outputs:
            name, count = output.request_id, len(output.outputs[0].token_ids)
            if output.finished:
                ended[name] = now
            if name in waiting and waiting[name][1].done():
                # This output is the one that it was sent again with, or a later one.
                position = waiting[name][1].result()[0]
                if args.prompt + count - 1 > position:
                    took.append((now - waiting.pop(name)[0]) * 1e3)
            changed = changes and int(name) % EVERY == 0 and count + 2 < args.tokens
            if changed and count % args.every == args.every - 1 and name not in waiting:
                module = NAMES[1 + count // args.every % (len(NAMES) - 1)]
                future = llm.steering.change(name, {"steering_modules": [module]})
                waiting[name] = now, future
    apart: tuple[list[float], list[float]] = [], []
    for name, end in ended.items():
        apart[int(name) % EVERY == 0].append((end - begun) * 1e3 / args.tokens)
    others, own = (statistics.mean(each) for each in apart)
    return others, own, took


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, kv_bytes=6 << 30)
    results.add_arguments(parser)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="that each request generates")
    parser.add_argument("--every", type=int, default=32, help="tokens between two changes")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = start(args)
    others: dict[bool, list[float]] = {False: [], True: []}
    own: dict[bool, list[float]] = {False: [], True: []}
    took: list[float] = []
    for number in range(-1, args.rounds):  # the first is a warm-up
        for changes in (False, True) if number % 2 else (True, False):
            found = measure(llm, args, changes)
            if number >= 0:
                others[changes].append(found[0])
                own[changes].append(found[1])
                took += found[2]
    at = {"batch": args.batch, "prompt": args.prompt}
    unchanged, changed = "nobody is changed", f"one of {EVERY}, each {args.every} tokens"
    rows = [
        Row(unchanged, "time per token, the others", "ms", others[False], at),
        Row(changed, "time per token, the others", "ms", others[True], at, beside=(unchanged,)),
        Row(unchanged, "time per token, those changed", "ms", own[False], at),
        Row(changed, "time per token, those changed", "ms", own[True], at, beside=(unchanged,)),
        Row(changed, "to act", "ms", took, at),
    ]
    setup = results.setup(args, model=model_shape(args.model))
    results.publish(Run("changes", setup, rows, baselines=()), args.json)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
