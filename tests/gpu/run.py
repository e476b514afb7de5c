# SPDX-License-Identifier: Apache-2.0
"""Steering and capture in every graph mode of a GPU host: a table, exit status 1 on any failure.

    python -m tests.gpu.run [--tp 2] [--pp 2] [--ray] [--only NAME ...] [--jobs 3]

With `--ray` each mode starts a Ray of its own, whose two workers are the executor's.
Needs the fork on sys.path (CONTRIBUTING.md). One process a mode, `--jobs` at a time: correctness
does not mind sharing the GPU. A mode that takes too long, and all modes when this is ended by
SIGTERM or Ctrl-C, are killed with their workers, which would hold memory of the GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu import steering
from tests.gpu.drafts import save_eagle
from tests.gpu.model import save_model
from tests.gpu.processes import Processes, all_good
from vllm.config.points import CAPTURE_POINTS, STEERING_POINTS, STREAM_POINTS

HEADS: dict[str, Any] = {
    "capture_points": list(CAPTURE_POINTS),
    "steering_points": list(STEERING_POINTS),
    "steering_families": ["add", "scale"],
    "compat": ["lens"],
}

FOCUS: dict[str, Any] = {
    "capture_points": ["q", "z", *STREAM_POINTS],
    "steering_families": ["add", "focus"],
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "capture_buffer_bytes": 256 << 20,
}

RAY = ["full_and_piecewise", "eager", "heads"]
"""What is run under Ray unless `--only` says otherwise: it is the executor that is another."""

FLEX: dict[str, Any] = {"attention_config": {"backend": "FLEX_ATTENTION"}}
"""Another computation of the same, whose pages lie otherwise: a second opinion."""

LENS: dict[str, Any] = {"capture_lens": ["logit"], "capture_lens_rows": 256}

PARTS: dict[str, Any] = {"capture_buffer_bytes": 32 << 20}
"""The rows of large steps are many, and leave in parts, more than graphs have tokens."""

MODES: dict[str, dict[str, Any]] = {
    "full_and_piecewise": {},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full_decode_only": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
    "sync_chunked": {
        "async_scheduling": False,
        "max_num_batched_tokens": 64,
        "capture_buffer_bytes": 8 * 3 * 512 * 2 * 40,
    },
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
    "eagle": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
    "draft_model": {
        "speculative_config": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "max_model_len": 256,
        }
    },
    "preempt": {"kv_cache_memory_bytes": 6 << 20},
    "parts": PARTS,
    "parts_eager": {**PARTS, "enforce_eager": True},
    "ops": {"steering_families": steering.FAMILIES},
    "ops_eager": {"steering_families": steering.FAMILIES, "enforce_eager": True},
    "heads": HEADS,
    "heads_piecewise": {**HEADS, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "heads_eager": {**HEADS, "enforce_eager": True},
    "heads_flex": {**HEADS, **FLEX},
    "heads_flex_eager": {**HEADS, **FLEX, "enforce_eager": True},
    "lens": LENS,
    "lens_piecewise": {**LENS, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "lens_eager": {**LENS, "enforce_eager": True},
    "focus": FOCUS,
    "focus_piecewise": {**FOCUS, "compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "focus_eager": {**FOCUS, "enforce_eager": True},
    "focus_triton": {**FOCUS, "attention_config": {"backend": "TRITON_ATTN"}},
    "focus_flex": {**FOCUS, **FLEX},
    "focus_flex_eager": {**FOCUS, **FLEX, "enforce_eager": True},
    "v1": {},
    "v1_heads": HEADS,
    "v1_focus": FOCUS,
    "v1_lens": LENS,
}


DRAFTS = {"eagle": "eagle", "draft_model": "model"}
"""Which of the folders made here the mode drafts with; the target itself is nearly always right."""


def run_mode(
    processes: Processes, name: str, options: dict[str, Any], model: Path, timeout: float
) -> list[Any]:
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(not name.startswith("v1"))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Of Ray: a token file that several would write, and workers ended where a host's memory
        # looks full because it grows with use.
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "tests.gpu.mode", "--name", name, "--model", str(model)]
    started = time.monotonic()
    output, errors = processes.run([*command, "--engine", json.dumps(options)], env, timeout)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"mode"')]
    if not any(row["check"] in ("zero sum", "ops", "preemption", "focus") for row in rows):
        rows.append({"mode": name, "check": "start", "ok": False, "log": errors[-3000:]})
    rows.append({"mode": name, "check": "seconds", "value": time.monotonic() - started, "ok": True})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=400)
    args = parser.parse_args()
    processes = Processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model)
        save_eagle(model, Path(folder) / "eagle")
        modes = []
        split: dict[str, Any] = {
            "tensor_parallel_size": args.tp,
            "pipeline_parallel_size": args.pp,
        }
        if args.ray:
            split["distributed_executor_backend"] = "ray"
        for name in args.only or (RAY if args.ray else MODES):
            options = {**copy.deepcopy(MODES[name]), **split}
            if name in DRAFTS:
                options["speculative_config"]["model"] = str(Path(folder) / DRAFTS[name])
            modes.append(partial(run_mode, processes, name, options, model, args.timeout))
        good = all_good(processes, modes, args.jobs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
