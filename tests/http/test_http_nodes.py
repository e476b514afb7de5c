# SPDX-License-Identifier: Apache-2.0
"""Data-parallel engines of two nodes, both on this host: a server with an engine, and what
`vllm serve --headless` starts elsewhere. A change of the global steering is made by both or by
none, and rows of the other node's engine come as messages."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conformance.models import HIDDEN
from tests.http.server import Server, free_port, greedy, save_model, serve, start, stop
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import pack_layers, read_rows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

PROMPT = "Today I went"
READ = {"inline": {"hooks": {"post_block": [1]}, "positions": "all"}}
REQUESTS = 12


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("nodes")
    model = save_model(tiny_models, folder / "model")
    nodes = (
        "--data-parallel-size=2",
        "--data-parallel-size-local=1",
        "--data-parallel-address=127.0.0.1",
        f"--data-parallel-rpc-port={free_port()}",
    )
    other = start(model, folder / "other.log", *nodes, "--headless", "--data-parallel-start-rank=1")
    try:
        with serve(model, folder / "server.log", *nodes, cold=True) as started:
            yield started
    finally:
        stop(other)


def rows(server: Server) -> list[np.ndarray]:
    """The rows of one prompt, [positions, hidden], asked for many times at once."""

    def ask(_: int) -> np.ndarray:
        answer = server.post("/v1/completions", greedy(prompt=PROMPT, max_tokens=4, capture=READ))
        assert answer.status_code == 200, answer.text
        payload = answer.json()["choices"][0]["capture_results"]["inline"]["payload"]
        return read_rows(payload)["post_block", 1].values

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, range(REQUESTS)))


def served_by(server: Server) -> dict[str, float]:
    """How many requests each engine has answered."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total":
                engine = sample.labels["engine"]
                found[engine] = found.get(engine, 0.0) + sample.value
    return found


def test_engines_of_two_nodes(server: Server) -> None:
    plain, *others = rows(server)
    assert plain.shape == (len(PROMPT) + 3, HIDDEN)
    assert all(np.array_equal(plain, other) for other in others)
    for seed in (1, 2):
        layers = {"post_block": pack_layers({1: vector(seed).numpy()})}
        changed = server.change("/v1/steering/set", {"vectors": layers})
        assert changed.status_code == 200, changed.text
        wanted, other = vector(seed).numpy(), vector(3 - seed).numpy()
        for steered in rows(server):
            delta = steered[: len(PROMPT)] - plain[: len(PROMPT)]
            np.testing.assert_allclose(delta, np.broadcast_to(wanted, delta.shape), atol=1e-4)
            assert np.abs(delta - other).max() > 0.1
    state = server.get("/v1/steering").json()
    assert state["engines"] == 2 and state["version"] == changed.json()["version"]
    # Neither engine did all of it.
    assert min(served_by(server).values()) >= 3 and len(served_by(server)) == 2


def test_what_one_engine_cannot_do_neither_does(server: Server) -> None:
    before = server.get("/v1/steering").json()
    wrong = {"post_block": pack_layers({1: np.ones(HIDDEN + 1, np.float32)})}
    assert server.change("/v1/steering/set", {"vectors": wrong}).status_code == 400
    assert server.get("/v1/steering").json() == before
    assert server.change("/v1/steering/clear", {}).status_code == 200
    first, *others = rows(server)
    assert all(np.array_equal(first, other) for other in others)
