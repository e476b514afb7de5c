# SPDX-License-Identifier: Apache-2.0
"""What an engine's worker can do for a benchmark beside its work: its `worker_extension_cls`.

The worker imports this in its own process, whether that was forked or spawned, and so knows the
load format of `benchmarks.random_weights`. Imports nothing that only our tree has.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from benchmarks import random_weights

random_weights.register()


class EngineWorker:
    """Methods for `LLM.collective_rpc`, which are added to vLLM's worker."""

    def copy_rate(self, size: int, repeats: int) -> float:
        """Bytes a second from the device into pinned memory; on a CPU, from memory to memory."""
        on_gpu = torch.cuda.is_available()
        source = torch.ones(size, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
        target = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        target.copy_(source)
        started = time.perf_counter()
        for _ in range(repeats):
            target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return size * repeats / (time.perf_counter() - started)

    def weight_bytes(self) -> int:
        """Bytes of the model's parameters."""
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return sum(parameter.nbytes for parameter in model.parameters())

    def process_id(self) -> int:
        return os.getpid()

    def modules_not_from(self, root: str) -> list[str]:
        return modules_not_from(root)


def modules_not_from(root: str) -> list[str]:
    """Modules of vLLM in this process that are not files below `root`, and where they are from."""
    loaded = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "vllm"}
    files = {name: getattr(module, "__file__", None) for name, module in loaded.items()}
    return [
        f"{name} ({file})"
        for name, file in files.items()
        if file and not Path(file).is_relative_to(root)
    ]
