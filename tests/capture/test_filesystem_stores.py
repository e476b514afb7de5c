# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with stores that are not folders: they fail, hang, lie and go away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.consumers import PATIENCE, SHORT, limit
from tests.support.s3_server import s3_server
from tests.support.stored import LAYOUTS, batch, request, started
from tests.support.stored_host import running
from vllm.v1.capture import reader
from vllm.v1.capture.consumer import RequestEnd
from vllm.v1.capture.consumers.filesystem.shards import ShardEntry, Shards

pytestmark = pytest.mark.full


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class OddStore(MemoryFileSystem):
    """Puts fail or hang where `trouble` says so."""

    protocol = "odd"
    lie: ClassVar[str] = ""
    trouble: ClassVar[Callable[[str], None]] = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(MemoryFileSystem._strip_protocol(str(path).removeprefix("odd://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        type(self).trouble(path)
        if type(self).lie == "keeps less":
            value = value[: -len(value) // 4]
        super().pipe_file(path, value, mode=mode, **more)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **more)
        return content[:-1] if type(self).lie == "gives less" else content

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **more)
        sizes = {"too large": 8, "too small": -8}
        if found["type"] == "file" and type(self).lie in sizes:
            return {**found, "size": found["size"] + sizes[type(self).lie]}
        return {**found, "size": None} if type(self).lie == "of no size" else found


fsspec.register_implementation("odd", OddStore, clobber=True)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr(OddStore, "trouble", staticmethod(lambda path: None))
    yield f"odd:/{tmp_path}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_fails_and_recovers(odd: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()
    puts = iter(range(100))

    def fail(path: str) -> None:
        # Not the first: of several files some are there then.
        if failing.is_set() and next(puts):
            raise ConnectionError("the store is away")

    monkeypatch.setattr(OddStore, "trouble", staticmethod(fail))
    with running(root=odd, layout=layout) as consumer:
        assert consumer.ask("first").status == "ok"
        failing.set()
        if layout != "per_file":
            next(puts)
        result = consumer.ask("second")
        assert (result.status, result.error) == ("error", "ConnectionError: the store is away")
        assert [r.name for r in reader.open(odd)] == ["first"]
        failing.clear()
        assert consumer.ask("second").status == "ok"
    stored = list(reader.open(odd))
    assert sorted(r.name for r in stored) == ["first", "second"] and all(r.complete for r in stored)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_hangs(odd: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is an error in time; others are not affected, and nothing appears when it comes back."""
    hanging, back, dropped = threading.Event(), threading.Event(), threading.Event()
    drop = Shards.drop

    def hang(path: str) -> None:
        if "/slow/" in path:
            hanging.set()
            assert back.wait(PATIENCE)

    def noted(shards: Shards, entry: ShardEntry) -> None:
        drop(shards, entry)
        dropped.set()

    monkeypatch.setattr(Shards, "drop", noted)
    monkeypatch.setattr(OddStore, "trouble", staticmethod(hang))
    with running(root=odd, layout=layout) as consumer:
        slow = request("id.slow", request_id="s", tag="slow")
        consumer.send(slow, [0])
        assert hanging.wait(PATIENCE)
        for i in range(5):
            assert consumer.ask(f"quick{i}").status == "ok"
        limit(consumer.host, SHORT)
        result = consumer.result(slow)
        assert result.status == "error"
        assert f"{SHORT} s" in str(result.error)
        limit(consumer.host, PATIENCE)
        # A shard's writer learns of it a moment after the result is out.
        assert layout != "sharded" or dropped.wait(PATIENCE)
        back.set()
        eventually(lambda: not consumer.host._stuck)
        # What came late is taken away, and then the tag works as any.
        fs, root = fsspec.core.url_to_fs(odd)
        eventually(lambda: not fs.exists(f"{root}/slow") or not fs.find(f"{root}/slow"))
        assert consumer.ask("later", tag="slow").status == "ok"
    assert sorted(r.name for r in reader.open(odd)) == ["later", *(f"quick{i}" for i in range(5))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lie", ["keeps less", "gives less", "too large", "too small", "of no size"]
)
def test_a_store_lies(odd: str, layout: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader says so and names the file; it never gives out what is not there."""
    monkeypatch.setattr(OddStore, "lie", lie if lie == "keeps less" else "")
    with running(root=odd, layout=layout) as consumer:
        assert consumer.ask("a").status == "ok"
    monkeypatch.setattr(OddStore, "lie", lie)

    def read() -> None:
        for stored in reader.open(odd):
            for site in stored.sites:
                assert len(stored.rows(*site)) == 2

    with pytest.raises(reader.CaptureFileError, match=r"\.safetensors: "):
        read()
    monkeypatch.setattr(OddStore, "lie", "")
    if lie != "keeps less":
        read()  # the twin


def test_those_who_share_a_shard_with_one_given_up(
    odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers late: the shard is written again without the session that failed."""
    hanging, back = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        hanging.set()
        assert back.wait(PATIENCE)

    monkeypatch.setattr(OddStore, "trouble", staticmethod(hang))
    with started(odd, layout="sharded", flush_seconds=0.2) as consumer:
        sessions, futures = {}, {}
        for name in ("kept", "given-up"):
            sessions[name] = consumer.open(request(request_id=name))
            sessions[name].rows(batch(request(), [0, 1]))
            futures[name] = sessions[name].done(RequestEnd(3))
        assert hanging.wait(PATIENCE)
        sessions["given-up"].failed("no time")
        assert not futures["kept"].done()
        back.set()
        [path] = futures["kept"].result(PATIENCE)["paths"]
    assert [r.name for r in reader.open(odd)] == ["kept"]
    fs, root = fsspec.core.url_to_fs(odd)
    assert fs.find(root) == [f"{root}/{path}"]


def test_a_server_goes_away_and_comes_back() -> None:
    """A real one that speaks S3; moto keeps what it has."""
    impatient = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 60}}
    with s3_server("faults") as server:
        options = server.options | impatient
        with running(root="s3://faults/x", storage_options=options) as consumer:
            assert consumer.ask("before").status == "ok"
            server.stop()
            result = consumer.ask("during")
            assert (result.status, result.payload) == ("error", None)
            server.start()
            assert consumer.ask("during").status == "ok"
        names = sorted(r.name for r in reader.open("s3://faults/x", options))
    assert names == ["before", "during"]
