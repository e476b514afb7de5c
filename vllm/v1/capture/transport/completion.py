# SPDX-License-Identifier: Apache-2.0
"""One completion as a host handles it: the calls of its session, in their order."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.v1.capture.consumer import (
    CaptureConsumer,
    CaptureSession,
    ConsumerResult,
    RequestEnd,
    RequestInfo,
    RowBatch,
)
from vllm.v1.capture.copies import finished
from vllm.v1.interventions.errors import describe
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

Call = Callable[["Completion"], None]
"""A call of a session, to be made by a thread."""


@dataclass(eq=False)
class Completion:
    """One completion and the calls it waits for.

    All but `session`, `future` and the counts is guarded by the host's lock; the methods are called
    by one thread at a time, and raise what the consumer raises.
    """

    request: RequestInfo
    calls: deque[Call] = field(default_factory=deque)
    scheduled: bool = False
    """True if it is in the queue of ready completions, or in a thread's hands."""
    failure: str | None = None
    end: RequestEnd | None = None
    ended_at: float = 0.0
    closed: bool = False
    """True if its result is decided."""
    session: CaptureSession | None = None
    future: Future[Any] | None = None
    rows: int = 0
    num_bytes: int = 0

    def open(self, consumer: CaptureConsumer) -> None:
        """Have the consumer open a session."""
        self.session = consumer.open(self.request)

    def take(self, batch: RowBatch, copies: Sequence[Future[None]]) -> None:
        """Hand rows over, when the copies that fill them are done."""
        assert self.session is not None
        finished(copies)
        self.session.rows(batch)
        self.rows += batch.values.shape[0] * batch.values.shape[1]
        self.num_bytes += batch.values.numel() * batch.values.itemsize

    def finish(self, end: RequestEnd, aborted: bool) -> Any:
        """End the session; returns its result, or the future that will have it."""
        assert self.session is not None
        payload = self.session.aborted(end) if aborted else self.session.done(end)
        if isinstance(payload, Future):
            self.future = payload
        return payload

    def drop(self, reason: str) -> None:
        """Let the session drop what it made."""
        session, future = self.session, self.future
        self.session = self.future = None
        if future is not None:
            future.cancel()
        if session is not None:
            session.failed(reason)


def need_plain(payload: Any) -> None:
    """Raise TypeError unless a result can be sent to another process."""
    try:
        msgspec.msgpack.encode(payload)
        # What can be written may still be unreadable, and would end the frontend's stream.
        message = ConsumerResult("", "ok", payload=payload)
        MsgpackDecoder(ConsumerResult).decode(MsgpackEncoder().encode(message))
    except Exception as error:
        raise TypeError(f"the result is not plain data: {describe(error)}") from error
