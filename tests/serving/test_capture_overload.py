# SPDX-License-Identifier: Apache-2.0
"""Consumers that are slower than the engine: memory stays bounded, nobody else waits, and what is
refused is counted.

Each request's rows are some 400 KiB, and a consumer may have four MiB of them waiting. While its
gate is closed a consumer gives no result, so that what is held is held; nothing here depends on how
fast anything is.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.serving.test_speculation import ALL_SITES, ROW_BYTES
from tests.support import serving
from tests.support.consumers import PATIENCE
from tests.support.serving import Ask, prompt_of
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    Location,
    RequestEnd,
    RequestInfo,
    RowBatch,
)

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

MIB = 1 << 20
PROMPT, GENERATED = 90, 2
ROWS = ALL_SITES * (PROMPT + GENERATED - 1)
REQUEST_BYTES = ROWS * ROW_BYTES
PENDING = 4 * MIB
AT_ONCE = PENDING // REQUEST_BYTES
"""Requests whose rows fit."""
MANY = 300
"""Requests; all their rows are some 120 MiB."""
HALF = MANY * REQUEST_BYTES // 2
NAMES = ("core", "here")


class Gated(CaptureConsumer):
    """Keeps the rows of a session until its end, which waits for the gate."""

    location: ClassVar[Location] = "engine"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.held = self.most_held = 0

    def open(self, request: RequestInfo) -> CaptureSession:
        return _Session(self)

    def count(self, num_bytes: int) -> None:
        with self.lock:
            self.held += num_bytes
            self.most_held = max(self.held, self.most_held)


class GatedHere(Gated):
    location: ClassVar[Location] = "frontend"


class _Session(CaptureSession):
    def __init__(self, consumer: Gated) -> None:
        self.consumer = consumer
        self.batches: list[RowBatch] = []

    def rows(self, batch: RowBatch) -> None:
        self.batches.append(batch)
        self.consumer.count(batch.values.nbytes)

    def done(self, end: RequestEnd) -> Any:
        assert self.consumer.gate.wait(PATIENCE)
        sizes = [batch.values.nbytes for batch in self.batches]
        self.consumer.count(-sum(sizes))
        return sum(sizes)


@contextmanager
def started(
    tiny_models: TinyModels, policy: str, pending: int = PENDING
) -> Iterator[tuple[LLM, dict[str, Gated]]]:
    here = GatedHere()
    limits = {"pending_bytes": pending, "threads": 2, "timeout": PATIENCE}
    llm = make_llm(
        tiny_models.path("llama"),
        capture_consumers=[
            "inline",
            {"consumer": Gated, "instance_name": "core", **limits},
            {"consumer": here, "instance_name": "here", **limits},
        ],
        capture_overload_policy=policy,
        max_model_len=models.MAX_LENGTH,
        max_num_seqs=32,
    )
    core: Any = captures_of(llm).hosted.hosts["core"]._consumer
    consumers = {"core": core, "here": here}
    try:
        yield llm, consumers
    finally:
        for consumer in consumers.values():
            consumer.gate.set()
        shut_down(llm)


def captures_of(llm: LLM) -> Any:
    return serving.scheduler_of(llm).interventions.captures


_PROCESS = psutil.Process()


def rss() -> int:
    """Bytes of this process in memory."""
    return int(_PROCESS.memory_info().rss)


def trimmed_rss() -> int:
    """The same without what was freed and not given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return rss()


class Drive:
    """Sends requests, and steps the engine."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.llm_engine
        self.llm = llm
        self.outputs: dict[str, Any] = {}
        self.prompt = prompt_of(PROMPT, 700)
        self.most_rss = 0

    def add(self, name: str, consumer: str | None) -> None:
        fields: dict[str, Any] = {"max_tokens": GENERATED}
        if consumer is not None:
            hooks = {point: "all" for point in STREAM_POINTS}
            fields["capture"] = {consumer: {"hooks": hooks, "positions": "all"}}
        params = Ask(self.prompt, fields).params(log_probs=False)
        self.engine.add_request(name, {"prompt_token_ids": self.prompt}, params)

    def step(self) -> None:
        outputs: list[Any] = self.engine.step()
        self.outputs |= {o.request_id: o for o in outputs if o.finished}
        self.most_rss = max(self.most_rss, rss())

    def until_idle(self) -> None:
        """Until the scheduler has nothing that it can run."""
        scheduler = serving.scheduler_of(self.llm)
        while scheduler.running or not self._stuck(scheduler):
            self.step()

    def _stuck(self, scheduler: Any) -> bool:
        waiting = list(scheduler.waiting)
        return not any(captures_of(self.llm).can_admit(request) for request in waiting)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def result(self, name: str, consumer: str) -> Any:
        return self.outputs[name].outputs[0].capture_results[consumer]


@pytest.mark.parametrize("name", NAMES)
def test_block(tiny_models: TinyModels, name: str) -> None:
    """Who has no room waits; others pass; every row comes in the end, and few are held at once."""
    with started(tiny_models, "block") as (llm, consumers):
        drive, consumer = Drive(llm), consumers[name]
        before = trimmed_rss()
        for i in range(MANY):
            drive.add(f"{i}", name)
            if i % 10 == 0:
                drive.add(f"plain {i}", None)
                drive.add(f"inline {i}", "inline")
        drive.until_idle()
        # The gate is closed: those with room have run, those without have not begun.
        assert set(drive.outputs) == {
            f"{kind} {i}" for kind in ("plain", "inline") for i in range(0, MANY, 10)
        }
        waiting = serving.scheduler_of(llm).get_request_counts()[1]
        assert waiting == MANY - AT_ONCE
        assert captures_of(llm)._free[name] == PENDING - AT_ONCE * REQUEST_BYTES
        consumer.gate.set()
        drive.finish()
        for i in range(MANY):
            result = drive.result(f"{i}", name)
            assert (result.status, result.payload) == ("ok", REQUEST_BYTES), result.error
        assert 0 < consumer.most_held <= PENDING
        assert captures_of(llm)._free[name] == PENDING
        assert drive.most_rss - before < HALF


@pytest.mark.parametrize("name", NAMES)
def test_drop(tiny_models: TinyModels, name: str) -> None:
    """Nobody waits; who has no room gets an error that counts the rows; others are right."""
    with started(tiny_models, "drop") as (llm, consumers):
        drive, consumer = Drive(llm), consumers[name]
        before = trimmed_rss()
        for i in range(MANY):
            drive.add(f"{i}", name)
        drive.add("plain", None)
        drive.add("inline", "inline")
        while len(drive.outputs) < MANY - AT_ONCE + 2:
            drive.step()
        assert {"plain", "inline"} <= drive.outputs.keys()
        dropped = sorted(drive.outputs.keys() - {"plain", "inline"}, key=int)
        for request in dropped:
            result = drive.result(request, name)
            assert result.status == "error"
            assert f"{ROWS} rows were dropped" in result.error
        assert drive.result("inline", "inline").status == "ok"
        consumer.gate.set()
        drive.finish()
        kept = drive.outputs.keys() - {"plain", "inline"} - set(dropped)
        assert len(kept) == AT_ONCE
        for request in kept:
            result = drive.result(request, name)
            assert (result.status, result.payload) == ("ok", REQUEST_BYTES), result.error
        assert 0 < consumer.most_held <= PENDING
        assert drive.most_rss - before < HALF
        # Once there is room again, nothing is dropped.
        drive.add("after", name)
        drive.finish()
        assert drive.result("after", name).status == "ok"


def test_memory_is_what_is_held(tiny_models: TinyModels) -> None:
    """The twin: with room for all of it, the rows of all requests are in memory at once."""
    with started(tiny_models, "block", pending=MANY * REQUEST_BYTES) as (llm, consumers):
        drive = Drive(llm)
        before = trimmed_rss()
        for i in range(MANY):
            drive.add(f"{i}", "core")
        drive.until_idle()
        assert not serving.scheduler_of(llm).get_request_counts()[1]
        assert rss() - before > HALF
        consumers["core"].gate.set()
        drive.finish()
        assert all(drive.result(f"{i}", "core").status == "ok" for i in range(MANY))
