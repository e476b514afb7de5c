# SPDX-License-Identifier: Apache-2.0
"""What a server that runs holds for its requests, and how much memory its processes have."""

from __future__ import annotations

import time

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

SETTLE_SECONDS = 60.0
_GAUGES = (
    "vllm:steering_slots_in_use",
    "vllm:steering_rows_in_use",
    "vllm:capture_pending",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)

Counters = dict[str, dict[str, int]]
"""Consumer -> how its captures ended -> how many."""


def counters(url: str) -> Counters:
    consumers = httpx.get(f"{url}/v1/capture", timeout=60).json()["consumers"]
    return {name: consumer["counters"] for name, consumer in consumers.items()}


def held(url: str) -> dict[str, float]:
    """What the server holds for requests; all zero when it is idle."""
    state = httpx.get(f"{url}/v1/steering", timeout=60).json()
    holds = {f"steering {kind}": float(state[kind]["in_use"]) for kind in ("slots", "rows")}
    for name, counts in counters(url).items():
        holds[f"pending {name}"] = float(counts["pending"])
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(metrics):
        if family.name in _GAUGES:
            holds[family.name] = sum(sample.value for sample in family.samples)
    return holds


def settled(url: str) -> dict[str, float]:
    """What the server still holds when it is idle, or after a minute."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while any((holds := held(url)).values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def resident(pid: int | None) -> dict[int, int]:
    """Bytes of a process and of each below it."""
    if pid is None:
        return {}
    process = psutil.Process(pid)
    return {p.pid: p.memory_info().rss for p in (process, *process.children(recursive=True))}
