# SPDX-License-Identifier: Apache-2.0
"""Serves `GET /v1/capture`, the consumers of the server and what they have done."""

import asyncio
from typing import Any, cast

from fastapi import APIRouter, Request

from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.interventions.shape import TapShape
from vllm.v1.metrics.prometheus import get_prometheus_registry

router = APIRouter(prefix="/v1/capture", tags=["capture"])

_PREFIX = "vllm:capture_"
_COUNTERS = {"rows_total": "rows", "bytes_total": "bytes", "pending": "pending"}
"""The names that metrics have here, by their names in Prometheus without the prefix."""

Counters = dict[str, dict[str, int]]
"""The counts of each consumer, by consumer and name."""


@router.get("")
async def state(request: Request) -> dict[str, Any]:
    """Return the consumers, their limits, and their counters over all engines and API servers."""
    engine = cast(AsyncLLM, request.app.state.engine_client)
    config = engine.vllm_config.capture_config
    counters: Counters | None = None
    if engine.log_stats:
        counters = await asyncio.to_thread(_counters, list(config.consumers))
    return {
        "enabled": config.enabled,
        "points": list(config.capture_points) if config.enabled else [],
        "overload_policy": config.capture_overload_policy,
        "inline_max_bytes": config.capture_inline_max_bytes,
        "lenses": _lenses(engine.vllm_config.tap_shape),
        "features": {
            name: {"point": file.point, "layer": file.layer}
            for name, file in engine.vllm_config.steering_config.feature_files.items()
        },
        "consumers": {
            name: _described(spec) | {"counters": counters[name] if counters is not None else None}
            for name, spec in config.consumers.items()
        },
    }


def _lenses(shape: TapShape | None) -> dict[str, dict[str, list[int]]]:
    """Return the layers that each lens reads, by its name and the point."""
    found: dict[str, dict[str, list[int]]] = {}
    for name, sites in shape.lenses.items() if shape is not None else ():
        for point, layer in sites:
            found.setdefault(name, {}).setdefault(point, []).append(layer)
    return found


def _described(spec: ConsumerSpec) -> dict[str, Any]:
    """Describe a consumer without its options, which may be credentials."""
    return {
        "location": "frontend" if spec.in_frontend else "engine",
        "captures_all": spec.capture is not None,
        "pending_bytes": spec.limits.pending_bytes,
        "max_request_bytes": spec.limits.max_request_bytes,
        "timeout": spec.limits.timeout,
    }


def _counters(consumers: list[str]) -> Counters:
    """Sum up the consumers' metrics since the start, as Prometheus has them."""
    names = (*_COUNTERS.values(), "ok", "partial_error", "error")
    found = {consumer: dict.fromkeys(names, 0) for consumer in consumers}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples if metric.name.startswith(_PREFIX) else ():
            counters = found.get(sample.labels.get("consumer", ""))
            kind = sample.name.removeprefix(_PREFIX)
            name = sample.labels["status"] if kind == "results_total" else _COUNTERS.get(kind)
            if counters is not None and name is not None:
                counters[name] += int(sample.value)
    return found
