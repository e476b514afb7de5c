# SPDX-License-Identifier: Apache-2.0
"""What is refused of engines that keep rows of cached blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.errors.case import Case
from vllm.config.capture import CaptureConfig
from vllm.config.intervention_refusals import refuse_keeping


def starting(cached: bool, connector: object = None) -> Callable[[], object]:
    config: Any = SimpleNamespace(
        capture_config=SimpleNamespace(capture_keep_bytes=1),
        cache_config=SimpleNamespace(enable_prefix_caching=cached),
        kv_transfer_config=connector,
    )
    return lambda: refuse_keeping(config)


KEPT_ROWS = [
    Case({}, do=lambda: CaptureConfig(capture_keep_bytes=1)),
    Case({}, do=starting(cached=False)),
    Case({}, do=starting(cached=True, connector=object())),
]
