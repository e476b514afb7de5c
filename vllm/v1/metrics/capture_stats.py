# SPDX-License-Identifier: Apache-2.0
"""Capture's part of vLLM's statistics: what consumers took, how long it lasted, what went wrong."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.capture.consumer import ConsumerResult
from vllm.v1.capture.rules import RULES_DO, RuleResult

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger

logger = init_logger(__name__)

STATUSES = ("ok", "partial_error", "error")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""The buckets of the seconds from a completion's end to a consumer's result."""

_SIZES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SCORES = (*(-size for size in reversed(_SIZES)), 0.0, *_SIZES)
"""The buckets of scores, on both sides of 0."""
MAX_LABELS = 256
"""Number of names of rules that have series of their own, as long as the frontend runs."""
OTHER_RULES = "(others)"
"""The label of all further ones; no rule has this name."""


@dataclass(frozen=True)
class ResultStats:
    """The figures of one `ConsumerResult`, without its payload."""

    consumer: str
    status: str
    rows: int
    num_bytes: int
    seconds: float


@dataclass
class RuleStats:
    """Counts and scores of rules in one iteration of the engine."""

    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    """In how many completions a rule fired, by its name, which is "" for those of requests, and by
    what it does."""
    scores: list[tuple[str, float]] = field(default_factory=list)
    """The score of each completion that was nearest to firing a rule of the operator."""
    told: Counter[str] = field(default_factory=Counter)
    """Events of the webhook, by their result."""

    def add(self, result: RuleResult, name: str, below: bool, then: str) -> None:
        """Count what a rule saw of a completion; `name` is "" for one of a request."""
        if result.fired:
            self.fired[name, then] += 1
        score = result.min if below else result.max
        if name and score is not None:
            self.scores.append((name, score))

    def take(self) -> "RuleStats":
        """All since the last call."""
        taken = RuleStats(Counter(self.fired), list(self.scores))
        self.fired.clear()
        self.scores.clear()
        return taken


@dataclass
class CaptureStats:
    """The results of one iteration of the engine, `IterationStats.capture`."""

    results: list[ResultStats] = field(default_factory=list)
    pending: Counter[str] | None = None
    """Number of completions that have ended and wait for a consumer's result, by consumer; None if
    that is not known."""
    rules: RuleStats = field(default_factory=RuleStats)

    def add(self, results: Iterable[ConsumerResult]) -> None:
        """Add results that came in this iteration."""
        self.results += [
            ResultStats(r.consumer, r.status, r.rows, r.num_bytes, r.seconds) for r in results
        ]


class CaptureProm:
    """Capture's metrics in Prometheus, for each consumer of each engine; none without capture."""

    def __init__(
        self, owner: "PrometheusStatLogger", config: "VllmConfig", labelnames: list[str]
    ) -> None:
        self._labels = owner.per_engine_labelvalues
        self._consumers = list(config.capture_config.consumers)
        if not self._consumers:
            return
        names = [*labelnames, "consumer"]
        # The classes are the owner's, so that Ray's take their place where it runs the engine.
        self._rows = owner._counter_cls(
            name="vllm:capture_rows",
            documentation="Captured rows (position x layer x point) that a consumer took.",
            labelnames=names,
        )
        self._bytes = owner._counter_cls(
            name="vllm:capture_bytes",
            documentation="Bytes of the captured rows that a consumer took.",
            labelnames=names,
        )
        self._results = owner._counter_cls(
            name="vllm:capture_results",
            documentation="Completions that a consumer gave a result for, by its status.",
            labelnames=[*names, "status"],
        )
        self._seconds = owner._histogram_cls(
            name="vllm:capture_publish_seconds",
            documentation="Seconds from the end of a completion to a consumer's result.",
            buckets=SECONDS,
            labelnames=names,
        )
        self._pending = owner._gauge_cls(
            name="vllm:capture_pending",
            documentation="Completions that have ended and wait for a consumer's result.",
            # Each API server holds completions of its own.
            multiprocess_mode="livesum",
            labelnames=names,
        )
        self._fired = owner._counter_cls(
            name="vllm:rule_fired",
            documentation="Completions in which a rule of the operator fired, by its name; those "
            "in which rules of requests did have none.",
            labelnames=[*labelnames, "rule", "then"],
        )
        self._scores = owner._histogram_cls(
            name="vllm:rule_score",
            documentation="The score of a completion nearest to firing a rule of the operator.",
            buckets=SCORES,
            labelnames=[*labelnames, "rule"],
        )
        self._told = owner._counter_cls(
            name="vllm:rule_webhook",
            documentation="Events of the rules' webhook: sent, dead (a dead letter) or dropped.",
            labelnames=[*labelnames, "result"],
        )
        self._names: set[str] = set()
        for values in self._labels.values():
            for then in RULES_DO:
                self._fired.labels(*values, "", then)
            for consumer in self._consumers:
                labels = [*values, consumer]
                for metric in (self._rows, self._bytes, self._seconds):
                    metric.labels(*labels)
                for status in STATUSES:
                    self._results.labels(*labels, status)
                self._pending.labels(*labels).set(0)

    def observe(self, stats: CaptureStats, engine: int) -> None:
        """Count what one iteration of an engine brought."""
        values = self._labels[engine]
        for (name, then), count in stats.rules.fired.items():
            self._fired.labels(*values, self._label(name), then).inc(count)
        for told, count in stats.rules.told.items():
            self._told.labels(*values, told).inc(count)
        for name, score in stats.rules.scores:
            self._scores.labels(*values, self._label(name)).observe(score)
        for result in stats.results:
            labels = [*values, result.consumer]
            self._rows.labels(*labels).inc(result.rows)
            self._bytes.labels(*labels).inc(result.num_bytes)
            self._results.labels(*labels, result.status).inc()
            self._seconds.labels(*labels).observe(result.seconds)
        if stats.pending is not None:
            # A frontend's, of all engines: with each engine's label it would be counted twice, and
            # stay as it was where an engine is idle.
            first = next(iter(self._labels.values()))
            for consumer in self._consumers:
                self._pending.labels(*first, consumer).set(stats.pending[consumer])

    def _label(self, rule: str) -> str:
        """A rule's name, of the first so many: the operator may set others again and again."""
        if rule not in self._names and len(self._names) == MAX_LABELS:
            return OTHER_RULES
        self._names.add(rule)
        return rule


class CaptureLogging:
    """Logs a line for each consumer that gave results since its last line."""

    def __init__(self) -> None:
        self._results: dict[str, list[ResultStats]] = {}
        self._pending: Counter[str] = Counter()

    def observe(self, stats: CaptureStats) -> None:
        """Keep what one iteration brought until the next `log`."""
        for result in stats.results:
            self._results.setdefault(result.consumer, []).append(result)
        if stats.pending is not None:
            self._pending = stats.pending

    def log(self, prefix: str) -> None:
        """Log the lines, also while the engine is idle; `prefix` is put before each."""
        taken, self._results = self._results, {}
        for consumer, results in taken.items():
            logger.info(
                "%sCapture %s: %d results, %d with an error, %d rows, %.1f MiB, "
                "slowest result after %.2f s, %d pending",
                prefix,
                consumer,
                len(results),
                sum(result.status != "ok" for result in results),
                sum(result.rows for result in results),
                sum(result.num_bytes for result in results) / 2**20,
                max(result.seconds for result in results),
                self._pending[consumer],
            )
