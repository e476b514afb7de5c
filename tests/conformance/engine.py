# SPDX-License-Identifier: Apache-2.0
"""Starts a small engine in this process, on either of vLLM's model runners.

vLLM and Triton read their environment when they are imported, so `prepare_environment` comes before
the first `import vllm`, and one process serves one runner: `pytest` is V1, `pytest --runner v2` V2.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.support.warm import start_warm

if TYPE_CHECKING:
    from vllm import LLM

Runner = Literal["v1", "v2"]
Device = Literal["cpu", "cuda"]

MAX_MODEL_LEN = 96
MAX_BATCHED_TOKENS = 256
CAPTURE_BUFFER_BYTES = 64 << 20

_TRITON_CPU = Path(__file__).parent / "triton_cpu"

_ENVIRONMENT = {
    # In this process: starts in seconds, and an exception arrives with its own traceback.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Models this small lose time to threads; unbound, two test processes use two cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Drafts of n-grams start Numba, which gives the process as many OpenMP threads as itself has.
    # Upstream packs weights for the threads of the time, and keeps products by size alone: where
    # packing depends on threads (AVX2), later engines of the process would multiply garbage.
    "NUMBA_NUM_THREADS": "1",
}

_CUDA_ENVIRONMENT = {
    # FlashInfer compiles its sampler where it runs, and a GPU host need not have a compiler.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Triton multiplies float32 in TF32 by default: too coarse for the tolerances.
    "TRITON_F32_DEFAULT": "ieee",
}


def prepare_environment(runner: Runner, device: Device = "cpu") -> None:
    """Set this process up for one model runner. Variables that are set already are kept.

    Raises:
        RuntimeError: vllm or triton is imported already, so that the settings would come too late.
    """
    if late := sorted({"vllm", "triton"} & set(sys.modules)):
        raise RuntimeError(
            f"{' and '.join(late)} imported before prepare_environment({runner!r}); call it first"
        )
    for name, value in (_ENVIRONMENT | (_CUDA_ENVIRONMENT if device == "cuda" else {})).items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    if runner == "v2" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        # Inductor asks Triton's driver for a target to compile for, and the interpreter has none.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_TRITON_CPU), inherited]))
        importlib.import_module(".triton_cpu.sitecustomize", __package__)


@cache
def start_cheaply() -> None:
    """Spare engines of this process, on CPU, what an earlier one did, and a Python of their own.

    What engines serve and how they end stays as it is:
    * vLLM looks at a model's class in a new Python, which imports vLLM again: here, this one does.
    * A worker seeks upstream's Triton kernels in all modules, to replace them: here, the first one
      does, and they stay replaced.
    * An engine collects garbage eight times, through all of torch, transformers and vLLM: here,
      what is imported by now is left out for good, and what engines make is never left out.
    * A core or worker in a process of its own imports vLLM: here, it is forked by one that has.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    replace_kernels = cache(platform.register_triton_kernel_overrides)
    instead: list[tuple[Any, str, Any]] = [
        (registry, "_run_in_subprocess", lambda inspect: inspect()),
        (platform, "register_triton_kernel_overrides", staticmethod(replace_kernels)),
        (gc, "freeze", lambda: None),
        (gc, "unfreeze", lambda: None),
    ]
    atexit.register(gc.unfreeze)
    gc.collect()
    gc.freeze()
    for owner, name, function in instead:
        setattr(owner, name, function)
    start_warm()


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    """An eager float32 engine on a tiny model, shut down at the end.

    Args:
        model: a directory written by `models.save`.
        options: engine options that override or extend the defaults here.
    """
    llm = make_llm(model, **options)
    try:
        yield llm
    finally:
        shut_down(llm)


def make_llm(model: Path, **options: Any) -> LLM:
    """Start the engine; the caller ends it with `shut_down`. See `engine`."""
    from vllm import LLM

    start_cheaply()
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_cache_memory_bytes": 16 << 20,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "seed": 0,
    }
    if options.get("capture_consumers"):
        # The default, of 1 GiB, is filled with zeros, which takes longer than all else.
        settings["capture_buffer_bytes"] = CAPTURE_BUFFER_BYTES
    return LLM(model=str(model), **{**settings, **options})


def shut_down(llm: LLM) -> None:
    """End the engine core and free what it holds: it collects garbage itself."""
    llm.llm_engine.engine_core.shutdown()
