# SPDX-License-Identifier: Apache-2.0
"""The webhook of rules: what a receiver gets, and that one that is slow, wrong or gone hurts
nobody."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.interventions.frontend.test_rule_watch import MOST, PROMPT, RULE, chunk
from tests.support.plans import config_of, plan_of
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.results import webhook as module
from vllm.v1.interventions.frontend.results.watch import RuleWatches
from vllm.v1.interventions.frontend.results.webhook import Webhook
from vllm.v1.steering.rule_files import WebhookSettings, parse_operator_rules

pytestmark = pytest.mark.quick


class Receiver:
    """A server that answers with the next of some statuses; after the last it takes everything.
    0 closes the connection, None waits until `free` is set."""

    def __init__(self, *statuses: int | None) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.asked, self.free = 0, Event()
        left, receiver = list(statuses), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.asked += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = left.pop(0) if left else 200
                if status is None:
                    receiver.free.wait(20)
                    status = 200
                if not status:
                    self.close_connection = True
                    return
                if status == 200:
                    receiver.got.append((dict(self.headers), body))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"

    def close(self) -> None:
        self.free.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tries follow each other at once."""
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(module, "AT_END", 0.5)
    yield


def until(done: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    assert done()


def letters(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in sorted(folder.glob("*.json"))]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failures", [[], [500, 0, 302], [404]])
def test_events_come_in_order_signed_and_once(failures: list[int | None], tmp_path: Path) -> None:
    """Also where the receiver fails first: a redirect is a failure, and is not followed."""
    secret = tmp_path / "secret"
    secret.write_text("key\n")
    receiver = Receiver(*failures)
    hook = Webhook(WebhookSettings(receiver.url, str(secret), tries=4))
    for i in range(5):
        hook.tell({"i": i, "rule": "ü"})
    until(lambda: len(receiver.got) == 5)
    hook.shutdown()
    receiver.close()
    assert [json.loads(body) for _, body in receiver.got] == [
        {"i": i, "rule": "ü"} for i in range(5)
    ]
    assert receiver.asked == 5 + len(failures)
    for headers, body in receiver.got:
        said = headers["X-Pilot-Timestamp"].encode() + b"." + body
        made = {k: hmac.new(k, said, hashlib.sha256).hexdigest() for k in (b"key", b"other")}
        assert (
            headers["X-Pilot-Signature"] == f"sha256={made[b'key']}" != f"sha256={made[b'other']}"
        )
    assert hook.take() == {"sent": 5} and not hook.take()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kept", [True, False])
def test_what_nobody_takes_is_a_dead_letter(kept: bool, tmp_path: Path) -> None:
    receiver = Receiver(*[503] * 4)
    folder = str(tmp_path / "dead") if kept else ""
    hook = Webhook(WebhookSettings(receiver.url, tries=2, dead_letters=folder))
    for i in range(3):
        hook.tell({"i": i})
    until(lambda: len(receiver.got) == 1)
    hook.shutdown()
    receiver.close()
    assert [json.loads(body) for _, body in receiver.got] == [{"i": 2}]
    assert letters(tmp_path / "dead") == ([{"i": 0}, {"i": 1}] if kept else [])
    assert hook.take() == {"sent": 1, "dead" if kept else "dropped": 2}


@pytest.mark.usefixtures("quick")
def test_a_receiver_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    """Events beyond the queue are dropped at once, and counted; at the end what is left is
    written."""
    receiver = Receiver(None)
    hook = Webhook(WebhookSettings(receiver.url, queue=2, dead_letters=str(tmp_path)))
    hook.tell({"i": 0})
    until(lambda: receiver.asked == 1)
    start = time.monotonic()
    for i in range(1, 200):
        hook.tell({"i": i})
    assert time.monotonic() - start < 1
    assert hook.take() == {"dropped": 197}
    hook.shutdown()
    receiver.close()
    assert letters(tmp_path) == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_the_first_row_at_which_a_rule_of_the_operator_fires_is_told(tmp_path: Path) -> None:
    """Once for each rule and completion, when its token is given out; a request's own rules are
    not, nor what fires past the end, and texts only where they are wanted."""
    events: list[dict[str, Any]] = []

    class Told:
        settings = WebhookSettings("http://nowhere", text=True)
        tell = staticmethod(events.append)

    catalog = ModuleCatalog(config_of())
    ours = [{**RULE, "name": "ours"}, {**RULE, "name": "stops", "threshold": 1.0, "then": "stop"}]
    catalog.state.rules[""] = parse_operator_rules(ours, "rules", config_of(), {})
    plan = plan_of(rules=[{**RULE, "name": "own"}], max_tokens=MOST, catalog=catalog)
    assert plan is not None and plan.capture is not None
    hook: Any = Told()
    watches = RuleWatches(hook)
    watch = watches.open("a", plan.capture, PROMPT, MOST, lambda: {"answer": "so far"})
    assert watch is not None
    scores = np.full((3, 40), -1.0)
    scores[:, PROMPT + 1], scores[:, PROMPT + 3 :] = 0.5, 2.0
    for at in ([], [0, 1], [2, 3], [4]):
        if at:
            watches.add([chunk(plan.capture, {"a": [PROMPT + i for i in at]}, scores)])
        watch.judge(EngineCoreOutput("a", [7] * max(len(at), 1)), None)
    assert [(e["rule"], e["position"], e["score"]) for e in events] == [
        ("ours", PROMPT + 1, 0.5),
        ("stops", PROMPT + 3, 2.0),
    ]
    assert events[0]["answer"] == "so far" and events[0]["threshold"] == 0.0
    assert (events[1]["then"], events[1]["prompt_tokens"]) == ("stop", PROMPT)
