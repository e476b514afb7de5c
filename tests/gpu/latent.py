# SPDX-License-Identifier: Apache-2.0
"""Attention over a latent cache (MLA) on a GPU: queries, z and all weights of a tiny DeepSeek-V2
without experts against transformers, by backend, eagerly and in CUDA graphs. One line a check, exit
status 1 on any failure.

    python -m tests.gpu.latent [--only MODE ...] [--device cpu]

Needs the fork on sys.path (CONTRIBUTING.md). bfloat16, since kernels of MLA have no float32; on a
CPU both. One process a mode, all at a time. That weights are those that attention used is for the
start-up proof to say, to 1e-2 in bfloat16; what is compared here has what the layers before rounded
in it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.conformance.engine import prepare_environment
from tests.gpu.processes import Processes, all_good

MODES: dict[str, tuple[str, bool, str]] = {
    "FLASH_ATTN_MLA eager": ("FLASH_ATTN_MLA", True, "bfloat16"),
    "TRITON_MLA eager": ("TRITON_MLA", True, "bfloat16"),
    "FLASH_ATTN_MLA graphs": ("FLASH_ATTN_MLA", False, "bfloat16"),
    "TRITON_MLA graphs": ("TRITON_MLA", False, "bfloat16"),
    "CPU_MLA": ("CPU_MLA", True, "float32"),
    "CPU_MLA bfloat16": ("CPU_MLA", True, "bfloat16"),
}
"""Mode -> backend, whether eager, and dtype."""
LIMITS = {"bfloat16": 0.2, "float32": 1e-4}
"""Most relative L2 error of one head's row. Products of these random weights are large: on a CPU,
where float32 is within 1e-5, bfloat16 alone makes 0.19 of it."""
LEAST_APART = 1.0
"""How far the row of a neighbouring head is to be."""


def dense_deepseek() -> Any:
    """The zoo's DeepSeek-V2 without experts: routing decides near ties otherwise in 16 bits."""
    from tests.conformance import models

    row = models.MODELS["deepseek_v2"]

    def config() -> Any:
        made = row.config()
        made.first_k_dense_replace = made.num_hidden_layers
        made.mlp_layer_types = ["dense"] * made.num_hidden_layers
        return made

    return replace(row, name="deepseek_v2_dense", config=config)


def run_mode(name: str, folder: Path, device: str) -> int:
    """In a process of its own: start the engine, and print a line a point."""
    prepare_environment("v2" if device == "cuda" else "v1", "cuda" if device == "cuda" else "cpu")
    from tests.conformance import models, runner
    from tests.conformance.engine import engine

    row, (backend, eager, dtype) = dense_deepseek(), MODES[name]
    settings: dict[str, Any] = {**row.engine, "enforce_eager": eager}
    if device == "cuda":
        settings = {
            "enforce_eager": eager, "block_size": None, "max_num_seqs": 32,
            "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64, 256]},
        }  # fmt: skip
    settings |= {
        "dtype": dtype, "attention_config": {"backend": backend}, "capture_consumers": ["inline"],
        "capture_points": ["q", "z"],
    }  # fmt: skip
    with engine(folder, **settings) as llm:
        shape = llm.llm_engine.vllm_config.tap_shape
        assert shape is not None
        unread = runner.unread(shape)
        show(name, "start-up proof", ok=not unread, unread=unread)
        reference = runner.Reference(row, models.load(row, folder))
        points = {n: tuple(layer.heads) for n, layer in runner.with_heads(shape).items()}
        errors = runner.head_errors(llm, reference, runner.prompts(), points, unread)
    good = not unread and errors.keys() == {"q", "z", "attn"}
    for point, found in errors.items():
        ok = found.read <= LIMITS[dtype] and found.apart >= LEAST_APART
        show(name, point, ok=ok, error=found.read, limit=LIMITS[dtype], apart=found.apart)
        good &= ok
    show(name, LAST, ok=good)
    return 0 if good else 1


LAST = "queries, z and weights"


def show(mode: str, check: str, **numbers: Any) -> None:
    """Print what `tests.gpu.processes` reads."""
    print(json.dumps({"mode": mode, "check": check, **numbers}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.latent", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=tuple(MODES))
    parser.add_argument("--mode", choices=tuple(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one mode")
    options = parser.parse_args()
    if options.mode:
        return run_mode(options.mode, options.folder, options.device)
    on_cpu = [name for name in MODES if name.startswith("CPU")]
    names = options.only or [n for n in MODES if (n in on_cpu) == (options.device == "cpu")]
    processes = Processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from tests.conformance import models

    with tempfile.TemporaryDirectory() as folder:
        model = models.save(dense_deepseek(), Path(folder))
        command = [sys.executable, "-m", "tests.gpu.latent", "--device", options.device]
        command += ["--folder", str(model), "--mode"]
        modes = [
            partial(processes.checks, [*command, name], dict(os.environ), options.timeout, LAST)
            for name in names
        ]
        return 0 if all_good(processes, modes, len(modes)) else 1


if __name__ == "__main__":
    sys.exit(main())
