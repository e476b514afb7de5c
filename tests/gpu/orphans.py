# SPDX-License-Identifier: Apache-2.0
"""What is left on a GPU when a frontend is killed: nothing, within ten seconds.

    python -m tests.gpu.orphans [--tp 2]

Starts an engine in processes of its own and kills its frontend: once it stands (SIGKILL), and at
some seconds of its start (SIGTERM). Then its core and workers have to end, and the GPU's memory to
be free again. Prints one JSON object a case; exit status 1 if one fails, or if a frontend that
lives on loses its engine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.gpu.model import save_model

SECONDS = 10.0
"""How long a core and its workers may outlive their frontend."""
PATIENCE = 60.0
STANDS = "the engine stands"
LOADING = (2.0, 8.0, 16.0)
"""Seconds after the core was started, when it loads, compiles, and records graphs."""
SLACK = 64 << 20
"""Bytes of a GPU that its driver may keep."""


def wait_to_be_killed(model: str, tp: int) -> None:
    """Start an engine that steers and captures, say when it stands, and wait."""
    from vllm import LLM

    llm = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=tp,
        enable_steering=True,
        capture_consumers=["inline"],
    )
    print(STANDS, flush=True)
    time.sleep(600)
    del llm


def used_bytes() -> int:
    """Bytes in use on all GPUs, whosever they are."""
    found = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        found += total - free
    return found


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def cores(frontend: int) -> list[psutil.Process]:
    """The engine core and its workers; not what upstream asks for a model's traits before them."""
    found = []
    for process in psutil.Process(frontend).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "registry" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(model: str, tp: int, loading: float | None) -> dict[str, object]:
    """Kill a frontend once its engine stands, or after some seconds, and see what is left.

    Returns:
        Seconds until its processes were gone and until the memory was free, and if that is right.
    """
    before = used_bytes()
    code = f"import tests.gpu.orphans as t; t.wait_to_be_killed({model!r}, {tp})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        if loading is None:
            stood = any(line.strip() == STANDS for line in own.stdout)
            time.sleep(3)  # the twin: while its frontend lives the engine does
        else:
            while not (stood := bool(cores(own.pid))) and own.poll() is None:
                time.sleep(0.05)
            time.sleep(loading)
        orphans = cores(own.pid)
        held = used_bytes() - before
        stood = stood and own.poll() is None and len(alive(orphans)) == len(orphans)
        own.send_signal(signal.SIGKILL if loading is None else signal.SIGTERM)
        told = time.monotonic()
        while alive(orphans) and time.monotonic() - told < PATIENCE:
            time.sleep(0.05)
        gone = time.monotonic() - told
        while (left := used_bytes() - before) > SLACK and time.monotonic() - told < PATIENCE:
            time.sleep(0.05)
        freed = time.monotonic() - told
        for process in alive(orphans):
            process.kill()
    return {
        "killed": "once it stands" if loading is None else f"{loading:g} s after its core",
        "processes": len(orphans),
        "held, MiB": held >> 20,
        "gone after, s": round(gone, 2),
        "freed after, s": round(freed, 2),
        "left, MiB": left >> 20,
        "ok": stood and gone <= SECONDS and freed <= SECONDS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model")
        for loading in (*LOADING, None):
            found = kill(str(Path(folder) / "model"), args.tp, loading)
            failed += not found["ok"]
            print(json.dumps(found), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
