# SPDX-License-Identifier: Apache-2.0
"""Two API server processes over two data-parallel engines: all know a change when its call returns,
every answer is its twin's under many clients, one that stops holds nobody up, a disk that is full
is an error of its consumer's results alone, and no link is followed.

Each request has a connection of its own, so that the kernel spreads them over the processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
import pytest

from benchmarks import serve_soak
from tests.conformance.models import HIDDEN
from tests.http.server import KEY, Server, greedy, save_model, serve
from tests.support.disks import small_disk
from tests.support.serving import vector
from tests.support.stored import LAYOUTS
from vllm.entrypoints.serve.steering.client import pack_layers, read_rows
from vllm.v1.capture import reader

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

PROMPT = "Today I went"
READ = {"inline": {"hooks": {"post_block": [1]}, "positions": [0]}}
ALL = {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}
CLIENTS = 8
PER_CHANGE = 12
STOPPED_SECONDS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def disk(folder: Path) -> Iterator[Path]:
    """A disk of 4 MiB, if this may be mounted; else a folder."""
    with small_disk(folder / "disk", "4m"):
        yield folder / "disk"


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, folder: Path, disk: Path) -> Iterator[Server]:
    small = {"name": "filesystem", "instance_name": "small", "root": str(disk / "acts")}
    model = save_model(tiny_models, folder / "model")
    options = (
        "--api-server-count=2",
        "--data-parallel-size=2",
        "--enable-log-requests",
        f"--capture-landing-bytes={1 << 20}",
        f"--capture-consumers=filesystem:root={folder / 'acts'}",
        f"--capture-consumers={json.dumps(small)}",
        f"--rules={folder / 'rules.json'}",
    )
    (folder / "rules.json").write_text('{"rules": []}')
    with serve(model, folder / "server.log", *options, cold=True) as started:
        yield started


def vectors(seed: int) -> dict[str, Any]:
    return {"post_block": pack_layers({1: vector(seed).numpy()})}


def first_rows(server: Server, **fields: Any) -> list[np.ndarray]:
    """The row of the first position, asked for many times at once."""

    def ask(_: int) -> np.ndarray:
        body = greedy(prompt=PROMPT, max_tokens=1, capture=READ, **fields)
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        payload = answer.json()["choices"][0]["capture_results"]["inline"]["payload"]
        return read_rows(payload)["post_block", 1].values[0]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(PER_CHANGE)))


def moved_by(rows: list[np.ndarray], plain: np.ndarray) -> list[np.ndarray]:
    return [row - plain for row in rows]


def test_all_processes_and_engines_follow(server: Server) -> None:
    plain, *others = first_rows(server)
    assert all(np.array_equal(plain, other) for other in others)
    for seed in (1, 2):
        # Registered anew under one name: nobody may go on with what it meant before.
        body = {"name": "m", "vectors": vectors(seed)}
        assert server.change("/v1/steering/modules", body).status_code == 200
        for delta in moved_by(first_rows(server, steering_modules=["m"]), plain):
            np.testing.assert_allclose(delta, vector(seed).numpy(), atol=1e-4)
    version = server.change("/v1/steering/set", {"vectors": vectors(3)}).json()["version"]
    for delta in moved_by(first_rows(server), plain):
        np.testing.assert_allclose(delta, vector(3).numpy(), atol=1e-4)
    states = [server.get("/v1/steering").json() for _ in range(8)]
    assert {state["version"] for state in states} == {version}
    assert {state["engines"] for state in states} == {2}
    assert server.change("/v1/steering/clear", {}).status_code == 200
    assert all(np.array_equal(plain, row) for row in first_rows(server))


def test_rules_of_all_processes_and_engines(server: Server) -> None:
    """Whoever answers, the rules are those of the last call that returned."""

    def ask(_: int) -> tuple[int, str | None]:
        answer = server.complete(max_tokens=8)
        choice = answer["choices"][0]
        return answer["usage"]["completion_tokens"], choice["stop_reason"]

    rule = {"point": "post_block", "layer": 1, "probe": [0.0] * HIDDEN, "then": "stop"}
    for number in range(4):
        rules = [{"name": f"r{number}", "threshold": -1.0, "need": number + 1, **rule}]
        answer = server.change("/v1/steering/rules", {"rules": rules})
        assert answer.json() == {"rules": [f"r{number}"]}
        with ThreadPoolExecutor(4) as pool:
            answered = set(pool.map(ask, range(PER_CHANGE)))
        assert answered == {(number + 1, f"rule:r{number}")}
        told = [server.get("/v1/steering/rules", **{"X-Steering-Key": KEY}) for _ in range(8)]
        assert {each.json()["rules"][0]["name"] for each in told} == {f"r{number}"}
    assert server.change("/v1/steering/rules", {"rules": []}).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(PER_CHANGE))) == {(8, None)}


def test_changes_at_once_are_all_made_or_refused(server: Server) -> None:
    before = server.get("/v1/steering").json()["version"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda n: server.change("/v1/steering/set", {"vectors": vectors(n)}), range(8))
        )
    versions = sorted(answer.json()["version"] for answer in answers)
    assert versions == list(range(before + 1, before + 9))
    assert {server.get("/v1/steering").json()["version"] for _ in range(8)} == {before + 8}
    server.change("/v1/steering/clear", {})


def test_a_module_that_went_is_a_400_everywhere(server: Server) -> None:
    body = {"name": "gone", "vectors": vectors(1)}
    assert server.change("/v1/steering/modules", body).status_code == 200
    first_rows(server, steering_modules=["gone"])
    url = f"{server.url}/v1/steering/modules/gone"
    assert httpx.delete(url, headers={"X-Steering-Key": KEY}, timeout=300).status_code == 200
    for _ in range(PER_CHANGE):
        answer = server.post("/v1/completions", greedy(prompt=PROMPT, steering_modules=["gone"]))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "steering_modules[0]"


def test_every_answer_is_its_twins(server: Server, folder: Path) -> None:
    asks = serve_soak.make_asks(folder / "model", 12, seed=2)
    jobs = serve_soak.draw_jobs(asks, 200, seed=2)
    assert {job.mode for job in jobs} == serve_soak.MODES.keys()
    lines = serve_soak.soak(
        server.url, KEY, asks, folder / "acts", jobs, clients=8, pid=server.process.pid
    )
    report = list(lines)
    print("\n".join(report))
    assert not report[-1], "\n".join(report)


def test_an_api_server_that_stops_holds_up_only_its_own_clients(server: Server) -> None:
    """Rows that landed for it are in memory that both engines and the other one use."""
    (want, *_) = first_rows(server)
    stopped = api_server(server, 1)
    ended = threading.Event()

    def ask() -> None:
        body = greedy(prompt=PROMPT, max_tokens=40, capture=ALL)
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        payload = answer.json()["choices"][0]["capture_results"]["inline"]["payload"]
        assert np.array_equal(read_rows(payload)["post_block", 1].values[0], want)

    def go_on(_: int) -> int:
        answered = 0
        while not ended.is_set():
            ask()
            answered += 1
        return answered

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(go_on, client) for client in range(CLIENTS)]
        time.sleep(2)
        stopped.suspend()
        try:
            # It accepts nobody, and whoever it had accepted waits. A request that hung would fail.
            until, newcomers = time.monotonic() + STOPPED_SECONDS, 0
            while newcomers < CLIENTS or time.monotonic() < until:
                ask()
                newcomers += 1
            assert stopped.status() == psutil.STATUS_STOPPED
        finally:
            stopped.resume()
            ended.set()
        answered = [one.result() for one in asked]
    print(f"{newcomers} newcomers were answered; answers of those who were there: {answered}")
    assert all(answered)
    assert all(np.array_equal(want, row) for row in first_rows(server))


def results_of(server: Server, tags: list[str]) -> list[dict[str, Any]]:
    """The results of requests for both disks, all sent at once, one for each tag; inline has its
    rows whatever the others say."""
    [want] = first_rows(server)[:1]

    def ask(number: int) -> dict[str, Any]:
        tag, layout = tags[number], LAYOUTS[number % 3]
        stored = {**ALL["inline"], "tag": tag, "request_id": f"r{number}", "layout": layout}
        capture = {**READ, "filesystem": stored, "small": stored}
        answer = server.post("/v1/completions", greedy(prompt=PROMPT, capture=capture))
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        results: dict[str, Any] = choice["capture_results"]
        rows = read_rows(results["inline"]["payload"])["post_block", 1]
        assert np.array_equal(rows.values[0], want)
        assert results["filesystem"]["status"] == "ok", results["filesystem"]
        return results

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(len(tags))))


def test_a_disk_is_full_or_read_only_behind_both(server: Server, disk: Path) -> None:
    """Errors of that disk's results, of each engine's; all is well again when the disk is."""
    if not disk.is_mount():
        pytest.skip("only root may mount a tmpfs")

    def said(tag: str) -> set[str]:
        results = [each["small"] for each in results_of(server, [tag] * PER_CHANGE)]
        names = {f"r{n}" for n, result in enumerate(results) if result["status"] == "ok"}
        stored = [r for r in reader.open(str(disk / "acts")) if r.tag == tag]
        assert {r.name for r in stored if r.complete} == names
        return {result["error"] for result in results}

    assert said("before") == {None}
    with pytest.raises(OSError, match="No space"), open(disk / "ballast", "wb", 0) as ballast:
        while True:
            ballast.write(bytes(4096))
    assert all(str(error).endswith("No space left on device") for error in said("full"))
    (disk / "ballast").unlink()
    assert said("emptied") == {None}
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        errors = said("read-only")
        assert all("Read-only file system" in str(error) for error in errors), errors
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert said("after") == {None}
    assert not list(disk.rglob("*.tmp"))


def test_links_below_a_root_of_both_are_not_followed(
    server: Server, disk: Path, folder: Path
) -> None:
    """Planted before, and while both engines make folders of those names."""
    root, elsewhere = disk / "acts", folder / "elsewhere"
    root.mkdir(exist_ok=True)
    elsewhere.mkdir()
    (root / "planted").symlink_to(elsewhere)
    raced, ended = [f"raced{n}" for n in range(PER_CHANGE)], threading.Event()

    def plant() -> int:
        links = [root / tag for tag in raced]
        while not ended.is_set():
            for link in links:
                if link.is_dir() and not link.is_symlink():
                    link.rename(link.with_name(f"{link.name}-{time.monotonic_ns()}"))
                    link.symlink_to(elsewhere)
        return sum(link.is_symlink() for link in links)

    with ThreadPoolExecutor(1) as pool:
        planting = pool.submit(plant)
        try:
            results = results_of(server, [*raced, "planted", "free"] * 3)
        finally:
            ended.set()
        assert planting.result(), "no link was planted in time"
    *_, planted, free = results
    assert planted["small"]["status"] == "error" and free["small"]["status"] == "ok"
    print("raced:", [each["small"]["error"] for each in results])
    assert list(elsewhere.rglob("*")) == []


def api_server(server: Server, number: int) -> psutil.Process:
    """By the name that its lines of the log begin with."""
    named = re.search(rf"\(ApiServer_{number} pid=(\d+)\)", server.log.read_text())
    assert named is not None
    return psutil.Process(int(named[1]))


def test_both_processes_served(server: Server) -> None:
    log = server.log.read_text()
    for name in ("ApiServer_0", "ApiServer_1"):
        assert any(name in line and "Received request" in line for line in log.splitlines())
