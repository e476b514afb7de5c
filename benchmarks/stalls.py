# SPDX-License-Identifier: Apache-2.0
"""Time of steps in which a graph with taps is first needed, for those who run meanwhile.

    python -m benchmarks.stalls --model CONFIG_DIR [--running 8] [--arrivals 1 2 4 8 16 32]

Some plain requests run. Beside them arrive as many more as `--arrivals` says, then as many that
steer, then as many that capture, until their steps have run; then all of it once more, when what
they need is there. A row has the longest step of each arrival, of a prompt's and of decoding; what
plain ones wait for is upstream's own. In this process, the engine's thread does all, so that a step
is what every running request waits for.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.one_start import arguments, device_used, engine_options
from benchmarks.results import Row, Run, add_arguments, publish, setup

TOKENS = 12
"""Of each that arrives; its steps are a few more, as outputs come a step later."""


class Arrivals:
    """The engine, and requests that arrive at it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from vllm import LLM

        llm = LLM(**engine_options(args), enable_steering=True, capture_consumers=["inline"])
        self._engine = llm.llm_engine
        config = self._engine.model_config
        middle = config.get_total_num_hidden_layers() // 2
        hooks = {"hooks": {"post_block": [middle]}, "positions": "all"}
        vector = torch.full([config.get_hidden_size()], 0.1)
        self.kinds: Mapping[str, dict[str, Any]] = {
            "plain": {},
            "steering": {"steering_vectors": {"post_block": {middle: vector}}},
            "capturing": {"capture": {"inline": hooks}},
        }
        self._added = 0

    def add(self, count: int, prompt: int, tokens: int, **fields: Any) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, detokenize=False, ignore_eos=True, **fields)
        for _ in range(count):
            self._added += 1
            ids = [(7 * self._added + place) % 100 + 1 for place in range(prompt)]
            self._engine.add_request(str(self._added), {"prompt_token_ids": ids}, params)

    def longest(self, steps: int) -> float:
        """Of so many steps, in ms."""
        taken = []
        for _ in range(steps):
            started = time.perf_counter()
            self._engine.step()
            taken.append(1e3 * (time.perf_counter() - started))
        return max(taken)


def measure(args: argparse.Namespace) -> list[Row]:
    arrivals, rows = Arrivals(args), list[Row]()
    steps = TOKENS + 4
    turns = 2 * len(arrivals.kinds) * len(args.arrivals)
    arrivals.add(args.running, 32, (turns + 3) * steps)
    alone = [arrivals.longest(steps) for _ in range(2)][1:]
    rows.append(Row("nobody arrives", "longest step", "ms", alone))
    for case in ("first", "again"):
        before, found = device_used(), dict[str, list[float]]()
        for count in args.arrivals:
            for kind, fields in arrivals.kinds.items():
                arrivals.add(count, 20 + count, TOKENS, **fields)
                found.setdefault(kind, []).append(arrivals.longest(steps))
        facts = {"device GiB more": device_used() - before}
        for kind, values in found.items():
            rows.append(Row(case, "longest step", "ms", values, {"arriving": kind}, facts))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    add_arguments(parser)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--arrivals", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    publish(Run("stalls", setup(args), measure(args), baselines=("again",)), args.json)


if __name__ == "__main__":
    main()
