# SPDX-License-Identifier: Apache-2.0
"""What a request costs the scheduler when thousands wait: for slots, for consumers, or for a turn.

    python -m benchmarks.waiting --model CONFIG_DIR [--waiting 200 2000 20000] [--profile]

All requests are there before the first step, each with a vector of its own, or each capturing for a
consumer that has room for forty. In the plain rows they wait because `--running` run at most.
Processor time of the thread that schedules; `vllm serve` has one engine core with one such thread.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from typing import Any, ClassVar

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    Location,
    RequestEnd,
    RequestInfo,
    RowBatch,
)

KINDS = ("plain", "slots", "consumer")
ROOM = 40
"""Requests at once, for slots and in the consumer's memory."""
PROMPT = 16


class Discard(CaptureConsumer):
    """Takes rows and forgets them."""

    location: ClassVar[Location] = "engine"

    def open(self, request: RequestInfo) -> CaptureSession:
        return Discarded()


class Discarded(CaptureSession):
    def rows(self, batch: RowBatch) -> None:
        pass

    def done(self, end: RequestEnd) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--waiting", type=int, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--profile", action="store_true", help="print where all time goes")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    columns = ("kind", "waiting", "steps", "add us", "schedule us", "update us", "requests/s")
    print("".join(f"{column:>13}" for column in columns))
    for kind in args.kinds:
        llm = engine(args.model, args.running)
        measure(llm, kind, 100)  # a warm-up
        for waiting in args.waiting:
            profile = cProfile.Profile()
            if args.profile:
                profile.enable()
            steps, add, schedule, update, rate = measure(llm, kind, waiting)
            profile.disable()
            print(f"{kind:>13}{waiting:>13}{steps:>13}{add:>13.0f}{schedule:>13.0f}", end="")
            print(f"{update:>13.0f}{rate:>13.0f}", flush=True)
            if args.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        llm.llm_engine.engine_core.shutdown()


def engine(model: str, running: int) -> Any:
    """An engine in this process."""
    from vllm import LLM
    from vllm.transformers_utils.config import get_config

    request_bytes = 4 * PROMPT * get_config(model, trust_remote_code=False).hidden_size
    consumer = {
        "consumer": Discard,
        "instance_name": "discard",
        "pending_bytes": ROOM * request_bytes,
        "max_request_bytes": request_bytes,
    }
    return LLM(
        model=model,
        seed=0,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=running,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        disable_log_stats=True,
        enable_prefix_caching=False,
        enable_steering=True,
        max_steering_configs=ROOM,
        capture_consumers=[consumer],
    )


def measure(llm: Any, kind: str, waiting: int) -> tuple[int, float, float, float, float]:
    """Steps, then microseconds of processor time a request: to add it, to schedule it, and to take
    its results; then requests a second of the whole run."""
    import torch

    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    hidden = llm.llm_engine.model_config.get_hidden_size()
    fields: list[dict[str, Any]] = [{}] * waiting
    if kind == "slots":
        vectors = torch.randn(waiting, hidden)
        fields = [{"steering_vectors": {"post_block": {0: vector}}} for vector in vectors]
    elif kind == "consumer":
        capture = {"discard": {"hooks": {"post_block": [0]}, "positions": "all_prompt"}}
        fields = [{"capture": capture}] * waiting
    params = [SamplingParams(max_tokens=1, detokenize=False, **field) for field in fields]
    seconds = {"add_request": 0.0, "schedule": 0.0, "update_from_output": 0.0}
    calls = dict.fromkeys(seconds, 0)

    def timed(name: str) -> None:
        method = getattr(scheduler, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = method(*args, **kwargs)
            seconds[name] += time.thread_time() - started
            calls[name] += 1
            return result

        setattr(scheduler, name, wrapper)

    for name in seconds:
        timed(name)
    started = time.perf_counter()
    for i, param in enumerate(params):
        prompt = {"prompt_token_ids": [i % 200 + 1] * PROMPT}
        llm.llm_engine.add_request(f"{kind} {waiting} {i}", prompt, param)
    ended = 0
    while llm.llm_engine.has_unfinished_requests():
        ended += sum(output.finished for output in llm.llm_engine.step())
    rate = waiting / (time.perf_counter() - started)
    for name in seconds:
        delattr(scheduler, name)
    assert ended == waiting
    add, schedule, update = (1e6 * total / waiting for total in seconds.values())
    return calls["schedule"], add, schedule, update, rate


if __name__ == "__main__":
    main()
