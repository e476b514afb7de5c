# SPDX-License-Identifier: Apache-2.0
"""Bytes for keys and values on a CPU whose memory is not free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import cpu_memory
from vllm.config.cache import CacheConfig
from vllm.config.cpu_memory import settle_kv_space

pytestmark = pytest.mark.quick

GIB = 1 << 30


def settled(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    steering: bool = True,
    workers: int = 1,
    share: float = CacheConfig.gpu_memory_utilization,
    given: int | None = None,
) -> int | None:
    """The bytes for keys and values of a host with 16 GiB, of which `free` GiB are."""
    node = SimpleNamespace(total_memory=16 * GIB, available_memory=free * GIB)
    monkeypatch.setattr(cpu_memory, "get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(cpu_memory, "get_memory_node_info", lambda _: node)
    cache = SimpleNamespace(kv_cache_memory_bytes=given, gpu_memory_utilization=share)
    config: Any = SimpleNamespace(
        cache_config=cache,
        steering_config=SimpleNamespace(enable_steering=steering),
        capture_config=SimpleNamespace(enabled=False),
        parallel_config=SimpleNamespace(world_size=workers),
    )
    settle_kv_space(config)
    return cache.kv_cache_memory_bytes


def test_a_laptop_gives_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, free=8) == 2 * GIB
    assert settled(monkeypatch, free=8, workers=2) == GIB
    assert settled(monkeypatch, free=14) == 7 * GIB // 2


def test_no_more_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "MOST_BYTES", GIB)
    assert settled(monkeypatch, free=8) == GIB


@pytest.mark.parametrize(
    "left",
    [{"free": 15}, {"free": 8, "steering": False}, {"free": 8, "share": 0.5}],
    ids=["all is free", "upstream", "another share"],
)
def test_otherwise_upstream_chooses(monkeypatch: pytest.MonkeyPatch, left: dict[str, Any]) -> None:
    assert settled(monkeypatch, **left) is None


def test_a_size_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(monkeypatch, free=8, given=5) == 5
