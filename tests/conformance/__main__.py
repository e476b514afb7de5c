# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.conformance [NAME ...]`: every tiny model against transformers.

Prints a line an architecture and writes NAME.json and NAME.log under --out. Each runs in a process
of its own, forked from this one after the imports; exit status 1 when one is out of tolerance.
`python -m tests.conformance.report DIR ...` makes docs/models.md of the results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import ROOT
from tests.support.vision import add_torchvision

from .added import add, known
from .engine import Device, Runner, prepare_environment
from .proof import Result, load_results, prove
from .selection import V2_MODELS, sources_digest

if TYPE_CHECKING:
    from .tiny import TinyModel

_NAMES = (
    "tiny models; default: all, with V2 on a CPU those of the tests, on CUDA those that are "
    "verified nowhere yet"
)
BUILD = ROOT / "build"


def main() -> int:
    """Exit status 1 when a model is out of tolerance or raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=_NAMES)
    parser.add_argument("--runner", choices=("v1", "v2"), help="default: v1, on CUDA v2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="not eager")
    parser.add_argument(
        "--every-expert",
        action="store_true",
        help="for 16 bits: route to all experts, so that a near tie between two is no difference",
    )
    parser.add_argument("--backend", help="of attention, on a GPU; default: upstream's choice")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one model")
    parser.add_argument("--out", type=Path, default=BUILD / "conformance")
    parser.add_argument(
        "--added",
        action="store_true",
        help="measure the points within a branch alone, into a copy of each result that there is",
    )
    parser.add_argument("--resume", action="store_true", help="skip what --out has a result of")
    options = parser.parse_args()
    device: Device = options.device
    runner: Runner = options.runner or ("v1" if device == "cpu" else "v2")
    prepare_environment(runner, device)
    if device == "cpu":  # a GPU host has its own
        try:
            add_torchvision()
        except FileNotFoundError as error:
            print(f"models that read images will fail: {error}")
    from .models import MODELS, every_expert

    if unknown := sorted(set(options.names) - set(MODELS)):
        parser.error(f"no tiny model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    where = f"{device} {runner} {options.dtype}{' compiled' if options.compile else ''}"
    where += " every expert" if options.every_expert else ""
    where += f" {options.backend}" if options.backend else ""
    out: Path = options.out / where.replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    default = list(V2_MODELS) if runner == "v2" else list(MODELS)
    default = _unverified(list(MODELS)) if device == "cuda" else default
    rows = [
        MODELS[name]
        for name in options.names or default
        if not (options.resume and (out / f"{name}.json").exists())
    ]
    if options.every_expert:
        rows = [every_expert(row) for row in rows]
    settings: dict[str, Any] = {"dtype": options.dtype, "enforce_eager": not options.compile}
    if device == "cuda":  # the sizes of engine.py are those of CPU kernels
        # Several models share the GPU: what counts is `kv_cache_memory_bytes`.
        settings |= {
            "block_size": None,
            "attention_config": {"backend": options.backend},
            "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.05,
        }
    if options.compile and device == "cuda":  # recorded twice, and most sizes say nothing new
        settings["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256]}
    if options.added:
        rows = [row for row in rows if known(row.name, where) is not None]
    limits = options.jobs, options.timeout
    results = _run_all(rows, out, where, settings, *limits, added=options.added)
    return 1 if any(result.failures() for result in results) else 0


def _unverified(names: list[str]) -> list[str]:
    """Those that no measurement in the repository has within tolerance."""
    verified = {result.name for result in load_results() if not result.failures()}
    return [name for name in names if name not in verified]


def _run_all(
    rows: list[TinyModel],
    out: Path,
    where: str,
    settings: dict[str, Any],
    jobs: int,
    timeout: float,
    added: bool,
) -> list[Result]:
    import vllm.entrypoints.llm  # noqa: F401  the forked processes find it imported

    sources_digest()  # and this computed
    context = multiprocessing.get_context("fork")
    waiting, results = list(rows), list[Result]()
    running: dict[str, tuple[TinyModel, ForkProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            row = waiting.pop(0)
            process = context.Process(target=_child, args=(row, out, where, settings, added))
            process.start()
            running[row.name] = row, process, time.monotonic()
        time.sleep(0.2)
        for row, process, started in list(running.values()):
            seconds = time.monotonic() - started
            if process.is_alive() and seconds < timeout:
                continue
            late = process.is_alive()
            process.kill()
            process.join()
            del running[row.name]
            result = _collect(row, out, where, late, process.exitcode, seconds)
            results.append(result)
            print(result.line(), flush=True)
    return results


def _collect(
    row: TinyModel, out: Path, where: str, late: bool, exitcode: int | None, seconds: float
) -> Result:
    file = out / f"{row.name}.json"
    if late or not file.exists():
        problem = "timed out" if late else f"the process ended with status {exitcode}"
        result = Result(row.name, row.architecture, where, problem=problem, seconds=seconds)
        file.write_text(result.to_json())
    return Result.from_json(file.read_text())


def _child(row: TinyModel, out: Path, where: str, settings: dict[str, Any], added: bool) -> None:
    """In the forked process: measure, and write what came of it."""
    from vllm.model_executor.models import registry

    file = out / f"{row.name}.json"
    file.unlink(missing_ok=True)
    log = os.open(out / f"{row.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.setpgrp()
    # As `engine.start_cheaply`, on CUDA too: this process ends with the model.
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[assignment]
    started = time.monotonic()
    try:
        result = known(row.name, where) if added else None
        if result is not None:
            file.write_text(add(row, BUILD / "tiny-models", result, **settings).to_json() + "\n")
            os._exit(0)
        result = prove(row, BUILD / "tiny-models", **settings)
    except BaseException as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}".splitlines()
        result = Result(row.name, row.architecture, "", problem=" ".join(problem)[:600])
    seconds = round(time.monotonic() - started, 1)
    result = replace(result, where=where, seconds=seconds, sources=sources_digest())
    file.write_text(result.to_json() + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
