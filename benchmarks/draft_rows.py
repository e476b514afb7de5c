# SPDX-License-Identifier: Apache-2.0
"""Rows a second for trainers of draft models: ours beside upstream's `extract_hidden_states`.

    python -m benchmarks.draft_rows --model CONFIG_DIR [--files /dev/shm] [--json FILE]

--requests prompts of --prompt random tokens are sent at once to an `LLM`, and both arms answer in
the same way: `kv_transfer_params["hidden_states_path"]` names a file with the rows of --ids, layer
ids as upstream counts them (N is what the N-th block gives), by default those of an EAGLE-3 draft.
"files" ends when all files are whole, "loaded" when eight threads have read them with upstream's
`load_hidden_states`. Each arm is an engine alone on the GPU, in a process of its own with its core
in another. Upstream's files are not synced and ours are, so --files names a folder in memory.

Weights are random, so that a folder with config.json is a model. Upstream's arm needs a GPU. On a
CPU, in half a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.draft_rows --model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --requests
4 --prompt 100 --step-tokens 256 --cases ours --files /tmp
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.engines import ROOT, add_arguments, common_options, model_shape, run_name
from benchmarks.peers.extract_hidden_states import READERS, options
from benchmarks.peers.pilot import ROOM, WRITERS
from benchmarks.results import Row, Run

CASES = ("upstream", "ours")
KEY = "hidden_states_path"


def draft_ids(layers: int) -> list[int]:
    """The layer ids that an EAGLE-3 draft reads, and the last, which its target's head reads."""
    return sorted({max(1, n) for n in (2, layers // 2, layers - 3, layers)})


def options_of(case: str, ids: list[int], files: Path, room: int) -> dict[str, Any]:
    """The engine options of an arm.

    Args:
        room: bytes of the rows of one step.
    """
    if case == "upstream":
        return options([n - 1 for n in ids], files)
    asked = {"hooks": {"post_block": [n - 1 for n in ids]}, "positions": "all_prompt"}
    consumer = {
        "name": "filesystem", "root": str(files), "layout": "ehs", KEY: True, "capture": asked,
        "threads": WRITERS, "pending_bytes": ROOM,
    }  # fmt: skip
    return {
        "capture_consumers": [consumer],
        "capture_points": ["post_block"],
        "capture_buffer_bytes": room,
    }


class Arm:
    """The engine of one arm, and its rounds."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # else upstream's last files never come
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from benchmarks.random_weights import register
        from vllm import LLM, SamplingParams

        register()
        self._args, shape = args, model_shape(args.model)
        self._files = Path(tempfile.mkdtemp(dir=args.files, prefix="draft-rows-"))
        row = shape["hidden_size"] * (4 if args.dtype == "float32" else 2)
        more = options_of(
            args.cases[0], args.ids, self._files, args.step_tokens * row * len(args.ids)
        )
        if not args.eager:
            more["compilation_config"] = {"cudagraph_capture_sizes": [1]}
        self._llm = LLM(
            model=str(args.model.resolve()),
            max_model_len=args.prompt + 2,
            max_num_seqs=args.requests,
            max_num_batched_tokens=args.step_tokens,
            worker_extension_cls="benchmarks.engine_worker.EngineWorker",
            **{**common_options(args), **more},
        )
        draw = random.Random(0)
        self._prompts: list[Any] = [
            {"prompt_token_ids": [draw.randrange(shape["vocab_size"]) for _ in range(args.prompt)]}
            for _ in range(args.requests)
        ]
        self._params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        self._readers = ThreadPoolExecutor(READERS)

    def close(self) -> None:
        """Remove the files, and end the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self._files)

    def round(self) -> tuple[float, float]:
        """The seconds until all files were whole, and until they were read."""
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            cleanup_hidden_states,
            load_hidden_states,
        )

        begun = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        paths = [(output.kv_transfer_params or {})[KEY] for output in outputs]
        for path in paths:
            with open(path + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        written = time.perf_counter() - begun
        found = list(self._readers.map(load_hidden_states, paths))
        loaded = time.perf_counter() - begun
        wanted = (self._args.prompt, len(self._args.ids))
        for states in (one["hidden_states"] for one in found):
            if states.shape[:2] != wanted or not states.any():
                raise SystemExit(f"hidden states {tuple(states.shape)}, not {wanted} of numbers")
        for path in paths:
            cleanup_hidden_states(path)
        return written, loaded


def measured(case: str, arguments: list[str]) -> list[tuple[float, float]]:
    """The seconds of each round of an arm, made in a process of its own."""
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-m", "benchmarks.draft_rows", *arguments]
        subprocess.run([*command, "--cases", case, "--arm", out.name], cwd=ROOT, check=True)
        found: list[tuple[float, float]] = json.loads(Path(out.name).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=16 << 30)
    results.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    parser.add_argument("--ids", type=int, nargs="+", help="layer ids, from 1")
    parser.add_argument("--files", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--arm", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = model_shape(args.model)
    if args.ids is None:
        args.ids = draft_ids(model["num_hidden_layers"])
    if args.arm is not None:
        arm = Arm(args)
        args.arm.write_text(json.dumps([arm.round() for _ in range(args.rounds + 1)][1:]))
        arm.close()
        return
    setup = results.setup(args, model=model)
    at = {"requests": args.requests, "prompt": args.prompt, "layers": len(args.ids)}
    count = args.requests * args.prompt * len(args.ids)
    rows = []
    for case in args.cases:
        seconds = measured(case, sys.argv[1:])
        for kind, name in enumerate(("files", "loaded")):
            rates = [count / each[kind] for each in seconds]
            rows.append(Row(case, name, "rows/s", rates, at))
    results.publish(
        Run(run_name("draft-rows", args), setup, rows, baselines=("upstream",), paired=False),
        args.json,
    )


if __name__ == "__main__":
    main()
