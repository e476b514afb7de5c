# SPDX-License-Identifier: Apache-2.0
"""Data sets on a local Ray of two workers, one of which is killed in the middle, into a folder and
into an object store: moto's, which speaks S3, in a process of its own.

Ray is no dependency: it is fetched for this test, which is skipped where it cannot be had.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from tests.conformance.engine import engine
from tests.http.server import save_model
from tests.peers.packages import folder_of
from tests.support.s3_server import s3_server
from vllm.pilot import dataset
from vllm.pilot.dataset import capture_on_ray
from vllm.pilot.dataset.shard_store import ShardStore

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

NUM = 400
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
}
HOOKS = {"post_block": [1]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = str(folder_of("ray"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # Of the workers, which are processes of their own.
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        ray = importlib.import_module("ray")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_models, tmp_path_factory.mktemp("ray") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dataset.DataFile:
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    records = [
        {"id": f"ex/{i}", "label": i % 2, "text": f"{i} " + "x" * (i % 50)} for i in range(NUM)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return dataset.DataFile(str(path))


@pytest.fixture(scope="module")
def alone(
    model: Path, data: dataset.DataFile, tmp_path_factory: pytest.TempPathFactory
) -> torch.Tensor:
    """The rows of one machine."""
    out = tmp_path_factory.mktemp("alone") / "acts"
    with engine(model, **ENGINE, skip_tokenizer_init=False, capture_consumers=["inline"]) as llm:
        return dataset.capture(llm, data, out, HOOKS).rows("post_block", 1).tensor()


@pytest.fixture(params=["folder", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Where to write, and the options of its file system."""
    if request.param == "folder":
        yield str(tmp_path / "acts"), None
        return
    with s3_server("bucket") as server:
        yield "s3://bucket/acts", server.options


def kill_one(store: ShardStore, killed: list[int]) -> None:
    """Kill a worker when shards are there."""
    while len(store.shards()) < 3:
        time.sleep(0.05)
    ours = psutil.Process().children(recursive=True)
    workers = [each for each in ours if "_Worker" in " ".join(each.cmdline())]
    workers[0].kill()
    killed.append(workers[0].pid)


@pytest.mark.usefixtures("cluster")
def test_a_worker_is_killed(
    model: Path,
    data: dataset.DataFile,
    alone: torch.Tensor,
    place: tuple[str, dict[str, Any] | None],
) -> None:
    out, options = place
    killed: list[int] = []
    store = ShardStore(out, options)
    killer = threading.Thread(target=kill_one, args=(store, killed), daemon=True)
    killer.start()
    activations = capture_on_ray(
        {"model": str(model), **ENGINE},
        data,
        out,
        HOOKS,
        workers=2,
        block_examples=8,
        storage_options=options,
    )
    killer.join(60)
    assert killed and activations.complete
    assert [line["id"] for line in activations.manifest()] == [f"ex/{i}" for i in range(NUM)]
    rows = activations.rows("post_block", 1)
    assert rows.column("example").tolist() == list(range(NUM))
    # The rows are those of one machine, where batches round differently.
    found, size = rows.tensor(), alone.norm()
    assert (found - alone).norm() <= 1e-4 * size < 0.05 * size < (found - alone.roll(1, 0)).norm()
