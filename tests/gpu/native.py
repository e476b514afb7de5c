# SPDX-License-Identifier: Apache-2.0
"""The CUDA build of csrc/ on a GPU: builds it here, then bit for bit what torch's ops give, eagerly
and in a CUDA graph. Exit status 1 on a failure.

    python -m tests.gpu.native [--into DIRECTORY]

Needs the fork on sys.path (CONTRIBUTING.md), CMake, a C++ compiler and nvcc. Without a GPU it
checks the CPU build.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.support.native_rows import Case, cases, equal, unnoticed, wrong
from tools import native
from vllm.model_executor.layers.native_rows import load


def in_graph(case: Case) -> list[str]:
    """A graph recorded once sees what is in the tensors when it is replayed."""
    arena = case.arena.clone()
    ops = torch.ops.pilot
    arguments = (case.addend, case.table, case.slots, arena, case.dest)
    ops.add_and_capture_rows(case.stream, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.add_and_capture_rows(case.stream, *arguments)
    case.slots.copy_(case.slots.roll(1))
    case.dest.copy_(case.dest.roll(1))
    arena.copy_(case.arena)
    graph.replay()
    torch.cuda.synchronize()
    steered = case.steered()
    if equal(out, steered) and equal(arena, case.captured(steered)):
        return []
    return ["graph"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="keep the library there")
    into = parser.parse_args().into
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        library = native.build(into or Path(scratch))
        print(f"built in {time.monotonic() - started:.1f} s, {library.stat().st_size} bytes")
        if not load(library, device.upper()):
            print(f"FAIL the build has no kernels for {device}")
            return 1
        failed = checked = 0
        for name, case in cases(device):
            bad = wrong(case) + [f"{what} cannot be told" for what in unnoticed(case)]
            if device == "cuda":
                bad += in_graph(case)
            checked += 1
            if bad:
                failed += 1
                print("FAIL", name, *bad)
        print(f"{checked} cases on {device}, {failed} failed")
        return 1 if failed or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
