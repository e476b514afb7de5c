# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph, recorded as torch does it, or without giving memory back. No GPU is needed: the
calls are watched. What graphs compute: tests/gpu/run.py."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm.v1.interventions.worker.variants.recording import emptied_once, recorded

pytestmark = pytest.mark.quick

GIVES_BACK = {"gc.collect", "torch.cuda.empty_cache", "torch._C._host_emptyCache"}
LIKEWISE = {
    "torch.cuda.synchronize",
    "self.stream_ctx.__enter__",
    "self.cuda_graph.capture_begin",
    "self.cuda_graph.capture_end",
    "self.stream_ctx.__exit__",
}
ANNOTATES = {"_enable_ann", "resolve_pending_annotations", "remap_to_exec_graph"}
"""Only if asked to, which no caller does."""


def test_torchs_recorder_does_nothing_else() -> None:
    """`recorded` does by itself what `torch.cuda.graph` does, to leave one thing out."""
    calls = set[str]()
    for method in (torch.cuda.graph.__enter__, torch.cuda.graph.__exit__):
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        calls |= {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls >= LIKEWISE, "torch.cuda.graph has other steps now: read it, and write `recorded`"
    new = calls - LIKEWISE - GIVES_BACK - ANNOTATES
    assert not new, f"torch.cuda.graph calls {new}, too: should `recorded`?"


class Graph:
    """Writes down what a recorder does with it."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def capture_begin(self, *arguments: Any, **more: Any) -> None:
        """As torch's."""
        self._calls.append(("begin", *arguments, *[value for value in more.values() if value]))

    def capture_end(self) -> None:
        """As torch's."""
        self._calls.append("end")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch is asked to do, in order."""
    made = list[Any]()

    @contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        made.append(stream)
        yield
        made.append("back")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: made.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    return made


def record(calls: list[Any]) -> None:
    graph: Any = Graph(calls)
    pool: Any = "pool"
    stream: Any = "stream"
    with recorded(graph, pool, stream):
        calls.append("launch")


STEPS = ["stream", ("begin", "pool", "thread_local"), "launch", "end", "back"]


def test_memory_is_given_back_once(calls: list[Any]) -> None:
    record(calls)
    assert calls == ["wait", "empty", "host", *STEPS]
    calls.clear()
    with emptied_once():
        record(calls)
        record(calls)
    assert calls == ["empty", *["wait", *STEPS] * 2]
    calls.clear()
    record(calls)
    assert calls == ["wait", "empty", "host", *STEPS]


def test_other_threads_give_back(calls: list[Any]) -> None:
    with emptied_once():
        calls.clear()
        thread = threading.Thread(target=record, args=(calls,))
        thread.start()
        thread.join()
    assert calls == ["wait", "empty", "host", *STEPS]


def test_a_recording_that_fails_ends(calls: list[Any]) -> None:
    graph: Any = Graph(calls)
    stream: Any = "stream"
    with emptied_once(), pytest.raises(ZeroDivisionError), recorded(graph, None, stream):
        raise ZeroDivisionError
    assert calls[-1] == "end"
