# SPDX-License-Identifier: Apache-2.0
"""Batch invariance on a GPU: rows of a request alone and in any batch are equal bit for bit.

    python -m tests.gpu.invariant [--tp 2]

One engine has VLLM_BATCH_INVARIANT=1. The other one is the twin: its rows must depend on the batch,
or the check could not fail. Half of the requests are steered. Prints one JSON object a check; exit
status 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.model import prompts, save_model
from tests.gpu.processes import Processes, all_good

COUNT, LAYERS, HIDDEN = 17, 2, 4096
"""Requests, and the size of a model whose sums are long enough to be split for small batches."""
CASES = {"invariant": "1", "as it is": "0", "invariant eager": "1"}
"""Name -> VLLM_BATCH_INVARIANT."""


def asks(count: int) -> list[dict[str, Any]]:
    """Every second request adds a vector of its own at all layers."""
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(HIDDEN, generator=generator) for _ in range(count)]
    return [
        {"steering_vectors": {"post_block": {"all": vector}}} if i % 2 else {}
        for i, vector in enumerate(vectors)
    ]


def serve(model: Path, name: str, tp: int) -> None:
    """Print, from a process of its own, how many requests have other bits in a batch."""
    from tests.gpu.mode import Mode

    options = {"enforce_eager": "eager" in name, "tensor_parallel_size": tp}
    mode = Mode(model, options, model.parent / f"files-{name}")
    tokens, steer = prompts(COUNT, seed=31), asks(COUNT)
    alone = [mode.run([ids], [ask])[0] for ids, ask in zip(tokens, steer, strict=True)]
    batches = {"all": range(COUNT), "half": range(0, COUNT, 2), "backwards": range(COUNT)[::-1]}
    other = 0
    for order in batches.values():
        found = mode.run([tokens[i] for i in order], [steer[i] for i in order])
        for i, (ids, rows) in zip(order, found, strict=True):
            same = ids == alone[i][0] and all(
                torch.equal(values, alone[i][1][site]) for site, values in rows.items()
            )
            other += not same
    count = sum(map(len, batches.values()))
    ok = other == 0 if CASES[name] == "1" else other > 0
    report = {"mode": name, "check": "other bits in a batch", "of": count, "value": other, "ok": ok}
    print(json.dumps(report), flush=True)


def start(processes: Processes, model: Path, name: str, tp: int) -> list[Any]:
    env = {
        **os.environ,
        "VLLM_BATCH_INVARIANT": CASES[name],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "tests.gpu.invariant", "--model", str(model), "--case", name]
    output, errors = processes.run([*command, "--tp", str(tp)], env, 400)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"mode"')]
    return rows or [{"mode": name, "check": "start", "ok": False, "log": errors[-3000:]}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--case")
    args = parser.parse_args()
    if args.case is not None:
        serve(args.model, args.case, args.tp)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_model(model, LAYERS, hidden=HIDDEN)
        processes = Processes()
        good = all_good(processes, [partial(start, processes, model, n, args.tp) for n in CASES], 3)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
