# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests at once, each with 288 KiB of vectors, on a server with four slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.server_state import resident, settled
from tests.http.server import Server, greedy, save_model, serve
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.serve.steering.client import SteeringClient, pack_layers

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

HIDDEN, LAYERS, SLOTS = 1024, 8, 4
FIELDS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
KINDS, REQUESTS, CLIENTS = 16, 256, 64
GROWTH = 64 << 20
"""Most bytes that the server may have grown by in the second and third round."""


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    options = (
        f"--hf-overrides={json.dumps(sizes)}",
        "--load-format=dummy",
        f"--max-steering-configs={SLOTS}",
        "--no-enable-prefix-caching",
    )
    with serve(
        save_model(tiny_models, folder / "model"), folder / "log", *options, cold=True
    ) as made:
        yield made


def vectors_of(kind: int) -> dict[str, Any]:
    """Vectors of all layers and points in each tier, as large as the stream."""
    draw = np.random.default_rng(kind)

    def tier() -> dict[str, Any]:
        rows = draw.normal(size=(LAYERS, HIDDEN)).astype(np.float32)
        return {point: pack_layers(dict(enumerate(rows))) for point in STREAM_POINTS}

    return {field: tier() for field in FIELDS}


def test_many_large_vectors(server: Server) -> None:
    """Each row is that of its vectors alone, a plain one is as before, memory is given back."""
    client = SteeringClient(server.url)
    site = ("post_block", LAYERS - 1)
    read = {"inline": {"hooks": {"post_block": [LAYERS - 1]}, "positions": "all"}}

    def rows_of(fields: dict[str, Any]) -> np.ndarray:
        """The stream at the end of the last layer, float32 [positions, hidden]."""
        answer = client.complete("Today I went", **greedy(max_tokens=4, capture=read, **fields))
        return np.asarray(answer.choices[0].rows[site].values)

    def nearest(rows: np.ndarray) -> int:
        distances = [float(np.abs(rows - one).max()) for one in alone]
        kind = int(np.argmin(distances))
        others = [d for n, d in enumerate(distances) if n != kind]
        assert distances[kind] < 1e-3 and min(others) > 1, distances
        return kind

    kinds = [vectors_of(kind) for kind in range(KINDS)] + [{}]
    alone = [rows_of(fields) for fields in kinds]
    sizes = []
    for _ in range(3):
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [number % KINDS for number in range(REQUESTS)]
            answers = [pool.submit(rows_of, kinds[kind]) for kind in asked]
            for _ in range(8):
                assert nearest(rows_of({})) == KINDS
            assert [nearest(answer.result()) for answer in answers] == asked
        holds = settled(server.url)
        assert not any(holds.values()), holds
        sizes.append(sum(resident(server.process.pid).values()))
    print("MiB after each round:", [size >> 20 for size in sizes])
    assert sizes[-1] - sizes[0] <= GROWTH
