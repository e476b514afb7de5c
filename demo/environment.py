# SPDX-License-Identifier: Apache-2.0
"""Settings that torch and vLLM read when they are imported, so this module imports neither."""

from __future__ import annotations

import os
import sys

SMALL_MODEL_THREADS = 4
"""More threads make a model of a million parameters slower."""


def prepare_environment(small_model: bool) -> None:
    """The engine in this process, quiet, and no network. Variables that are set are kept."""
    if small_model:
        threads = min(SMALL_MODEL_THREADS, len(os.sched_getaffinity(0)))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for name, value in {
        # Threads that wait spin briefly: libgomp's default crawls when the machine has other work
        # to do, and not to spin at all makes small steps two thirds slower.
        "GOMP_SPINCOUNT": "20000",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        # Bars of what takes long are for terminals: elsewhere each of their states would stay.
        **({} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}),
    }.items():
        os.environ.setdefault(name, value)
