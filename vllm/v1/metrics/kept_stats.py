# SPDX-License-Identifier: Apache-2.0
"""Statistics of rows that are kept for blocks of the prefix cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger


@dataclass
class KeptStats:
    """Use of kept rows, `SchedulerStats.kept_rows`."""

    num_bytes: int
    """Bytes of the rows that are kept at this moment."""
    queries: int
    """Positions whose rows requests wanted when they started, of those that could be kept."""
    hits: int
    """The part of them whose rows were kept."""


class KeptProm:
    """Metrics of kept rows in Prometheus; none where no rows are kept."""

    def __init__(
        self, owner: "PrometheusStatLogger", config: "VllmConfig", labelnames: list[str]
    ) -> None:
        self._labels = owner.per_engine_labelvalues
        self._on = config.capture_config.capture_keep_bytes > 0
        if not self._on:
            return
        # The classes are the owner's, so that Ray's take their place where it runs the engine.
        self._bytes = owner._gauge_cls(
            name="vllm:capture_kept_bytes",
            documentation="Bytes of rows that are kept for blocks of the prefix cache.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._queries = owner._counter_cls(
            name="vllm:capture_kept_queries",
            documentation="Positions whose rows requests wanted when they started.",
            labelnames=labelnames,
        )
        self._hits = owner._counter_cls(
            name="vllm:capture_kept_hits",
            documentation="Positions whose rows were kept, and not computed again.",
            labelnames=labelnames,
        )
        for values in self._labels.values():
            self._bytes.labels(*values).set(0)
            self._queries.labels(*values)
            self._hits.labels(*values)

    def observe(self, stats: KeptStats | None, engine: int) -> None:
        """Count what one iteration of an engine brought."""
        if not self._on or stats is None:
            return
        values = self._labels[engine]
        self._bytes.labels(*values).set(stats.num_bytes)
        self._queries.labels(*values).inc(stats.queries)
        self._hits.labels(*values).inc(stats.hits)
