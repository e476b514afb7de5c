# SPDX-License-Identifier: Apache-2.0
"""Steering's part of vLLM's statistics: what running requests hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger


@dataclass
class SteeringStats:
    """The slots and rows that requests hold at this moment, `SchedulerStats.steering`."""

    slots_in_use: int
    """The number of slots of the steering table that are held, of `max_steering_configs`."""
    rows_in_use: int
    """The number of rows of operations that are held, of `max_steering_rows`."""
    version: int
    """The version of the global steering, which counts its changes."""


class SteeringProm:
    """Steering's metrics in Prometheus; none where steering is off."""

    def __init__(
        self, owner: "PrometheusStatLogger", config: "VllmConfig", labelnames: list[str]
    ) -> None:
        self._labels = owner.per_engine_labelvalues
        self._on = config.steering_config.enable_steering
        if not self._on:
            return

        def gauge(name: str, documentation: str) -> Any:
            # The class is the owner's, so that Ray's takes its place where it runs the engine.
            return owner._gauge_cls(
                name=f"vllm:steering_{name}",
                documentation=documentation,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )

        self._slots = gauge("slots_in_use", "Slots of the steering table that requests hold.")
        self._rows = gauge("rows_in_use", "Rows of steering ops that requests hold.")
        self._version = gauge("version", "Version of the global steering: counts its changes.")

    def observe(self, stats: SteeringStats | None, engine: int) -> None:
        """Set an engine's metrics to what its requests hold now."""
        if not self._on or stats is None:
            return
        values = self._labels[engine]
        self._slots.labels(*values).set(stats.slots_in_use)
        self._rows.labels(*values).set(stats.rows_in_use)
        self._version.labels(*values).set(stats.version)
