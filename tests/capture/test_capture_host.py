# SPDX-License-Identifier: Apache-2.0
"""The host of a consumer: one result for each completion, in order, whatever the consumer does."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from tests.support.consumers import (
    END,
    PATIENCE,
    SITES,
    WIDTH,
    Recorder,
    Running,
    batch_of,
    request_of,
)
from vllm.v1.capture.consumer import ConsumerResult, RowBatch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.quick


def half_a_character(_: str) -> Any:
    raise ValueError("no luck \ud800")


def boom(_: str) -> Any:
    raise ValueError("no luck")


def test_rows_come_in_order_and_the_payload_is_the_result() -> None:
    with Running(Recorder()) as running:
        result = running.run("a", batch_of(0, 1), batch_of(5), batch_of(6, 7))
    assert result.payload == [[0, 1], [5], [6, 7], "done"]
    assert (result.consumer, result.status, result.error) == ("probe", "ok", None)
    assert result.rows == 5 * len(SITES)
    assert result.num_bytes == 5 * len(SITES) * WIDTH * 4
    assert 0 <= result.seconds < PATIENCE


def test_rows_come_when_they_are_copied() -> None:
    copied: Future[None] = Future()
    consumer = Recorder()
    with Running(consumer, threads=1) as running:
        running.host.open(request_of("a"))
        running.host.rows("a", batch_of(0), [copied])
        running.host.end("a", END)
        time.sleep(0.05)
        assert consumer.calls.get("a", []) == [] and not running.reports
        copied.set_result(None)
        assert running.result("a").payload == [[0], "done"]


def test_a_copy_that_fails_is_the_result() -> None:
    copied: Future[None] = Future()
    copied.set_exception(RuntimeError("no memory"))
    with Running(Recorder()) as running:
        running.host.open(request_of("a"))
        running.host.rows("a", batch_of(0), [copied])
        running.host.end("a", END)
        result = running.result("a")
    assert (result.status, result.error) == ("error", "RuntimeError: no memory")


def test_rows_that_are_absent_make_it_partial() -> None:
    with Running(Recorder()) as running:
        result = running.run("a", batch_of(0), error="the request was aborted")
        assert (result.status, result.error) == ("partial_error", "the request was aborted")
        assert result.payload == [[0], "done"]
        running.host.open(request_of("b"))
        running.host.end("b", END, aborted=True)
        assert running.result("b").payload == ["aborted"]


@pytest.mark.parametrize("method", ["open", "rows", "done"])
def test_what_a_method_raises_is_the_result(method: str) -> None:
    consumer = Recorder(**{method: lambda name: boom(name) if name == "bad" else None})
    with Running(consumer) as running:
        bad = running.run("bad", batch_of(0), batch_of(1))
        good = running.run("good", batch_of(0), batch_of(1))
    assert (bad.status, bad.error, bad.payload) == ("error", "ValueError: no luck", None)
    assert bad.rows == (2 * len(SITES) if method == "done" else 0)
    assert (good.status, good.rows) == ("ok", 2 * len(SITES))
    told = [call for call in consumer.calls.get("bad", []) if call[0] == "failed"]
    assert told == ([] if method == "open" else [("failed", "ValueError: no luck")])
    if method == "rows":
        assert consumer.calls["bad"] == [[0], *told]  # the rest was dropped
    assert consumer.down.is_set()


def test_a_failure_before_the_end_is_reported_at_the_end() -> None:
    failed = threading.Event()
    consumer = Recorder(rows=boom, failed=lambda _: failed.set())
    with Running(consumer) as running:
        running.host.open(request_of("a"))
        running.host.rows("a", batch_of(0))
        assert failed.wait(PATIENCE)
        assert running.reports == running.host.pending == 0
        running.host.rows("a", batch_of(1))
        running.host.end("a", END)
        assert running.result("a").error == "ValueError: no luck"
    assert consumer.calls["a"] == [[0], ("failed", "ValueError: no luck")]


def test_a_consumer_cannot_end_a_thread() -> None:
    def leave(_: str) -> None:
        raise SystemExit("bye")

    with Running(Recorder(rows=leave, failed=boom), threads=1) as running:
        for name in ("a", "b", "c"):
            assert running.run(name, batch_of(0)).error == "SystemExit: bye"


def test_an_endless_message_is_cut() -> None:
    def verbose(_: str) -> None:
        raise ValueError("x" * 10_000)

    with Running(Recorder(done=verbose)) as running:
        error = running.run("a").error
    assert error is not None and 100 < len(error) < 1000


def test_a_future_is_the_result_and_holds_no_thread() -> None:
    futures: dict[str, Future[str]] = {name: Future() for name in ("a", "b", "c")}
    consumer = Recorder(done=lambda name: futures.get(name, name))
    with Running(consumer, threads=1) as running:
        for name in futures:
            running.host.open(request_of(name))
            running.host.end(name, END)
        assert running.run("d").payload == "d"  # the only thread is free
        assert running.host.pending == 3
        futures["b"].set_exception(OSError("disk full"))
        assert running.result("b").error == "OSError: disk full"
        futures["c"].cancel()
        assert "Cancelled" in (running.result("c").error or "")
        futures["a"].set_result("there")
        assert running.result("a").payload == "there"
    assert consumer.calls["b"] == ["done", ("failed", "OSError: disk full")]
    assert consumer.calls["a"] == ["done"]
    assert running.host.pending == 0


class InEngine(Recorder):
    location = "engine"


@dataclass(frozen=True)
class Key:
    """A mapping when it is written, which no mapping can have as key when it is read."""

    name: str


UNREADABLE = [{Key("a"): 1}, msgspec.Raw(b"\xc1"), msgspec.msgpack.Ext(77, b"x")]
"""Written by msgspec without a word, and an error for whoever reads it."""


@pytest.mark.parametrize(
    "payload", [torch.zeros(1), object(), 1 << 70, {1: {"x": gc}}, "\ud800", *UNREADABLE]
)
def test_results_that_cross_processes_are_plain(payload: Any) -> None:
    with Running(InEngine(done=lambda _: payload), cls=InEngine) as running:
        result = running.run("a")
    assert result.status == "error"
    assert "the result is not plain data" in (result.error or "")
    assert result.payload is None
    with Running(Recorder(done=lambda _: payload)) as running:
        assert running.run("a").payload is payload  # in this process anything goes
    with Running(InEngine(), cls=InEngine) as running:
        assert running.run("a", batch_of(1)).payload == [[1], "done"]


def test_whatever_a_consumer_raises_can_be_sent() -> None:
    """Half of a surrogate pair in a message ended the thread that sends all outputs."""
    with Running(InEngine(done=half_a_character), cls=InEngine) as running:
        result = running.run("a")
    assert result.error == "ValueError: no luck \\ud800"
    sent = MsgpackDecoder(ConsumerResult).decode(MsgpackEncoder().encode(result))
    assert sent == result
    with pytest.raises(UnicodeEncodeError):
        MsgpackEncoder().encode(ConsumerResult("a", "error", "no luck \ud800"))


def test_fail_is_an_error_at_once() -> None:
    consumer = Recorder()
    with Running(consumer) as running:
        running.host.open(request_of("a"))
        running.host.rows("a", batch_of(0))
        running.host.fail("a", "the worker died")
        result = running.result("a")
        running.host.rows("a", batch_of(1))
        running.host.end("a", END)
    assert (result.status, result.error) == ("error", "the worker died")
    assert running.reports == 1
    # How far it came is a race; that it was told is not, if it was opened.
    calls = consumer.calls.get("a", [])
    assert calls in ([], [("failed", "the worker died")], [[0], ("failed", "the worker died")])


# -- memory ------------------------------------------------------------------------------------


def test_nothing_is_kept_of_a_finished_completion(caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Event()

    def done(name: str) -> Any:
        if name != "late":
            return name
        asked.set()
        return Future()

    consumer = Recorder(rows=lambda name: boom(name) if name.startswith("bad") else None, done=done)
    alive: list[weakref.ref[Any]] = []

    def one(name: str) -> None:
        request, batch = request_of(name), batch_of(0)
        alive.extend(weakref.ref(each) for each in (request, batch, batch.values))
        running.host.open(request)
        running.host.rows(name, batch)
        running.host.end(name, END)

    caplog.set_level(
        100, "vllm.v1.capture.transport.host"
    )  # pytest keeps the exceptions that are logged
    with Running(consumer) as running:
        for name in [*(f"good{i}" for i in range(10)), *(f"bad{i}" for i in range(10))]:
            one(name)
            running.result(name)
        one("late")
        assert asked.wait(PATIENCE)
        with running.impatient():
            running.result("late")
        running.run("last")
        consumer.calls.clear()
        gc.collect()
        left = [name for name, value in vars(running.host).items() if name in KEEPERS and value]
        assert left == []
    gc.collect()
    assert [each() for each in alive if each() is not None] == []


KEEPERS = ("_completions", "_waiting", "_ready", "_results", "_stuck")


def test_rows_that_were_taken_are_let_go_while_the_session_goes_on() -> None:
    taken, calls = threading.Event(), count()

    def second(_: str) -> None:
        if next(calls):
            taken.set()

    with Running(Recorder(rows=second)) as running:
        running.host.open(request_of("a"))
        batch = batch_of(0)
        ref = weakref.ref(batch)
        running.host.rows("a", batch)
        del batch
        running.host.rows("a", batch_of(1))
        assert taken.wait(PATIENCE)
        assert ref() is None


def test_rows_of_a_batch_are_the_senders_own() -> None:
    batch = batch_of(0, 1)
    seen: list[RowBatch] = []

    class Keep(Recorder):
        def open(self, request: Any) -> Any:
            session = super().open(request)
            vars(session)["rows"] = seen.append
            return session

    with Running(Keep()) as running:
        running.run("a", batch)
    assert seen == [batch]
