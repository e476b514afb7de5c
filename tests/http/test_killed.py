# SPDX-License-Identifier: Apache-2.0
"""Two API servers of one engine: answers that nobody reads, a process that stops while rows fill
the landing, and one that is killed with requests of each kind under way."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from benchmarks.server_state import resident, settled
from tests.conformance.models import HIDDEN
from tests.http.server import Server, greedy, save_model, serve
from tests.support.serving import vector
from vllm.config.points import CAPTURE_POINTS, STREAM_POINTS
from vllm.entrypoints.serve.steering.client import pack, pack_layers
from vllm.v1.capture import reader

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

PATIENCE = 300
"""Seconds until a client gives up: one that hangs would wait for ever."""
STOPPED_SECONDS = 20
LANDING = 64 << 20
PROMPT = "Today I went"
TOKENS = 80
VECTORS = {"post_block": pack_layers({1: vector(1).numpy()})}
ROWS = {"hooks": {"post_block": "all"}, "positions": "all"}
EVERYTHING = {
    "hooks": {p: "all" for p in STREAM_POINTS},
    "positions": "all",
}
ABLATE = {
    "op": "ablate",
    "point": "post_block",
    "layers": [1],
    "direction": pack(vector(2).numpy()),
}
RULE = {"name": "r", "point": "post_block", "layer": 1, "probe": [0.1] * HIDDEN, "threshold": 0.0}
WEIGHTS = {"heads": "all", "queries": "all", "give": ["weights"]}
FOCUS = {"op": "focus", "layers": "all", "span": [1, 2], "factor": 3.0}
CHAT = [{"role": "user", "content": PROMPT}]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "completions": {"n": 3, "temperature": 1.0, "logprobs": 5},
    "vectors": {"steering_vectors": VECTORS},
    "module": {"steering_modules": ["known"]},
    "operations": {"steering": [ABLATE]},
    "focus": {"steering": [FOCUS]},
    "rows": {"capture": {"inline": ROWS}},
    "rows, streamed": {"capture": {"inline": ROWS}, "stream": True},
    "many rows": {"capture": {"inline": EVERYTHING}, "prompt": [PROMPT] * 8},
    "means": {"capture": {"inline": {**ROWS, "positions": "all_prompt", "reduce": "mean"}}},
    "weights": {"capture": {"inline": {"attention": WEIGHTS}}},
    "lens": {"capture": {"inline": {**ROWS, "lens": {"name": "logit", "top_k": 2}}}},
    "files": {"capture": {"filesystem": ROWS}},
    "rules": {"rules": [RULE]},
}  # fmt: skip
"""Bodies of completions."""


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Each process that is to be killed has a server of its own."""
    folder = tmp_path_factory.mktemp("killed")
    options = (
        "--api-server-count=2",
        f"--capture-landing-bytes={LANDING}",
        f"--capture-consumers=filesystem:root={folder / 'acts'}",
        "--capture-lens=logit",
        *("--steering-families", "add", "ablate", "focus"),
        *("--capture-points", *CAPTURE_POINTS),
    )
    with serve(
        save_model(tiny_models, folder / "model"), folder / "server.log", *options, cold=True
    ) as made:
        assert made.change("/v1/steering/modules", {"name": "known", "vectors": VECTORS}).is_success
        yield made


def process_of(server: Server, name: str) -> psutil.Process:
    """By the name that its lines of the log begin with."""
    named = re.search(rf"\({name} pid=(\d+)\)", server.log.read_text())
    assert named is not None, f"{name} wrote no line"
    return psutil.Process(int(named[1]))


def body_of(kind: str) -> dict[str, Any]:
    return greedy(**{"prompt": PROMPT, "max_tokens": TOKENS, **KINDS[kind]})


def send(server: Server, kind: str) -> httpx.Response:
    """The answer to a completion of a kind, a chat of the same fields, or a change."""
    if kind == "change":
        name = f"m{threading.get_ident()}"
        return server.change("/v1/steering/modules", {"name": name, "vectors": VECTORS})
    if kind == "sweep":
        added = {"op": "add", "vector": pack(vector(3).numpy())}
        return server.post("/v1/steering/sweep", {"prompt": PROMPT, "op": added, "answer": "a"})
    if kind == "chat":
        body = body_of("rows")
        del body["prompt"]
        return server.post("/v1/chat/completions", {**body, "messages": CHAT})
    return server.post("/v1/completions", body_of(kind))


def said(answer: httpx.Response) -> list[tuple[str, str, int]]:
    """Of each completion its text, and the status and the rows of what it captured."""
    assert answer.status_code == 200, answer.text
    results = [(c["text"], c["capture_results"]["inline"]) for c in answer.json()["choices"]]
    return [
        (text, result["status"], sum(len(entry["positions"]) for entry in result["payload"]))
        for text, result in results
    ]


@pytest.mark.parametrize("server", ["EngineCore"], indirect=True)
def test_answers_that_nobody_reads(server: Server) -> None:
    """They are held until their client goes, and given back then; others are answered meanwhile."""
    body = json.dumps(body_of("many rows")).encode()
    answer = server.post("/v1/completions", body_of("many rows"))
    url = urlsplit(server.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    )
    sizes = [sum(resident(server.process.pid).values())]
    for _ in range(3):
        clients = []
        for _ in range(16):
            client = socket.create_connection((str(url.hostname), url.port or 0))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            clients.append(client)
        for client in clients:
            assert client.recv(16, socket.MSG_PEEK | socket.MSG_WAITALL)  # its answer has begun
        sizes.append(sum(resident(server.process.pid).values()))
        assert said(send(server, "many rows")) == said(answer)
        for client in clients:
            client.close()
        holds = settled(server.url)
        assert not any(holds.values()), holds
        sizes.append(sum(resident(server.process.pid).values()))
    print("bytes of an answer:", len(answer.content), "MiB:", [size >> 20 for size in sizes])


@pytest.mark.parametrize("server", ["EngineCore"], indirect=True)
def test_the_landing_is_full_while_one_stops(server: Server) -> None:
    """Rows that landed for an API server that stops hold nobody up, nor what it takes up later."""
    want = said(send(server, "many rows"))
    stopped = process_of(server, "ApiServer_1")
    asked = ThreadPoolExecutor(32)
    waiting = [asked.submit(send, server, "many rows") for _ in range(32)]
    time.sleep(1)
    stopped.suspend()
    try:
        until = time.monotonic() + STOPPED_SECONDS
        newcomers = 0
        while newcomers < 8 or time.monotonic() < until:
            assert said(send(server, "many rows")) == want
            newcomers += 1
        assert stopped.status() == psutil.STATUS_STOPPED
    finally:
        stopped.resume()
    late = sum(not one.done() for one in waiting)
    for one in waiting:
        assert said(one.result()) == want
    print(f"{newcomers} newcomers were answered; {late} of 32 waited for the one that stopped")
    # Gauges are of the last step that a server was told of, and one was told of old ones late.
    assert said(send(server, "many rows")) == want
    holds = settled(server.url)
    assert not any(holds.values()), holds


@pytest.mark.parametrize("server", ["EngineCore", "ApiServer_0", "MainProcess"], indirect=True)
def test_nobody_waits_for_one_that_was_killed(
    server: Server, request: pytest.FixtureRequest
) -> None:
    """Each client has an answer or an error, all processes end, files are whole or not there."""
    victim = process_of(server, request.node.callspec.params["server"])
    family = psutil.Process(server.process.pid).children(recursive=True)
    kinds = [*KINDS, "chat", "sweep", "change"]
    for kind in kinds:
        assert send(server, kind).status_code == 200, (kind, send(server, kind).text)
    begun, ended = threading.Barrier(2 * len(kinds) + 1), threading.Event()

    def ask(kind: str) -> tuple[str, str, float]:
        """How it ended, and when."""
        begun.wait(PATIENCE)
        answered, end = 0, "200"
        try:
            while end == "200" and not ended.is_set():
                answer = send(server, kind)
                end = str(answer.status_code) if "abort" not in answer.text else "aborted"
                answered += end == "200"
        except httpx.HTTPError as error:
            end = type(error).__name__
        return kind, f"{end} after {answered}", time.monotonic()

    with ThreadPoolExecutor(2 * len(kinds)) as pool:
        asked = [pool.submit(ask, kind) for kind in kinds for _ in range(2)]
        begun.wait(PATIENCE)
        time.sleep(10)
        early = [one.result() for one in asked if one.done()]
        victim.kill()
        killed = time.monotonic()
        try:
            ends = [one.result(2 * PATIENCE) for one in asked]
        finally:
            ended.set()
    assert not early
    for kind, end, when in ends:
        print(f"{kind:>16}: {end}, {when - killed:.1f} s after the kill")
    assert not any("Timeout" in end for _, end, _ in ends), ends
    server.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    for stored in reader.open(str(server.log.parent / "acts")):
        for site in stored.sites:
            assert np.isfinite(stored.rows(*site).numpy()).all()
