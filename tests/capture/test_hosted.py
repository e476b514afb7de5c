# SPDX-License-Identifier: Apache-2.0
"""The consumers of one process, and what they get of a completion: engine core and frontend do it
with the same two classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.collecting import PROMPT_IDS, chunk, plan_for
from tests.support.consumers import PATIENCE, Recorder
from tests.support.plans import config_of
from vllm.v1.capture.consumer import ConsumerContext
from vllm.v1.capture.transport.hosted import Feeds, HostedConsumers

pytestmark = pytest.mark.quick


class Started(Recorder):
    """Of the engine core, as it is given as a class; it says how it was started."""

    location = "engine"
    contexts: list[ConsumerContext] = []  # noqa: RUF012

    def start(self, context: ConsumerContext) -> None:
        """As every consumer."""
        self.contexts.append(context)


def given(*consumers: Recorder, engine_index: int = 0) -> Any:
    """A config with an `inline`, these consumers called "a" and "b", and "core"."""
    named = [{"consumer": c, "instance_name": n} for n, c in zip("ab", consumers, strict=False)]
    core = {"consumer": Started, "instance_name": "core"}
    config = config_of(capture_consumers=["inline", *named, core])
    model: Any = SimpleNamespace(model="m")
    config.model_config = model
    config.parallel_config.data_parallel_index = engine_index
    return config


@pytest.fixture
def hosted() -> Iterator[tuple[HostedConsumers, Recorder, Recorder, list[Any]]]:
    """A frontend's consumers "a" and "b", and what they reported."""
    first, second, results = Recorder(), Recorder(), list[Any]()
    made = HostedConsumers("test")
    made.start(given(first, second), lambda *told: results.append(told), in_frontend=True)
    yield made, first, second, results
    made.shutdown()
    assert first.down.is_set() and second.down.is_set()


def feeds_of(hosted: HostedConsumers, hold: bool = False) -> Feeds:
    return Feeds(
        hosted, "r", plan_for("all", a="all", b="all_prompt", core="all"), PROMPT_IDS, hold
    )


def settled(hosted: HostedConsumers) -> None:
    """Wait for what was given to consumers."""
    for host in hosted.hosts.values():
        with host._lock:
            assert host._settled.wait_for(host._idle, PATIENCE)


@pytest.mark.parametrize("in_frontend", [True, False])
def test_a_process_starts_its_own(in_frontend: bool) -> None:
    Started.contexts.clear()
    hosted = HostedConsumers("test")
    hosted.start(given(Recorder(), engine_index=3), lambda *_: None, in_frontend=in_frontend)
    assert set(hosted.hosts) == ({"a"} if in_frontend else {"core"})
    assert [(c.name, c.engine_index) for c in Started.contexts] == [("core", 3)] * (not in_frontend)
    assert bool(feeds_of(hosted))
    hosted.shutdown()


def test_without_taps_none_starts() -> None:
    hosted, config = HostedConsumers("test"), given(Recorder())
    config.tap_shape = None
    hosted.start(config, lambda *_: None, in_frontend=True)
    assert not hosted.hosts and not feeds_of(hosted)


def test_a_session_opens_when_it_gets_something(hosted: Any) -> None:
    consumers, first, second, results = hosted
    feeds = feeds_of(consumers)
    feeds.deliver(chunk([]), [])
    settled(consumers)
    assert not first.calls and not second.calls
    feeds.deliver(chunk([0, 1]), [])
    feeds.deliver(chunk([2, 3, 4]), [200])
    feeds.deliver(chunk([5]), [200, 201])
    feeds.finish(7, aborted=False, failed="")
    assert not feeds
    feeds.finish(7, aborted=True, failed="")
    settled(consumers)
    assert first.calls == {"r": [[0, 1], [2, 3, 4], [5], "done"]}
    assert second.calls == {"r": [[0, 1], [2, 3, 4], "done"]}
    assert sorted((name, r.consumer, r.status) for name, r in results) == [
        ("r", "a", "ok"),
        ("r", "b", "ok"),
    ]


def test_a_consumer_without_room_gets_nothing(hosted: Any) -> None:
    consumers, first, second, results = hosted
    feeds = feeds_of(consumers)
    feeds.drop("a")
    feeds.drop("core")  # which runs elsewhere
    feeds.deliver(chunk([0, 1]), [])
    settled(consumers)
    feeds.finish(2, aborted=False, failed="the engine failed the request")
    settled(consumers)
    assert not first.calls
    assert second.calls["r"][-1] == ("failed", "the engine failed the request")
    assert [(r.consumer, r.status) for _, r in results] == [("b", "error")]


def test_sessions_can_be_open_before_rows_come(hosted: Any) -> None:
    """In an engine core a request is admitted with its reserved bytes; generated rows are held back
    there, as it may turn out to end before them."""
    consumers, first, _, results = hosted
    feeds = feeds_of(consumers, hold=True)
    assert feeds.open("a") is feeds.open("a") is consumers.hosts["a"]
    settled(consumers)
    assert first.calls == {"r": []}
    feeds.deliver(chunk([0, 1, 2, 3, 4, 5, 6]), [200, 201, 202])
    settled(consumers)
    assert first.calls == {"r": [[0, 1, 2, 3, 4]]}
    feeds.finish(7, aborted=False, failed="")
    settled(consumers)
    assert first.calls == {"r": [[0, 1, 2, 3, 4], [5], "done"]} and len(results) == 2
