# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with stores: a process is killed, a disk is full, a server is away, a call hangs.

Nothing is reported `ok` that is not there, and under a final name is nothing but whole files.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.disks import small_disk
from tests.support.s3_server import s3_server
from tests.support.stored import (
    LAYOUTS,
    SITES,
    batch,
    context,
    finish,
    publish,
    request,
    same,
    started,
    whole,
)
from vllm.v1.capture import reader
from vllm.v1.capture.consumer import ConsumerResult, RequestEnd, RequestInfo
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.consumers.filesystem import store as module
from vllm.v1.capture.consumers.filesystem.shards import ShardEntry, Shards
from vllm.v1.capture.registry import ConsumerSpec, HostLimits
from vllm.v1.capture.transport.host import ConsumerHost

pytestmark = pytest.mark.full

PATIENCE = 60.0
"""Seconds until a test gives up waiting."""


# -- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_write_that_is_cut_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A system call may write a part of what it is given, and takes so many pieces at most."""
    calls = 0

    def some(descriptor: int, pieces: list[memoryview]) -> int:
        nonlocal calls
        calls += 1
        assert len(pieces) <= 3
        return os.write(descriptor, b"".join(pieces)[:most])

    monkeypatch.setattr(os, "writev", some)
    monkeypatch.setattr(module, "_MOST_PIECES", 3)
    values = np.arange(50, dtype=np.uint8)
    pieces: list[Any] = [b"head", values[:20].data, b"", values[20:21].data, values[21:].data, b""]
    module._write(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert calls >= {1: 54, 7: 8, 1 << 20: 2}[most]


# -- kill -9 ------------------------------------------------------------------------------------

KILLS = 6


def write_forever(root: str, layout: str, acknowledged: Connection) -> None:
    """Says the name of each request whose result is there. Several at a time, as a host does."""
    with started(root, layout=layout, flush_seconds=0.002) as consumer:

        def work(thread: int) -> None:
            for i in range(10**9):
                info = request(request_id=f"r{thread}.{i}", tag=f"t{i % 2}")
                publish(consumer, info, ((0, 1), (2, 3, 4)), seed=i)
                # Less than PIPE_BUF: it arrives whole.
                os.write(acknowledged.fileno(), f"r{thread}.{i}\n".encode())

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_in_the_middle(tmp_path: Path, layout: str) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["tests.support.stored", "tests.capture.test_filesystem_faults"]
    )
    random = np.random.default_rng()
    left_behind = total = 0
    for kill in range(KILLS):
        root = tmp_path / str(kill)
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=write_forever, args=(str(root), layout, theirs))
        child.start()
        theirs.close()
        said = os.read(ours.fileno(), 1 << 16)
        assert said, "it wrote nothing"
        # Not to synchronise: any moment is good.
        time.sleep(random.uniform(0, 0.03))
        child.kill()
        child.join()
        while more := os.read(ours.fileno(), 1 << 16):
            said += more
        acknowledged = set(said.decode().split())
        stored = {r.name: r for r in reader.open(str(root))}
        assert acknowledged <= stored.keys(), "a result was there before its file"
        for each in stored.values():
            i = int(each.name.split(".")[1])
            assert each.complete and each.tag == f"t{i % 2}"
            rows = [batch(request(), [0, 1], i), batch(request(), [2, 3, 4], i)]
            assert all(same(each.rows(*s), whole(rows, n)) for n, s in enumerate(SITES))
        files = [path for path in root.rglob("*") if path.is_file()]
        temporary = [p for p in files if ".tmp" in str(p)]
        assert all(path.suffix == ".safetensors" or path in temporary for path in files)
        left_behind += len(temporary)
        total += len(stored)
        # The next start goes on beside what was left behind.
        with started(str(root), layout=layout) as consumer:
            publish(consumer, request(request_id="after"))
        assert reader.open(str(root)).find("after").complete
    print(f"{layout}: {KILLS} kills, {total} requests stored, {left_behind} temporary files left")


# -- through the host ---------------------------------------------------------------------------


class Running:
    """A consumer in its host, and the results it gave."""

    def __init__(self, timeout: float, options: dict[str, Any]) -> None:
        self._there = threading.Condition()
        self._results: dict[str, ConsumerResult] = {}
        self._ids = count()
        consumer = FilesystemConsumer(**({"flush_seconds": 0.01} | options))
        consumer.start(context())
        limits = HostLimits(timeout=timeout, threads=2)
        spec = ConsumerSpec("filesystem", cls=FilesystemConsumer, limits=limits)
        self.host = ConsumerHost(spec, consumer, self._take)

    def _take(self, request_id: str, result: ConsumerResult) -> None:
        with self._there:
            self._results[request_id] = result
            self._there.notify_all()

    def send(self, info: RequestInfo, positions: list[int]) -> None:
        self.host.open(info)
        self.host.rows(info.request_id, batch(info, positions))
        self.host.end(info.request_id, RequestEnd(9))

    def result(self, info: RequestInfo) -> ConsumerResult:
        with self._there:
            key = info.request_id
            assert self._there.wait_for(lambda: key in self._results, PATIENCE)
            return self._results[key]

    def ask(self, name: str, positions: tuple[int, ...] = (0, 1), **more: Any) -> ConsumerResult:
        info = request(f"id{next(self._ids)}", request_id=name, **more)
        self.send(info, list(positions))
        return self.result(info)


@contextmanager
def running(timeout: float = PATIENCE, **options: Any) -> Iterator[Running]:
    each = Running(timeout, options)
    try:
        yield each
    finally:
        each.host.shutdown(PATIENCE)


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as mounted:
        if not mounted:
            pytest.skip("only root may mount a tmpfs; test_a_limit_on_files needs no rights")
        yield tmp_path / "disk"


def all_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk(tmpfs: Path, layout: str) -> None:
    with running(root=str(tmpfs / "root"), layout=layout) as consumer:
        assert consumer.ask("before").status == "ok"
        ballast = tmpfs / "ballast"
        with pytest.raises(OSError, match="No space"), open(ballast, "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        kept = all_files(tmpfs / "root")
        for name in ("a", "b"):
            result = consumer.ask(name, tuple(range(90)))
            assert (result.status, result.payload) == ("error", None)
            assert "No space left" in str(result.error)
        assert all_files(tmpfs / "root") == kept, "no temporary file is left, either"
        ballast.unlink()
        assert consumer.ask("a").status == "ok", "its name was given back"
    assert sorted(r.name for r in reader.open(str(tmpfs / "root"))) == ["a", "before"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_limit_on_files(tmp_path: Path, layout: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(root=str(tmp_path), layout=layout) as consumer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
        try:
            result = consumer.ask("big", tuple(range(90)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (result.status, result.error) == ("error", "OSError: [Errno 27] File too large")
        assert all_files(tmp_path) == []
        assert consumer.ask("big", tuple(range(90))).status == "ok"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_somebody_removes_the_folder(tmp_path: Path, layout: str) -> None:
    with running(root=str(tmp_path / "root"), layout=layout) as consumer:
        assert consumer.ask("a").status == "ok"
        shutil.rmtree(tmp_path / "root")
        assert consumer.ask("b").status == "ok"
    assert [r.name for r in reader.open(str(tmp_path / "root"))] == ["b"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_somebody_puts_a_file_in_the_folders_place(tmp_path: Path, layout: str) -> None:
    """That is not a name that is taken: another `request_id` would not help."""
    root = tmp_path / "root"
    with running(root=str(root), layout=layout) as consumer:
        root.rename(tmp_path / "elsewhere")
        root.write_text("")
        result = consumer.ask("a")
        assert result.status == "error"
        said = str(result.error)
        assert "is a file where a folder must be" in said or "Not a directory" in said
        assert "request_id" not in said
        root.unlink()
        assert consumer.ask("a").status == "ok"


def test_rows_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    with running(root=str(tmp_path)) as consumer:
        info = request(request_id="odd")
        consumer.host.open(info)
        wrong = batch(request(sites=SITES[:1]), [0])
        consumer.host.rows(info.request_id, wrong)
        consumer.host.end(info.request_id, RequestEnd(3))
        result = consumer.result(info)
        assert "rows are torch.bfloat16[1, 1, 8], expected torch.bfloat16[3, 1, 8]" in str(
            result.error
        )
        assert consumer.ask("fine").status == "ok"
    assert [r.name for r in reader.open(str(tmp_path))] == ["fine"]


def test_a_collision_is_an_error_result(tmp_path: Path) -> None:
    with running(root=str(tmp_path)) as consumer:
        assert consumer.ask("name").status == "ok"
        info = request("another", request_id="name")
        consumer.send(info, [5])
        result = consumer.result(info)
        assert result.status == "error"
        assert str(result.error).startswith(
            "CollisionError: default/name exists already: choose another"
        )
        assert str(tmp_path) not in str(result.error), "clients see no path of the server"
    assert reader.open(str(tmp_path)).find("name").rows(*SITES[0]).positions.tolist() == [0, 1]


# -- symbolic links -------------------------------------------------------------------------------


def links_to(target: Path, below: Path, layout: str) -> list[Path]:
    """Plant links at each name that a request of tag "t" and name "r" makes."""
    tag = below / "t"
    names = {"per_file": ["r"], "packed": ["r.safetensors"], "sharded": ["_shards"]}[layout]
    planted = [tag] if not tag.exists() else [tag / name for name in names]
    for link in planted:
        link.symlink_to(target)
    return planted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collision", ["error", "overwrite"])
def test_links_that_were_planted_are_not_followed(
    tmp_path: Path, layout: str, collision: str
) -> None:
    """A link to a folder elsewhere, in place of the tag's folder and of what is in it."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for kind in ("tag", "name"):
        for folder in (root, elsewhere):
            folder.mkdir()
        if kind == "name":
            (root / "t").mkdir()
        links = links_to(elsewhere, root, layout)
        with running(root=str(root), layout=layout, on_collision=collision) as consumer:
            result = consumer.ask("r", tag="t")
            assert consumer.ask("r", tag="other").status == "ok"
        assert list(elsewhere.iterdir()) == []
        replaced = kind == "name" and layout == "packed" and collision == "overwrite"
        assert (result.status == "ok") == replaced, result
        assert all(link.is_symlink() != replaced for link in links)
        shutil.rmtree(root)
        shutil.rmtree(elsewhere)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_links_that_are_planted_meanwhile_are_not_followed(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the tag is another when its file is written, and when it gets its name."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    write = module._write
    planted: list[Path] = []

    def plant(path: Path, pieces: Any) -> None:
        if not planted:
            (root / "t").rename(root / "moved")
            planted.extend(links_to(elsewhere, root, layout))
        write(path, pieces)

    with running(root=str(root), layout=layout) as consumer:
        monkeypatch.setattr(module, "_write", plant)
        consumer.ask("r", tag="t")
        assert "Not a directory" in str(consumer.ask("r2", tag="t").error)
    assert planted
    assert list(elsewhere.iterdir()) == []
    assert len(all_files(root / "moved")) == (len(SITES) if layout == "per_file" else 1)


# -- stores that fail and hang ------------------------------------------------------------------


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
    with running(root=odd, layout=layout, timeout=0.5) as consumer:
        slow = request("id.slow", request_id="s", tag="slow")
        consumer.send(slow, [0])
        assert hanging.wait(PATIENCE)
        for i in range(5):
            assert consumer.ask(f"quick{i}").status == "ok"
        result = consumer.result(slow)
        assert result.status == "error"
        assert "0.5 s" in str(result.error)
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
    impatient = {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 1}}
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


def test_a_withdrawn_request_leaves_nothing(tmp_path: Path) -> None:
    """Written, but given up before that was reported."""
    for layout in ("per_file", "packed"):
        with started(str(tmp_path), layout=layout) as consumer:
            session = consumer.open(request(request_id="late"))
            session.rows(batch(request(), [0]))
            finish(session)
            assert all_files(tmp_path)
            session.failed("no time")
        assert all_files(tmp_path) == []
