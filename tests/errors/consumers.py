# SPDX-License-Identifier: Apache-2.0
"""What is refused of `capture_consumers`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.errors.case import Case
from tests.support.consumers import Recorder
from vllm.config.capture import CaptureConfig
from vllm.v1.capture import registry
from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.registry import parse_consumers


class Misplaced(Recorder):
    location = "nowhere"  # type: ignore[assignment]


class Unfinished(CaptureConsumer):
    pass


def wrong(*values: Any, **says: str) -> Case:
    return Case(says, do=lambda: CaptureConfig(capture_consumers=list(values)))


def registered(target: str) -> Callable[[], object]:
    """A consumer "plug", as if `target` were its entry point."""

    def do() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(registry.BUILT_IN, "plug", target)
            return parse_consumers(["plug"])

    return do


def installed_twice() -> object:
    """A consumer of two distributions."""

    def entry_points(group: str, name: str = "") -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for value in ("a:A", "b:B")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", entry_points)
        return parse_consumers(["plug"])


CONSUMERS = [
    wrong("disk", given="'disk'", allowed="['callback', 'filesystem', 'inline', 'logging']"),
    wrong("inline", "inline", given="'inline'"),
    wrong({}, given="dict"),
    wrong({"name": 7}, given="7"),
    wrong({"name": "logging", 7: 7}, consumer="'logging'"),
    wrong({"name": "logging", "instance_name": "a/b"}, given="'a/b'"),
    wrong("logging:instance_name=inline", given="'inline'"),
    wrong({"name": "logging", "capture": "all"}, consumer="'logging'"),
    wrong("inline:root=3", consumer="'inline'", given="['root']"),
    wrong({"consumer": Recorder(), "root": 1}, consumer="'Recorder'", given="['root']"),
    wrong("{1: 2}", given="6"),
    wrong("logging:a='b", given="'logging'"),
    wrong("logging:a=b,c", given="2", consumer="'logging'"),
    wrong("logging:capture=all", given="'capture'", consumer="'logging'"),
    wrong("logging:threads=1,threads=2", given="'threads'"),
    Case({"consumer": "'plug'", "given": "['a:A', 'b:B']"}, do=installed_twice),
    Case({"consumer": "'plug'", "given": "no.such:X"}, do=registered("no.such:X")),
    Case({"consumer": "'plug'", "given": "type"}, do=registered("pathlib:Path")),
    wrong(Unfinished, consumer="'Unfinished'", given="Unfinished", allowed="['open']"),
    wrong(Misplaced, given="'nowhere'", allowed="('engine', 'frontend')"),
    wrong("logging:rot=a", consumer="'logging'"),
    wrong(
        "callback",
        allowed="['function', 'pending_bytes', 'max_request_bytes', 'timeout', 'threads']",
    ),
    wrong("logging:threads=0", consumer="'logging'", given="threads", reason="'0'"),
    wrong("logging:pending_bytes=10,max_request_bytes=11", allowed="10"),
    Case(
        {"consumer": "'callback'"},
        do=lambda: parse_consumers([{"name": "callback", "function": 7}])["callback"].make(),
    ),
]
