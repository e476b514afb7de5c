# SPDX-License-Identifier: Apache-2.0
"""Second stage of rules: a web address that is told when a rule of the operator fires.

A thread of its own sends, so a receiver that is slow, wrong or gone holds up no request: events
wait in a queue, and one that finds it full is counted and dropped.
"""

import hashlib
import hmac
import json
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import finalize, ref

import requests

from vllm.logger import init_logger
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.steering.rule_files import WebhookSettings

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

logger = init_logger(__name__)

MOST_TEXT = 1 << 16
"""Number of characters of a prompt, and of an answer, that an event has at most."""

LONGEST_WAIT = 30.0
"""Seconds that a try waits for the next at most; the first waits half a second, each later one
twice as long."""
MOST_LETTERS = 10_000
"""Number of dead letters at which no further one is written."""
AT_END = 5.0
"""Seconds that events have at the end of the engine; those left become dead letters."""

SENT, DEAD, DROPPED = "sent", "dead", "dropped"
"""Results of an event: the receiver has it; it is a dead letter; it is lost."""

_Queue = Queue[dict[str, Any] | None]


class Webhook:
    """Sends events, signed, in their order.

    A request to the receiver has the event as JSON. With a secret its headers have
    `X-Pilot-Timestamp` (Unix time, seconds) and `X-Pilot-Signature`: "sha256=" and the hex
    HMAC-SHA256 under the secret of the timestamp, a full stop and the body. An answer of 200-299 is
    a receipt; its body is not read, and redirects are not followed.

    Args:
        settings: where to, and how often.
    """

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings, self.results = settings, Counter[str]()
        self._taken = Counter[str]()
        self._queue: _Queue = Queue(settings.queue)
        sender = _Sender(settings, self._queue, self.results)
        self._thread = Thread(target=sender.run, name="rule-webhook", daemon=True)
        self._finalizer = finalize(self, _end, sender, self._thread)

    def tell(self, event: dict[str, Any]) -> None:
        """Queue an event; never waits. The first one starts the thread: an engine core may be
        forked from this process before, and should find one thread."""
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._queue.put_nowait(event)
        except Full:
            self.results[DROPPED] += 1
            logger.warning_once("the webhook of rules has %d events to send", self._queue.maxsize)

    def take(self) -> Counter[str]:
        """Return the number of events of each result since the last call."""
        now = Counter(self.results)
        new, self._taken = now - self._taken, now
        return new

    def shutdown(self) -> None:
        """Send what is queued, for a few seconds, and write the rest as dead letters."""
        self._finalizer()


def texts_of(state: "ref[RequestState]") -> dict[str, Any]:
    """Return the texts of a completion so far, of each at most the last `MOST_TEXT` characters."""
    if (found := state()) is None:
        return {}
    detokenizer, answer = found.detokenizer, ""
    if isinstance(detokenizer, BaseIncrementalDetokenizer):
        answer = detokenizer.output_text
    return {"prompt": (found.prompt or "")[-MOST_TEXT:], "answer": answer[-MOST_TEXT:]}


def _end(sender: "_Sender", thread: Thread) -> None:
    if thread.ident is None:
        return  # nothing was told
    sender.ending.set()
    with suppress(Full):  # a full queue wakes the thread, too
        sender.queue.put_nowait(None)
    thread.join(AT_END)
    if thread.is_alive():
        sender.bury_rest()


def _body(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode("utf-8", "replace")


class _Sender:
    """Work of the thread."""

    def __init__(self, settings: WebhookSettings, queue: _Queue, results: Counter[str]) -> None:
        self._settings, self.queue, self._results = settings, queue, results
        self.ending = Event()
        self._sending = b""
        secret = settings.secret_file
        self._secret = Path(secret).read_bytes().strip() if secret else b""

    def run(self) -> None:
        """Send events until the engine ends."""
        with requests.Session() as client:
            client.trust_env = False  # no proxy, and no password of ~/.netrc
            while not (self.ending.is_set() and self.queue.empty()):
                event = self.queue.get()
                if event is not None:
                    self._sending = _body(event)
                    sent = self._sent(client, self._sending)
                    self._results[SENT if sent else self._bury(self._sending)] += 1
                    self._sending = b""

    def bury_rest(self) -> None:
        """Write what is being sent, and all that waits, as dead letters."""
        bodies = [self._sending] if self._sending else []
        with suppress(Empty):
            while True:
                event = self.queue.get_nowait()
                bodies += [] if event is None else [_body(event)]
        self._results.update(self._bury(body) for body in bodies)

    def _sent(self, client: requests.Session, body: bytes) -> bool:
        """Send an event, again and again, and once when the engine ends; False if the receiver does
        not take it."""
        for attempt in range(self._settings.tries):
            if attempt and self.ending.wait(min(0.5 * 2 ** (attempt - 1), LONGEST_WAIT)):
                return False
            try:
                with client.post(
                    self._settings.url,
                    data=body,
                    headers=self._headers(body),
                    timeout=self._settings.timeout,
                    allow_redirects=False,
                    stream=True,  # so that the body is not read
                ) as answer:
                    if 200 <= answer.status_code < 300:
                        return True
                    reason = f"status {answer.status_code}"
            except requests.RequestException as error:
                reason = type(error).__name__
            logger.warning_once("the webhook of rules does not take an event: %s", reason)
        return False

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._secret:
            at = str(int(time.time()))
            signed = hmac.new(self._secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
            headers |= {"X-Pilot-Timestamp": at, "X-Pilot-Signature": f"sha256={signed}"}
        return headers

    def _bury(self, body: bytes) -> str:
        """Write a dead letter, if there is a folder with room."""
        if not self._settings.dead_letters:
            return DROPPED
        folder = Path(self._settings.dead_letters)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if sum(1 for _ in os.scandir(folder)) >= MOST_LETTERS:
                return DROPPED
            name = f"{time.time_ns()}-{uuid4().hex}"
            (folder / f".{name}").write_bytes(body)
            os.replace(folder / f".{name}", folder / f"{name}.json")
        except OSError as error:
            logger.warning_once("a dead letter of the webhook cannot be written: %s", error)
            return DROPPED
        return DEAD
