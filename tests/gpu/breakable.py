# SPDX-License-Identifier: Apache-2.0
"""Breakable CUDA graphs on a GPU, turned on before and after attention is imported. One line a
check, exit status 1 if one fails.

    python -m tests.gpu.breakable [--stock DIR]

They end before attention, which decides when it is imported whether they do. For some
architectures upstream's config turns them on, which is too late for an engine in the process of its
frontend, or forked from one. `--stock` shows what upstream's tree computes then. An engine of ours
that steers or captures is refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from patches.taps.rows import ALL_POINTS
from tests.gpu.model import HIDDEN, LAYERS, prompts, save_model

ENABLED = {"enable_steering": True, "capture_consumers": ["inline"]}
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "eager": ("never", False, {"enforce_eager": True}),
    "in time": ("in time", False, {}),
    "late": ("late", False, {}),
    "enabled, in time": ("in time", True, {}),
    "enabled, late": ("late", True, {}),
    "enabled, late, eager": ("late", True, {"enforce_eager": True}),
}
"""Name -> when breakable graphs are turned on, whether ours are enabled, other options."""
PLAIN = ("in time", "late")
"""Of these, what upstream's tree can run."""
LIMIT = 0.05
"""Most difference of a log-probability that bfloat16 may cause, relative to their norm."""


def serve(model: Path, name: str) -> list[dict[str, Any]]:
    """In a process of its own: log-probabilities, plain and steered, or why it did not start."""
    import torch

    when, enabled, options = CASES[name]
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = {**options, **(ENABLED if enabled else {})}
    if when == "late":
        importlib.import_module("vllm.model_executor.layers.attention.attention")
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    try:
        llm = LLM(
            model=str(model),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=16,
            # Prompts are to be in piecewise graphs, too: by default no graph has so many tokens.
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 256, 512]},
            max_logprobs=-1,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.05,
            enable_prefix_caching=False,
            seed=0,
            **asked,
        )
    except (RuntimeError, ValueError) as error:
        return [{"refused": str(error)}]
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    vector = 4 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    steered = {"steering_vectors": {p: {LAYERS // 2: vector} for p in ALL_POINTS}}
    found = []
    for more in [{}, steered] if enabled else [{}]:
        asks: dict[str, Any] = {**fields, **more}
        params = SamplingParams(prompt_logprobs=-1, **asks)
        texts: list[Any] = [{"prompt_token_ids": p} for p in prompts(8)]
        table = []
        for done in llm.generate(texts, params, use_tqdm=False):
            entries: list[Any] = list(done.prompt_logprobs or [])[1:]
            table.append([[e[i].logprob for i in range(len(e))] for e in entries])
        found.append({"table": table})
    return found


def run(model: Path, name: str, path: list[str]) -> list[dict[str, Any]]:
    """What `serve` finds, of the vLLM that `path` has first."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", ""), "."]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if CASES[name][0] == "in time":
        env["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [sys.executable, "-m", "tests.gpu.breakable", "--serve", name, str(model)]
        done = subprocess.run(
            [*command, str(told)], env=env, capture_output=True, text=True, check=False
        )
        if not told.exists():
            return 2 * [{"refused": done.stderr[-1500:]}]
        found: list[dict[str, Any]] = json.loads(told.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.breakable", description=__doc__)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        name, model, told = options.serve
        Path(told).write_text(json.dumps(serve(Path(model), name)))
        return 0
    import torch

    def error(one: dict[str, Any], two: dict[str, Any]) -> float:
        """The worst of prompts; far beyond any limit if there is nothing to compare."""
        if "table" not in one or "table" not in two:
            return float("inf")
        pairs = [
            (torch.tensor(a), torch.tensor(b))
            for a, b in zip(one["table"], two["table"], strict=True)
        ]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    good = True

    def tell(check: str, ok: bool | None, **numbers: Any) -> None:
        nonlocal good
        good &= ok is not False
        said = {True: "ok  ", False: "FAIL", None: "seen"}[ok]
        print(said, check.ljust(32), json.dumps(numbers), flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        save_model(model := Path(folder))
        ran = {name: pool.submit(run, model, name, []) for name in CASES}
        if options.stock:
            path = [str(options.stock)]
            ran |= {f"stock {n}": pool.submit(run, model, n, path) for n in CASES if n in PLAIN}
        found = {name: each.result() for name, each in ran.items()}
    eager = found["eager"][0]
    for name in ("off in time", "off late", "stock in time", "stock late"):
        which = name.removeprefix("off ")
        if which in found:
            off = error(found[which][0], eager)
            # What is late is as upstream's: an engine of ours with nothing enabled is one of its.
            tell(name, None if "late" in name else off <= LIMIT, error=off)
    plain, steered = found["enabled, late, eager"]
    tell("enabled, late, eager", error(plain, eager) <= LIMIT, error=error(plain, eager))
    graphs, changed = found["enabled, in time"]
    tell("enabled, in time", error(graphs, eager) <= LIMIT, error=error(graphs, eager))
    off, moved = error(changed, steered), error(steered, plain)
    tell("steered, in time", off <= LIMIT < moved / 2, error=off, moved=moved)
    why = found["enabled, late"][0].get("refused", "served")
    tell("enabled, late", "breakable CUDA graphs" in why, refused=why[-300:])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
