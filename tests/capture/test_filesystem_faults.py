# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with folders: a process is killed, a disk is full, links are planted.

Nothing is reported `ok` that is not there, and under a final name is nothing but whole files.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import warm
from tests.support.disks import small_disk
from tests.support.stored import (
    LAYOUTS,
    SITES,
    batch,
    finish,
    publish,
    request,
    same,
    started,
    whole,
)
from tests.support.stored_host import all_files, running
from vllm.v1.capture import reader
from vllm.v1.capture.consumer import RequestEnd
from vllm.v1.capture.consumers.filesystem import store as module

pytestmark = pytest.mark.full

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
    processes = warm.context()
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


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as mounted:
        if not mounted:
            pytest.skip("only root may mount a tmpfs; test_a_limit_on_files needs no rights")
        yield tmp_path / "disk"


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
