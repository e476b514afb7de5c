# SPDX-License-Identifier: Apache-2.0
"""The threads of a consumer's host: calls that take too long, shutdown, and many callers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.support.consumers import (
    END,
    PATIENCE,
    SHORT,
    SITES,
    Recorder,
    Running,
    batch_of,
    limit,
    request_of,
)
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.transport import host

pytestmark = pytest.mark.quick


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Consumers wait for it; it opens at the end of the test, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


# -- time ---------------------------------------------------------------------------------------


def test_a_result_that_does_not_come_is_an_error(gate: threading.Event) -> None:
    late, asked = Future[str](), threading.Event()

    def done(name: str) -> Any:
        asked.set()
        return late if name == "a" else name

    consumer = Recorder(done=done)
    with Running(consumer) as running:
        running.send("a", batch_of(0))
        assert asked.wait(PATIENCE)
        with running.impatient():
            result = running.result("a")
        assert result.error == "consumer 'probe' gave no result within 0.2 s"
        assert result.rows == len(SITES)
        assert running.run("b").payload == "b"
    assert late.cancelled()
    assert consumer.calls["a"] == [[0], "done", ("failed", result.error)]
    assert running.reports == 2


def test_a_thread_that_is_stuck_is_replaced(gate: threading.Event) -> None:
    entered, told = threading.Event(), threading.Event()

    def done(name: str) -> Any:
        if name == "stuck":
            entered.set()
            gate.wait()
        return name

    consumer = Recorder(done=done, failed=lambda _: told.set())
    with Running(consumer, threads=2) as running:
        running.send("stuck")
        assert entered.wait(PATIENCE)
        with running.impatient():
            assert running.result("stuck").status == "error"
        assert running.run("b").payload == "b"
        assert not told.is_set()  # one thread at a time: not before the call returns
        gate.set()
        assert told.wait(PATIENCE)
        assert running.run("c").payload == "c"
    assert running.reports == 3  # the late result was ignored


def test_a_call_before_the_end_has_a_limit_too(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, served = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        if name == "stuck":
            entered.set()
            gate.wait()
        served.set()

    def log(text: str, *_: Any) -> None:
        assert "does not return" in text
        limit(running.host, PATIENCE)  # of what is served next

    monkeypatch.setattr(host.logger, "error", log)
    with Running(Recorder(rows=hang), threads=1) as running:
        running.host.open(request_of("stuck"))
        running.host.rows("stuck", batch_of(0))
        assert entered.wait(PATIENCE)
        # The only thread is stuck, and no session has ended: it is replaced all the same.
        running.host.open(request_of("b"))
        running.host.rows("b", batch_of(0))
        limit(running.host, SHORT)
        assert served.wait(PATIENCE)
        running.host.end("b", END)
        assert running.result("b").status == "ok"
        running.host.end("stuck", END)
        error = running.result("stuck").error
        assert error == "a call of consumer 'probe' took more than 0.2 s"


def test_stuck_threads_are_bounded(gate: threading.Event) -> None:
    threads, before = 2, set(threading.enumerate())
    entered = threading.Semaphore(0)

    def done(name: str) -> Any:
        if name.startswith("stuck"):
            entered.release()
            gate.wait()
        return name

    consumer = Recorder(done=done)
    with Running(consumer, threads=threads) as running:
        for i in range(threads):
            running.send(f"stuck-{i}")
            assert entered.acquire(timeout=PATIENCE)
            with running.impatient():
                assert running.result(f"stuck-{i}").status == "error"
        with running.impatient():
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


# -- many sessions -------------------------------------------------------------------------------


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
