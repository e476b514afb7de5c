# SPDX-License-Identifier: Apache-2.0
"""The host of a consumer: one result for each completion, in order, whatever the consumer does."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest
import torch

from tests.support.consumers import PATIENCE, SITES, WIDTH, Recorder, Running, batch_of, request_of
from vllm.v1.capture.consumer import CaptureConsumer, ConsumerResult, RequestEnd, RowBatch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.quick

END = RequestEnd(num_tokens=9)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Consumers wait for it; it opens at the end of the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


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


def test_fail_is_an_error_at_once(gate: threading.Event) -> None:
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


# -- time ---------------------------------------------------------------------------------------


def test_a_result_that_does_not_come_is_an_error(gate: threading.Event) -> None:
    late: Future[str] = Future()
    consumer = Recorder(done=lambda name: late if name == "a" else name)
    with Running(consumer, timeout=0.2) as running:
        result = running.run("a", batch_of(0))
        assert result.error == "consumer 'probe' gave no result within 0.2 s"
        assert result.rows == len(SITES)
        assert running.run("b").payload == "b"
    assert late.cancelled()
    assert consumer.calls["a"] == [[0], "done", ("failed", result.error)]
    assert running.reports == 2


def test_a_thread_that_is_stuck_is_replaced(gate: threading.Event) -> None:
    told = threading.Event()
    consumer = Recorder(
        done=lambda name: gate.wait() if name == "stuck" else name, failed=lambda _: told.set()
    )
    with Running(consumer, threads=2, timeout=0.2) as running:
        assert running.run("stuck").status == "error"
        assert running.run("b").payload == "b"
        assert not told.is_set()  # one thread at a time: not before the call returns
        gate.set()
        assert told.wait(PATIENCE)
        assert running.run("c").payload == "c"
    assert running.reports == 3  # the late result was ignored


def test_a_call_before_the_end_has_a_limit_too(gate: threading.Event) -> None:
    entered, served = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "stuck":
            entered.set()
            gate.wait()
        served.set()

    with Running(Recorder(rows=hang), threads=1, timeout=0.2) as running:
        running.host.open(request_of("stuck"))
        running.host.rows("stuck", batch_of(0))
        assert entered.wait(PATIENCE)
        # The only thread is stuck, and no session has ended: it is replaced all the same.
        running.host.open(request_of("b"))
        running.host.rows("b", batch_of(0))
        assert served.wait(PATIENCE)
        running.host.end("b", END)
        assert running.result("b").status == "ok"
        running.host.end("stuck", END)
        error = running.result("stuck").error
        assert error == "a call of consumer 'probe' took more than 0.2 s"


def test_stuck_threads_are_bounded(gate: threading.Event) -> None:
    threads, before = 2, set(threading.enumerate())
    consumer = Recorder(done=lambda name: gate.wait() if name.startswith("stuck") else name)
    with Running(consumer, threads=threads, timeout=0.2) as running:
        for i in range(threads):
            assert running.run(f"stuck-{i}").status == "error"
        refused = running.run("a")
        assert refused.error == (
            "consumer 'probe' takes no requests: 2 of its calls have not returned for 0.2 s"
        )
        assert "a" not in consumer.calls
        new = [t for t in set(threading.enumerate()) - before if t.name.startswith("capture-")]
        assert len(new) <= 2 * threads + 1
        gate.set()
        attempts = (running.run(f"again-{i}").status for i in count())
        assert "ok" in attempts  # once the first of them is back


# -- shutdown -----------------------------------------------------------------------------------


def test_shutdown_finishes_what_ended_and_fails_the_rest() -> None:
    slow: Future[str] = Future()
    consumer = Recorder(done=lambda name: slow if name == "slow" else name)
    running = Running(consumer)
    for name in ("slow", "open", *(f"r{i}" for i in range(20))):
        running.host.open(request_of(name))
        running.host.rows(name, batch_of(0))
        if name != "open":
            running.host.end(name, END)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(running.host.shutdown, PATIENCE)
        assert running.result("open").error == "the engine shut down before the request ended"
        assert not consumer.down.is_set()  # it waits for the slow one
        slow.set_result("late, not too late")
        closing.result()
    assert running.result("slow").payload == "late, not too late"
    assert [running.result(f"r{i}").payload for i in range(20)] == [f"r{i}" for i in range(20)]
    assert consumer.down.is_set()
    assert running.reports == 22
    with pytest.raises(RuntimeError, match="shut down"):
        running.host.open(request_of("z"))
    running.host.shutdown(0)  # twice is once


def test_shutdown_does_not_wait_longer_than_told(gate: threading.Event) -> None:
    consumer = Recorder(done=lambda _: Future(), shutdown=lambda _: gate.wait())
    running = Running(consumer)
    running.host.open(request_of("a"))
    running.host.end("a", END)
    running.host.shutdown(timeout=0.1)
    assert running.result("a").error == "the engine shut down before the result was there"
    assert consumer.down.is_set()


def test_threads_end_with_the_host() -> None:
    before = set(threading.enumerate())
    with Running(Recorder(), threads=5) as running:
        running.run("a")
        assert len(set(threading.enumerate()) - before) == 6
    assert set(threading.enumerate()) <= before


# -- memory and many threads --------------------------------------------------------------------


def test_nothing_is_kept_of_a_finished_completion(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Recorder(
        rows=lambda name: boom(name) if name.startswith("bad") else None,
        done=lambda name: Future() if name == "late" else name,
    )
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
    with Running(consumer, timeout=1) as running:
        for name in [*(f"good{i}" for i in range(10)), *(f"bad{i}" for i in range(10)), "late"]:
            one(name)
            running.result(name)
        running.run("last")
        consumer.calls.clear()
        gc.collect()
        left = [name for name, value in vars(running.host).items() if name in KEEPERS and value]
        assert left == []
    gc.collect()
    assert [each() for each in alive if each() is not None] == []


KEEPERS = ("_completions", "_waiting", "_ready", "_results", "_stuck")


def test_rows_that_were_taken_are_let_go_while_the_session_goes_on() -> None:
    with Running(Recorder()) as running:
        running.host.open(request_of("a"))
        batch = batch_of(0)
        ref = weakref.ref(batch)
        running.host.rows("a", batch)
        del batch
        taken = threading.Event()
        running.host._consumer.do = {"rows": lambda _: taken.set()}  # type: ignore[attr-defined]
        running.host.rows("a", batch_of(1))
        assert taken.wait(PATIENCE)
        assert ref() is None


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_gives_one_result_in_order(seed: int) -> None:
    """Many callers, each with completions of its own, against a consumer that often fails."""
    fails = {"open": 0.05, "rows": 0.02, "done": 0.1, "aborted": 0.1}
    luck = random.Random(seed)
    pool = ThreadPoolExecutor(3)

    def act(method: str) -> Any:
        def do(name: str) -> Any:
            if luck.random() < fails[method]:
                raise ValueError(f"{method} {name}")
            if method == "done" and luck.random() < 0.5:
                return pool.submit(lambda: name)
            return name

        return do

    consumer = Recorder(**{method: act(method) for method in fails})
    sent: dict[str, list[list[int]]] = {}
    how: dict[str, str] = {}

    def caller(index: int) -> None:
        rng = random.Random(seed * 100 + index)
        at: dict[str, int] = {}
        names = [f"{seed}-{index}-{i}" for i in range(60)]
        while names or at:
            if names and (not at or rng.random() < 0.3):
                name = names.pop()
                at[name], sent[name] = 0, []
                running.host.open(request_of(name))
                continue
            name = rng.choice(list(at))
            action = rng.random()
            if action < 0.7:
                count = rng.randint(1, 3)
                positions = list(range(at[name], at[name] + count))
                at[name] += count
                sent[name].append(positions)
                running.host.rows(name, batch_of(*positions))
                continue
            del at[name]
            how[name] = "fail" if action < 0.8 else "abort" if action < 0.85 else "end"
            if how[name] == "fail":
                running.host.fail(name, f"fail {name}")
            else:
                running.host.end(name, END, aborted=how[name] == "abort")

    with Running(consumer, threads=4) as running, pool:
        callers = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join(PATIENCE)
        results = {name: running.result(name) for name in sent}
    assert running.reports == len(sent) == 360
    assert running.host.pending == 0
    good = 0
    for name, result in results.items():
        calls = consumer.calls.get(name, [])
        taken = [call for call in calls if isinstance(call, list)]
        assert taken == sent[name][: len(taken)]
        rest = calls[len(taken) :]
        last = {"end": "done", "abort": "aborted"}.get(how[name])
        if result.status == "ok":
            good += 1
            assert (taken, rest, result.payload) == (sent[name], [last], name)
            assert result.rows == len(SITES) * sum(map(len, taken))
        else:
            assert result.error is not None and result.error.endswith(name)
            told = [("failed", result.error)]
            opened = bool(calls)
            assert rest in ([*told], [last, *told]) if opened else not calls
    assert 50 < good < 300


def test_sessions_run_in_parallel() -> None:
    """As many as there are threads; one thread would never pass the barrier."""
    barrier = threading.Barrier(3)
    with Running(Recorder(rows=lambda _: barrier.wait(PATIENCE)), threads=3) as running:
        for name in "abc":
            running.host.open(request_of(name))
            running.host.rows(name, batch_of(0))
            running.host.end(name, END)
        assert [running.result(name).status for name in "abc"] == ["ok"] * 3


def test_a_session_that_is_busy_does_not_hold_the_others(gate: threading.Event) -> None:
    """Turns: with one thread, a long queue of one session's rows is not served first."""
    first = threading.Event()

    class Order(CaptureConsumer):
        def open(self, request: Any) -> Any:
            return consumer.open(request)

    served: list[str] = []

    def rows(name: str) -> None:
        if name == "busy" and not first.is_set():
            first.set()
            gate.wait(PATIENCE)
        served.append(name)

    consumer = Recorder(rows=rows)
    with Running(Order(), threads=1) as running:
        running.host.open(request_of("busy"))
        for i in range(50):
            running.host.rows("busy", batch_of(i))
        assert first.wait(PATIENCE)
        running.host.open(request_of("quick"))
        running.host.rows("quick", batch_of(0))
        running.host.end("quick", END)
        running.host.end("busy", END)
        gate.set()
        running.result("busy")
        assert served.index("quick") < 10
        assert served.count("busy") == 50


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
