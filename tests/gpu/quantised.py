# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints on a GPU: rows read and written, against the same rounded weights.

    python -m tests.gpu.quantised [--only FP8 ...] [--tp 2] [--jobs 3]

A process a format, compiled and in graphs, and one eager. Each prints the worst row's error, and
how far the rows are from those of the weights before rounding: the check could not fail if that
were no more. Exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.conformance.reference import Site
from tests.gpu.model import prompts, save_model
from tests.gpu.processes import Processes, all_good
from tests.support.quantised import FORMATS, roughen, save_quantised

LAYERS = 4
LIMIT = 0.03
"""Most error of a row. Where layers round what they read, numbers that differ by bfloat16's
rounding can become neighbours on a scale of 8 bits: the limit is then twice what transformers in
bfloat16 differs from itself in float32."""


def serve(folder: Path, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Check one format in this process, and return a record a check."""
    from tests.conformance import reference as ref
    from tests.gpu.mode import LLAMA, Mode, worst_row

    form = FORMATS[name]
    model, own = folder / "model", folder / f"{name}-{os.getpid()}"
    reference = save_quantised(model, own / "model", form)
    mode = Mode(own / "model", options, own / "files", reference)
    mode.layers, mode.noise_limit, tokens = LAYERS, LIMIT, prompts(13)

    def distances(rows: dict[Site, torch.Tensor], other: nn.Module, ids: list[int]) -> list[float]:
        """The worst row's error of each site but the embedding's."""
        want = ref.run(other, LLAMA, ids).rows
        return [worst_row(rows[site], want[site]) for site in want if site != ("pre_attn", 0)]

    found = mode.run(tokens, [{}] * len(tokens))
    if form.reads is not None:
        same = copy.deepcopy(reference).bfloat16()
        noise = max(
            max(distances(ref.run(same, LLAMA, ids).rows, reference, ids)) for ids in tokens
        )
        mode.noise_limit = max(LIMIT, 2 * noise)
        # This hides whether the weights were rounded: rows of another token are the twin.
        least = min(
            min(distances({s: r.roll(1, 0) for s, r in rows.items()}, reference, ids))
            for ids, rows in found
        )
        twin = "rows of the token before"
    else:
        plain = Mode.load(model)
        least = min(max(distances(rows, plain, ids)) for ids, rows in found)
        twin = "unrounded weights"
    margin = {"least": least, "limit": mode.noise_limit, "ok": least > 1.5 * mode.noise_limit}
    checks = {"read": mode.read(), twin: margin, "write": mode.write()}
    return [{"mode": name, "check": check, **found} for check, found in checks.items()]


def start(processes: Processes, folder: Path, name: str, options: dict[str, Any]) -> list[Any]:
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.gpu.quantised", "--folder", str(folder)]
    command += ["--engine", json.dumps(options), "--case", name]
    output, errors = processes.run(command, env, 400)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"mode"')]
    if not rows:
        rows = [{"mode": name, "check": "start", "ok": False, "log": errors[-3000:]}]
    eager = ", eager" if options.get("enforce_eager") else ""
    return [{**row, "mode": f"{name}{eager}"} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--engine", type=json.loads)
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case is not None:
        for row in serve(args.folder, args.case, args.engine):
            print(json.dumps(row), flush=True)
        return
    names = [n for n in FORMATS if args.only is None or any(n.startswith(o) for o in args.only)]
    with tempfile.TemporaryDirectory() as made:
        folder, processes = Path(made), Processes()
        save_model(folder / "model", LAYERS)
        roughen(folder / "model")
        split = {"tensor_parallel_size": args.tp}
        ways = [split, {**split, "enforce_eager": True}]
        modes = [partial(start, processes, folder, name, way) for name in names for way in ways]
        good = all_good(processes, modes, args.jobs)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
