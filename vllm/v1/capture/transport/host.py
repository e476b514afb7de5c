# SPDX-License-Identifier: Apache-2.0
"""A host runs one capture consumer in threads of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

from vllm.logger import init_logger
from vllm.v1.capture.consumer import (
    CaptureConsumer,
    ConsumerResult,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.capture.results import CaptureStatus
from vllm.v1.capture.transport.completion import Call, Completion, need_plain
from vllm.v1.interventions.errors import describe

logger = init_logger(__name__)

SHUTDOWN_SECONDS = 30.0
"""Seconds that consumers may take to write what is left when the engine stops."""


Report = Callable[[str, ConsumerResult], None]
"""Called with (request id, result)."""


class _Worker:
    """A thread, and the completion it works on."""

    def __init__(self, name: str, work: Callable[["_Worker"], None]) -> None:
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.completion: Completion | None = None
        self.since = 0.0
        """The time at which its present call began."""


class ConsumerHost:
    """Feeds the completions that a consumer captures to its sessions.

    Each session's calls are made in order, by one thread at a time; sessions run in parallel. Rows
    wait in memory until their session takes them; the callers bound that, by reservation. No method
    but `shutdown` blocks, and each may be called from any thread.
    """

    def __init__(self, spec: ConsumerSpec, consumer: CaptureConsumer, report: Report) -> None:
        """Start the threads.

        Args:
            consumer: the consumer, already started.
            report: called once for each opened completion, after its `end` or `fail` or at
                shutdown; by a thread of the host, one call at a time.
        """
        self._spec = spec
        self._consumer = consumer
        self._report = report
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._tick = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._completions: dict[str, Completion] = {}
        self._waiting: dict[str, Completion] = {}
        """The completions that have ended and have no result, in the order of their deadlines."""
        self._ready: deque[Completion] = deque()
        self._results: deque[tuple[str, ConsumerResult]] = deque()
        self._pending = 0
        self._workers: set[_Worker] = set()
        self._stuck: set[_Worker] = set()
        self._clock_sleeps = False  # it waits without a deadline
        self._closing = self._stopping = self._stopped = False
        with self._lock:
            for _ in range(spec.limits.threads):
                self._add_worker()
        name = f"capture-{spec.name}-clock"
        self._clock = threading.Thread(target=self._keep_time, name=name, daemon=True)
        self._clock.start()

    @property
    def pending(self) -> int:
        """The number of completions that have ended and whose result is not reported yet."""
        with self._lock:
            return self._pending

    # -- from outside ---------------------------------------------------------------------------

    def open(self, request: RequestInfo) -> None:
        """Open a session for a completion.

        Raises:
            RuntimeError: the host is shut down, or has that completion open.
        """
        with self._lock:
            if self._closing:
                raise RuntimeError(f"capture consumer {self._spec.name!r} is shut down")
            if request.request_id in self._completions:
                raise RuntimeError(f"request {request.request_id!r} is open already")
            completion = self._completions[request.request_id] = Completion(request)
            if len(self._stuck) >= self._spec.limits.threads:
                completion.failure = (
                    f"consumer {self._spec.name!r} takes no requests: {len(self._stuck)} of its "
                    f"calls have not returned for {self._spec.limits.timeout:g} s"
                )
            else:
                self._call(completion, lambda completion: completion.open(self._consumer))

    def rows(self, request_id: str, batch: RowBatch, copies: Sequence[Future[None]] = ()) -> None:
        """Hand rows to a completion's session; they are dropped if it is not open, or has failed.

        Args:
            copies: the copies that fill the values; the session gets the rows when these are done.
        """
        with self._lock:
            completion = self._completions.get(request_id)
            if completion is not None and completion.failure is None and completion.end is None:
                self._call(completion, lambda completion: completion.take(batch, copies))

    def end(self, request_id: str, end: RequestEnd, aborted: bool = False) -> None:
        """End a completion, whose rows were all handed over, and have its result made.

        An end of a completion that is not open, or has ended, is ignored.
        """
        with self._lock:
            completion = self._completions.get(request_id)
            if completion is None or completion.end is not None:
                return
            completion.end, completion.ended_at = end, time.monotonic()
            self._pending += 1
            if completion.failure is not None:
                self._close(completion, "error", completion.failure)
                return
            self._waiting[request_id] = completion
            self._call(completion, lambda completion: self._do_end(completion, end, aborted))
            self._wake_clock()

    def fail(self, request_id: str, reason: str) -> None:
        """End a completion with an error, in place of `end`; its session drops what it made."""
        with self._lock:
            completion = self._completions.get(request_id)
            if completion is not None:
                self._fail(completion, reason, final=True)

    def shutdown(self, timeout: float) -> None:
        """Finish the completions that have ended, fail the others, then shut the consumer down.

        Args:
            timeout: seconds for all of it. A result that is not there by then is reported as an
                error, and threads that are stuck are left behind.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for completion in list(self._completions.values()):
                if completion.end is None:
                    self._fail(
                        completion, "the engine shut down before the request ended", final=True
                    )
            self._settled.wait_for(self._idle, timeout)
            for completion in list(self._completions.values()):
                self._fail(
                    completion, "the engine shut down before the result was there", final=True
                )
            self._stopping = True
            self._work.notify_all()
            threads = [worker.thread for worker in self._workers]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._stopped = True
            self._tick.notify_all()
        # It has results to report, and the consumer's shutdown is called there: no thread can be
        # started at the end of a program.
        self._clock.join(max(1.0, deadline - time.monotonic()))
        if self._clock.is_alive():
            name = self._spec.name
            logger.error("capture consumer %r did not shut down within %g s", name, timeout)

    # -- under the lock -------------------------------------------------------------------------

    def _idle(self) -> bool:
        busy = any(worker.completion is not None for worker in self._workers)
        return not (self._pending or self._ready or busy)

    def _call(self, completion: Completion, call: Call) -> None:
        """Have a thread make this call after the completion's earlier ones."""
        completion.calls.append(call)
        if not completion.scheduled:
            completion.scheduled = True
            self._ready.append(completion)
            self._work.notify()

    def _fail(self, completion: Completion, reason: str, final: bool = False) -> None:
        """Let a completion fail.

        Args:
            final: report it now, also if the completion has not ended.
        """
        if completion.closed:
            return
        if completion.failure is None:
            completion.failure = reason
            # What it waits for makes no difference any more, rows are let go.
            completion.calls.clear()
            drop = partial(completion.drop, reason)
            self._call(completion, lambda _: self._guarded(drop, "failed()"))
        if completion.end is not None or final:
            if completion.end is None:
                self._pending += 1
            self._close(completion, "error", completion.failure)

    def _close(
        self, completion: Completion, status: CaptureStatus, error: str | None, payload: Any = None
    ) -> None:
        """Decide a completion's result. Nothing of it is kept but a call of `failed`."""
        result = ConsumerResult(
            consumer=self._spec.name,
            status=status,
            error=error,
            payload=payload,
            rows=completion.rows,
            num_bytes=completion.num_bytes,
            seconds=time.monotonic() - completion.ended_at if completion.end is not None else 0.0,
        )
        completion.closed = True
        request_id = completion.request.request_id
        del self._completions[request_id]
        self._waiting.pop(request_id, None)
        self._results.append((request_id, result))
        self._tick.notify()

    def _add_worker(self) -> None:
        worker = _Worker(f"capture-{self._spec.name}", self._work_on)
        self._workers.add(worker)
        worker.thread.start()

    # -- the clock: deadlines and reports -------------------------------------------------------

    def _wake_clock(self) -> None:
        # Deadlines come in order, so one that the clock waits for is never later than a new one.
        if self._clock_sleeps:
            self._clock_sleeps = False
            self._tick.notify()

    def _keep_time(self) -> None:
        """Report results, and watch the deadlines; the clock's thread."""
        while True:
            with self._lock:
                deadline = self._expire(time.monotonic())
                if not self._results:
                    if self._stopped:
                        break
                    self._clock_sleeps = deadline is None
                    wait = None if deadline is None else max(0.0, deadline - time.monotonic())
                    self._tick.wait(wait)
                    continue
                request_id, result = self._results.popleft()
            try:
                self._report(request_id, result)
            except Exception:
                logger.exception("the result of request %r was not taken", request_id)
            del result
            with self._lock:
                self._pending -= 1
                self._settled.notify_all()
        self._guarded(self._consumer.shutdown, "shutdown()")

    def _expire(self, now: float) -> float | None:
        """Fail completions that are over time, and replace the threads that hang in them.

        Returns:
            The next deadline; None if nothing has one.
        """
        name, timeout = self._spec.name, self._spec.limits.timeout
        late = set()
        while self._waiting:
            completion = next(iter(self._waiting.values()))
            if completion.ended_at + timeout > now:
                break
            logger.error("capture consumer %r: %r timed out", name, completion.request.request_id)
            self._fail(completion, f"consumer {name!r} gave no result within {timeout:g} s")
            late.add(completion)
        for worker in list(self._workers):
            if worker.completion is None:
                continue
            if worker.since + timeout > now and worker.completion not in late:
                continue
            logger.error("a call of capture consumer %r does not return", name)
            self._fail(
                worker.completion, f"a call of consumer {name!r} took more than {timeout:g} s"
            )
            self._workers.remove(worker)
            self._stuck.add(worker)
            if len(self._stuck) <= self._spec.limits.threads:
                self._add_worker()
            self._settled.notify_all()
        starts = [worker.since for worker in self._workers if worker.completion is not None]
        starts += [completion.ended_at for completion in islice(self._waiting.values(), 1)]
        return min(starts) + timeout if starts else None

    # -- the threads ----------------------------------------------------------------------------

    def _work_on(self, worker: _Worker) -> None:
        """Make calls, one at a time; a worker's thread."""
        while True:
            with self._lock:
                while not self._ready:
                    if self._stopping:
                        return
                    self._work.wait()
                completion = self._ready.popleft()
                call = completion.calls.popleft()
                worker.completion, worker.since = completion, time.monotonic()
                self._wake_clock()
            try:
                call(completion)
            # Whatever a consumer raises, SystemExit too, ends its session only.
            except BaseException as error:
                self._raised(completion, error)
            del call
            with self._lock:
                worker.completion = None
                completion.scheduled = bool(completion.calls)
                if completion.scheduled:
                    self._ready.append(completion)
                    self._work.notify()
                del completion
                self._settled.notify_all()
                if worker in self._stuck:
                    self._stuck.remove(worker)
                    if len(self._workers) >= self._spec.limits.threads:
                        return  # it was replaced
                    self._workers.add(worker)

    def _raised(self, completion: Completion, error: BaseException) -> None:
        """Let a completion fail with what its session raised."""
        reason = describe(error)
        with self._lock:
            known = completion.failure is not None
            self._fail(completion, reason)
        if not known:
            who = (self._spec.name, completion.request.request_id)
            # A full disk says all in one line; where the consumer itself is wrong is in the trace.
            trace = None if isinstance(error, OSError) else error
            logger.error("capture consumer %r: request %r: %s", *who, reason, exc_info=trace)

    def _do_end(self, completion: Completion, end: RequestEnd, aborted: bool) -> None:
        payload = completion.finish(end, aborted)
        if isinstance(payload, Future):
            payload.add_done_callback(lambda done: self._on_future(completion, end, done))
        else:
            self._finish(completion, end, payload)

    def _on_future(self, completion: Completion, end: RequestEnd, done: Future[Any]) -> None:
        """Have a thread take the result, which the session's future has now."""
        with self._lock:
            if not completion.closed:
                self._call(
                    completion, lambda completion: self._finish(completion, end, done.result())
                )

    def _finish(self, completion: Completion, end: RequestEnd, payload: Any) -> None:
        """Report a payload; it must be plain data where it goes to another process."""
        if not self._spec.in_frontend:
            need_plain(payload)
        with self._lock:
            if not completion.closed:
                completion.session = completion.future = None
                status: CaptureStatus = "ok" if end.error is None else "partial_error"
                self._close(completion, status, end.error, payload)

    def _guarded(self, call: Callable[[], None], what: str) -> None:
        """Make a call whose error is only logged."""
        try:
            call()
        except BaseException:
            logger.exception("capture consumer %r: %s failed", self._spec.name, what)
