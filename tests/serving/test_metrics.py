# SPDX-License-Identifier: Apache-2.0
"""Capture and steering in vLLM's statistics: its own loggers, a real registry, a real engine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

from tests.conformance.engine import make_llm, shut_down
from tests.conformance.models import HIDDEN
from tests.support.consumers import PATIENCE
from tests.support.serving import Ask, prompt_of, vector
from vllm import LLM
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    ConsumerResult,
    Location,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.metrics.capture_stats import MAX_LABELS, OTHER_RULES
from vllm.v1.metrics.kept_stats import KeptStats
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.metrics.steering_stats import SteeringStats

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

RESULTS = [
    ConsumerResult("inline", "ok", payload={"much": "data"}, rows=5, num_bytes=500),
    ConsumerResult("logging", "ok", rows=3, num_bytes=300, seconds=0.02),
    ConsumerResult("logging", "error", "disk full", rows=2, num_bytes=200, seconds=4.0),
]


@pytest.fixture(scope="module")
def config(tiny_models: TinyModels) -> VllmConfig:
    return EngineArgs(
        model=str(tiny_models.path("llama")),
        served_model_name=["tiny"],
        skip_tokenizer_init=True,
        enable_steering=True,
        capture_consumers=["inline", "logging"],
    ).create_engine_config()


def iteration(pending: Counter[str] | None = None) -> IterationStats:
    stats = IterationStats()
    stats.capture.add(RESULTS)
    stats.capture.pending = pending
    stats.capture.rules.fired += Counter({("", "stop"): 3, ("toxic", "flag"): 1})
    stats.capture.rules.scores += [("toxic", 4.0), ("toxic", -0.5)]
    return stats


def read(prefix: str, registry: CollectorRegistry = REGISTRY) -> dict[tuple[str, ...], float]:
    """(name, label values without the model's name) -> value of each sample."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
                assert sample.labels.pop("model_name") == "tiny"
                found[sample.name, *map(str, sample.labels.values())] = sample.value
    return found


def test_prometheus(config: VllmConfig) -> None:
    """Each consumer of each engine has series of its own, from the start."""
    prometheus = PrometheusStatLogger(config, [0, 1])
    prometheus.record(None, iteration(), engine_idx=1)
    prometheus.record(None, iteration(Counter(logging=4)), engine_idx=1)
    prometheus.record(None, None, engine_idx=1)
    prometheus.record(SchedulerStats(), IterationStats(), engine_idx=0)
    values = read("vllm:capture_")
    for engine, times in ("0", 0), ("1", 2):
        for consumer, rows, size in ("inline", 5, 500), ("logging", 5, 500):
            assert values["vllm:capture_rows_total", engine, consumer] == times * rows
            assert values["vllm:capture_bytes_total", engine, consumer] == times * size
        for consumer, status, count in (
            ("inline", "ok", 1),
            ("inline", "error", 0),
            ("logging", "ok", 1),
            ("logging", "error", 1),
            ("logging", "partial_error", 0),
        ):
            assert values["vllm:capture_results_total", engine, consumer, status] == times * count
        name = "vllm:capture_publish_seconds"
        assert values[f"{name}_count", engine, "logging"] == times * 2
        assert values[f"{name}_sum", engine, "logging"] == pytest.approx(times * 4.02)
        assert values[f"{name}_bucket", engine, "logging", "0.03"] == times
        assert values[f"{name}_bucket", engine, "logging", "3.0"] == times
        assert values[f"{name}_bucket", engine, "logging", "10.0"] == times * 2
        fired, scores = read("vllm:rule_fired_total"), read("vllm:rule_score")
        assert fired["vllm:rule_fired_total", engine, "", "stop"] == times * 3
        assert fired["vllm:rule_fired_total", engine, "", "flag"] == 0
        named = [fired.get(("vllm:rule_fired_total", engine, "toxic", "flag"))]
        named += [
            scores.get(("vllm:rule_score_bucket", engine, "toxic", bucket))
            for bucket in ("-1.0", "-0.3", "3.0", "10.0")
        ]
        assert named == ([2, 0, 2, 2, 4] if times else [None] * 5)
    # Of the frontend: what came with one engine's outputs, another one's bring up to date.
    assert values["vllm:capture_pending", "0", "logging"] == 4
    assert values["vllm:capture_pending", "0", "inline"] == 0
    assert values["vllm:capture_pending", "1", "logging"] == 0
    prometheus.record(None, iteration(Counter()), engine_idx=0)
    assert read("vllm:capture")["vllm:capture_pending", "0", "logging"] == 0


def test_names_of_rules_have_so_many_series(config: VllmConfig) -> None:
    """The operator may set rules with other names for ever; what is one too many is not lost."""
    prometheus = PrometheusStatLogger(config, [0])
    for i in range(MAX_LABELS + 20):
        stats = IterationStats()
        stats.capture.rules.fired[f"r{i}", "flag"] += 1
        stats.capture.rules.scores.append((f"r{i}", 1.0))
        prometheus.record(None, stats)
    fired = {key[2]: n for key, n in read("vllm:rule_fired_total").items() if n}
    assert fired.pop(OTHER_RULES) == 20
    assert fired == {f"r{i}": 1 for i in range(MAX_LABELS)}
    assert read("vllm:rule_score_count")["vllm:rule_score_count", "0", OTHER_RULES] == 20


def test_steering_in_prometheus(config: VllmConfig) -> None:
    prometheus = PrometheusStatLogger(config, [0])
    stats = SchedulerStats(steering=SteeringStats(slots_in_use=3, rows_in_use=9, version=2))
    prometheus.record(stats, None)
    assert read("vllm:steering_") == {
        ("vllm:steering_slots_in_use", "0"): 3,
        ("vllm:steering_rows_in_use", "0"): 9,
        ("vllm:steering_version", "0"): 2,
    }


def test_kept_rows_in_prometheus(tiny_models: TinyModels) -> None:
    """Counters add up what each iteration found; an engine that keeps none has no series."""
    options: Any = {"capture_consumers": ["inline"], "enable_prefix_caching": True}
    args = EngineArgs(
        model=str(tiny_models.path("llama")),
        served_model_name=["tiny"],
        skip_tokenizer_init=True,
        capture_keep_bytes=1 << 20,
        **options,
    )
    prometheus = PrometheusStatLogger(args.create_engine_config(), [0])
    for stats in (KeptStats(100, 30, 20), None, KeptStats(50, 5, 0)):
        prometheus.record(SchedulerStats(kept_rows=stats), None)
    assert read("vllm:capture_kept") == {
        ("vllm:capture_kept_bytes", "0"): 50,
        ("vllm:capture_kept_queries_total", "0"): 35,
        ("vllm:capture_kept_hits_total", "0"): 20,
    }


def test_without_steering_and_capture(tiny_models: TinyModels) -> None:
    """The twin: no series that nothing can ever move."""
    plain = EngineArgs(model=str(tiny_models.path("llama")), skip_tokenizer_init=True)
    prometheus = PrometheusStatLogger(plain.create_engine_config(), [0])
    prometheus.record(SchedulerStats(steering=SteeringStats(0, 0, 0)), IterationStats())
    names = {metric.name for metric in REGISTRY.collect()}
    assert not [n for n in names if n.startswith(("vllm:capture", "vllm:steering", "vllm:rule"))]
    assert "vllm:generation_tokens" in names


def test_a_line_of_the_log(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that gave results has a line, also on an idle engine; once."""
    lines: list[str] = []
    logger = logging.getLogger("vllm.v1.metrics.capture_stats")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    stats = LoggingStatLogger(config, 1)
    stats.log()
    assert not lines
    stats.record(None, iteration(Counter(logging=2)), engine_idx=1)
    stats.record(None, iteration(), engine_idx=1)
    stats.log()
    assert lines == [
        "Engine 001: Capture inline: 2 results, 0 with an error, 10 rows, 0.0 MiB, "
        "slowest result after 0.00 s, 0 pending",
        "Engine 001: Capture logging: 4 results, 2 with an error, 10 rows, 0.0 MiB, "
        "slowest result after 4.00 s, 2 pending",
    ]
    stats.log()
    assert len(lines) == 2


def _api_server(config: VllmConfig, pending: int) -> None:
    PrometheusStatLogger(config, [0]).record(None, iteration(Counter(logging=pending)))


def _api_servers(model: str) -> None:
    """Two processes with statistics of their own, as two API servers are."""
    config = EngineArgs(
        model=model,
        served_model_name=["tiny"],
        skip_tokenizer_init=True,
        capture_consumers=["inline", "logging"],
    ).create_engine_config()
    context = multiprocessing.get_context("fork")
    servers = [context.Process(target=_api_server, args=(config, n)) for n in (1, 2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
        assert server.exitcode == 0


def test_several_processes(tiny_models: TinyModels, tmp_path: Any) -> None:
    """prometheus_client decides as it is imported whether values are shared, hence a process."""
    model = str(tiny_models.path("llama"))
    program = f"from tests.serving.test_metrics import _api_servers; _api_servers({model!r})"
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=1800)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    values = {
        (s.name, s.labels["consumer"], s.labels.get("status")): s.value
        for family in registry.collect()
        for s in family.samples
        if s.name.startswith("vllm:capture_") and "le" not in s.labels
    }
    assert values["vllm:capture_rows_total", "logging", None] == 10
    assert values["vllm:capture_results_total", "logging", "error"] == 2
    assert values["vllm:capture_publish_seconds_sum", "logging", None] == pytest.approx(8.04)
    assert values["vllm:capture_pending", "logging", None] == 3


# -- a real engine --------------------------------------------------------------------------


class Slow(CaptureConsumer):
    """Gives no result before it is told to."""

    location: ClassVar[Location] = "frontend"

    def __init__(self) -> None:
        self.gate = threading.Event()

    def open(self, request: RequestInfo) -> CaptureSession:
        return _Session(self.gate)


class _Session(CaptureSession):
    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def rows(self, batch: RowBatch) -> None:
        pass

    def done(self, end: RequestEnd) -> Any:
        assert self.gate.wait(PATIENCE)
        if end.error is not None:
            raise OSError(end.error)
        return "done"


class SlowEngine(Slow):
    location = "engine"

    def __init__(self) -> None:
        super().__init__()
        self.gate.set()


@pytest.fixture(scope="module")
def engine(tiny_models: TinyModels) -> Iterator[tuple[LLM, Slow]]:
    slow = Slow()
    llm = make_llm(
        tiny_models.path("llama"),
        served_model_name="tiny",
        enable_steering=True,
        disable_log_stats=False,
        capture_consumers=[
            "inline",
            {"consumer": slow, "instance_name": "slow"},
            {"consumer": SlowEngine, "instance_name": "core"},
        ],
    )
    yield llm, slow
    shut_down(llm)


def test_engine(engine: tuple[LLM, Slow]) -> None:
    """What consumers report reaches the registry, also what comes when the engine is idle."""
    llm, slow = engine
    prompt = prompt_of(17, 600)
    hooks = {"post_block": [1, 3]}
    asked = {
        "inline": {"hooks": hooks, "positions": "all"},
        "slow": {"hooks": hooks, "positions": "all_prompt"},
        "core": {"hooks": {"pre_attn": [0]}, "positions": "all_generated"},
    }
    steering = {"steering_vectors": {"post_block": {0: vector(600)}}}
    params = Ask(prompt, {"max_tokens": 4, "capture": asked, **steering}).params(log_probs=False)
    llm.llm_engine.add_request("one", {"prompt_token_ids": prompt}, params)
    slots = "vllm:steering_slots_in_use", "0"
    outputs: list[Any] = llm.llm_engine.step()
    assert read("vllm:steering_")[slots] == 1
    while read("vllm:capture_pending")["vllm:capture_pending", "0", "slow"] == 0:
        outputs += llm.llm_engine.step()
    assert not any(output.finished for output in outputs)
    assert read("vllm:steering_")[slots] == 0
    values = read("vllm:capture_")
    assert values["vllm:capture_results_total", "0", "inline", "ok"] == 1
    assert values["vllm:capture_results_total", "0", "slow", "ok"] == 0
    slow.gate.set()
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert outputs[-1].finished
    values = read("vllm:capture_")
    for name, rows in ("inline", 2 * 20), ("slow", 2 * 17), ("core", 3):
        assert values["vllm:capture_results_total", "0", name, "ok"] == 1
        assert values["vllm:capture_rows_total", "0", name] == rows
        assert values["vllm:capture_bytes_total", "0", name] == rows * HIDDEN * 4
        assert values["vllm:capture_publish_seconds_count", "0", name] == 1
        assert values["vllm:capture_pending", "0", name] == 0
    # A stream of deltas brings the same rows in parts.
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    params.capture = {"inline": asked["inline"]}
    llm.llm_engine.add_request("two", {"prompt_token_ids": prompt}, params)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    values = read("vllm:capture_")
    assert values["vllm:capture_rows_total", "0", "inline"] == 2 * 2 * 20
    assert values["vllm:capture_bytes_total", "0", "inline"] == 2 * 2 * 20 * HIDDEN * 4
