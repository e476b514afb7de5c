# SPDX-License-Identifier: Apache-2.0
"""Speed at which the filesystem consumer writes, against what the disk does by itself.

    python -m benchmarks.filesystem --root DIR [--sites 32] [--rows 16] [--json FILE]

In one run, taking turns: the disk's rate (the same bytes in files as large as a shard, each written
in pieces of 16 MiB and synced), and the consumer's in each layout, driven through its host as an
engine does it. Both end when all bytes are durable.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks import results
from benchmarks.results import Row, Run
from vllm.v1.capture.consumer import (
    ConsumerContext,
    ConsumerResult,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.copies import CopyThreads, empty
from vllm.v1.capture.file_format import LAYOUTS
from vllm.v1.capture.registry import ConsumerSpec, HostLimits
from vllm.v1.capture.transport.host import ConsumerHost
from vllm.v1.interventions.shape import LayerShape, TapShape

_PIECE, _FILE = 16 << 20, 256 << 20


def disk(folder: Path, data: torch.Tensor) -> float:
    """Seconds to write `data` in files of 256 MiB, each synced."""
    started = time.perf_counter()
    left = data.view(torch.uint8).reshape(-1).numpy().data
    while left:
        with open(folder / f"plain{len(left)}", "xb", buffering=0) as file:
            part, left = left[:_FILE], left[_FILE:]
            while part:
                part = part[file.write(part[:_PIECE]) or 0 :]
            os.fsync(file.fileno())
    return time.perf_counter() - started


def consumer(folder: Path, layout: str, data: torch.Tensor) -> float:
    """Seconds from the first row to the last result of requests with `data`.

    Args:
        data: [requests, sites, rows, hidden].
    """
    requests, sites, rows, width = data.shape
    at = np.arange(rows)
    shape = TapShape(width, "bfloat16", dict.fromkeys(range(sites), LayerShape(("post_block",))))
    made = FilesystemConsumer(root=str(folder), layout=layout)
    made.start(ConsumerContext("filesystem", "benchmark", shape, 0))
    waiting, errors, finished = requests, list[str](), threading.Event()

    def take(request_id: str, result: ConsumerResult) -> None:
        nonlocal waiting
        waiting -= 1
        if result.error:
            errors.append(result.error)
        if not waiting:
            finished.set()

    spec = ConsumerSpec("filesystem", cls=FilesystemConsumer, limits=HostLimits(timeout=3600))
    host, threads = ConsumerHost(spec, made, take), CopyThreads("benchmark")
    started = time.perf_counter()
    for i in range(requests):
        request_id = f"request-{i}"
        host.open(
            RequestInfo(
                request_id=request_id,
                external_id=request_id,
                sample=0,
                num_samples=1,
                prompt_token_ids=[],
                sites=tuple(("post_block", n) for n in range(sites)),
                width=width,
                dtype=torch.bfloat16,
                projected=False,
                max_rows=rows,
                fields={},
            )
        )
        # As rows come from a step, in memory of their own.
        values = empty(data[i].shape, data.dtype)
        copies = threads.follow(([values], [data[i]]))
        host.rows(request_id, RowBatch(at, at, at, values), copies)
        host.end(request_id, RequestEnd(rows))
    finished.wait()
    seconds = time.perf_counter() - started
    host.shutdown(60)
    if errors:
        raise SystemExit(f"{layout}: {len(errors)} errors, {errors[0]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results.add_arguments(parser)
    parser.add_argument("--root", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--sites", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--mib", type=int, default=1024, help="written in each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    folder = args.root / f"benchmark-{os.getpid()}"
    request_bytes = args.sites * args.rows * args.hidden * 2
    requests = max(1, (args.mib << 20) // request_bytes)
    total = requests * request_bytes
    # All of it different: disks may find what is alike.
    shape = (requests, args.sites, args.rows, args.hidden)
    data = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)

    def writes(layout: str) -> Callable[[], float]:
        return lambda: consumer(folder / layout, layout, data)

    measured: dict[str, Callable[[], float]] = {"disk": lambda: disk(folder, data)}
    measured |= {layout: writes(layout) for layout in LAYOUTS}
    rates: dict[str, list[float]] = {name: [] for name in measured}
    files: dict[str, int] = {}
    for _ in range(args.repeats):
        for name, measure in measured.items():
            folder.mkdir(parents=True)
            os.sync()
            try:
                rates[name].append(total / measure() / 1e6)
                files[name] = sum(path.is_file() for path in folder.rglob("*"))
            finally:
                shutil.rmtree(folder)
    rows = [
        Row(name, "write", "MB/s", values, facts={"files": files[name]})
        for name, values in rates.items()
    ]
    setup = results.setup(
        args,
        workload=f"{requests} requests of {request_bytes / 2**20:.1f} MiB: "
        f"{args.sites} sites x {args.rows} rows x {args.hidden} bf16",
        load=round(os.getloadavg()[0], 1),
    )
    # Neighbours in time are compared: the disk is not the same all the time.
    results.publish(Run("filesystem", setup, rows, baselines=("disk",)), args.json)


if __name__ == "__main__":
    main()
