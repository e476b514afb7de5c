# SPDX-License-Identifier: Apache-2.0
"""A landing's memory is made known to the GPU while the engine starts: no step waits for it."""

import ctypes
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.capture_groups import num_senders

logger = init_logger(__name__)

PIECE_BYTES = 64 << 20
"""Number of bytes that are registered at a time. A copy must lie in one piece."""
MOST_BYTES = 32 << 30
"""The most that a landing has unless it is told."""
LEFT_SHARE = 8
"""Divisor that gives the part of the machine's memory left to others, however much is wanted."""
THREADS = min(4, max(1, len(os.sched_getaffinity(0)) // 2))
"""Number of threads that have the kernel give memory."""

_MADV_POPULATE_WRITE = 23


def landing_bytes(config: VllmConfig) -> int:
    """The bytes of one worker's landing: a quarter of the machine's free memory at most for all of
    them, unless `capture_landing_bytes` says otherwise of those of a pipeline stage."""
    parallel = config.parallel_config
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        return 0  # the engine core may be on another host
    wanted = config.capture_config.capture_landing_bytes
    if wanted is not None:
        return wanted // num_senders(config)
    free = min(psutil.virtual_memory().available, get_cgroup_memory_limit() or MOST_BYTES * 4)
    landings = parallel.pipeline_parallel_size * parallel.data_parallel_size_local
    landings *= num_senders(config)
    return min(free // 4, MOST_BYTES) // max(landings, 1) // PIECE_BYTES * PIECE_BYTES


class Pinning:
    """Registers a landing's memory with the GPU, piece by piece, in a thread of its own.

    CUDA allows no such call while a graph is recorded, so the thread rests from `pause` to
    `resume`. What is not registered cannot be taken.
    """

    def __init__(self, landing: Landing, device: torch.device) -> None:
        self._landing, self._device = landing, device
        landing.ready = 0
        self._goes = threading.Event()
        self._goes.set()
        self._piece = threading.Lock()
        """Held while a piece is registered."""
        threading.Thread(target=self._run, name="capture-landing", daemon=True).start()

    def pause(self) -> None:
        """Return when no piece is being registered, and have no other begun."""
        self._goes.clear()
        with self._piece:
            pass

    def resume(self) -> None:
        """Have the rest registered."""
        if self._landing.ready < len(self._landing.memory):
            size = self._landing.ready / 2**30
            logger.info("Captured rows land in %.1f GiB of host memory so far", size)
        self._goes.set()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        landing, seconds = self._landing, 0.0
        with ThreadPoolExecutor(THREADS, "capture-landing") as threads:
            while landing.ready < len(landing.memory):
                self._goes.wait()
                with self._piece:
                    if not self._goes.is_set():
                        continue
                    started = time.monotonic()
                    try:
                        _register(landing, threads)
                    except (OSError, RuntimeError) as error:
                        logger.warning(
                            "Captured rows have %.1f GiB of host memory to land in, not %.1f: %s; "
                            "capture_landing_bytes sets what is wanted",
                            landing.ready / 2**30,
                            len(landing.memory) / 2**30,
                            error,
                        )
                        return
                    seconds += time.monotonic() - started
        size = landing.ready / 2**30
        logger.info("Captured rows land in %.1f GiB of host memory, known in %.1f s", size, seconds)


def _register(landing: Landing, threads: ThreadPoolExecutor) -> None:
    """Have the kernel give the next piece's memory, and the GPU know it."""
    memory = psutil.virtual_memory()
    if memory.available < memory.total // LEFT_SHARE:
        raise OSError("the machine has no more to spare")
    first = landing.memory.ctypes.data + landing.ready
    size = min(PIECE_BYTES, len(landing.memory) - landing.ready)
    part = -(-size // THREADS // 4096) * 4096
    parts = [(first + at, min(part, size - at)) for at in range(0, size, part)]
    list(threads.map(_populate, parts))
    cudart = torch.cuda.cudart()
    status = cudart.cudaHostRegister(first, size, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister: {cudart.cudaGetErrorString(status)}")
    # Before the memory is unmapped: its address may be another's then.
    weakref.finalize(landing.memory, cudart.cudaHostUnregister, first).atexit = False
    landing.ready += size


def _populate(part: tuple[int, int]) -> None:
    """Have the kernel give memory; ctypes lets other threads run meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(part[0]), ctypes.c_size_t(part[1]), _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
