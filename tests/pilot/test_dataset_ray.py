# SPDX-License-Identifier: Apache-2.0
"""Data sets on a local Ray of two workers, one of which is killed in the middle.

Ray is no dependency: without it this says so and is skipped.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conformance.engine import engine
from tests.http.server import save_model
from vllm.pilot import dataset
from vllm.pilot.dataset import capture_on_ray

if TYPE_CHECKING:
    from tests.conftest import TinyModels

ray = pytest.importorskip("ray", reason="pip install 'ray[data]' runs this test")

pytestmark = pytest.mark.long

NUM = 400
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "block_size": 32,
}


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def kill_one(out: Path, killed: list[int]) -> None:
    """Kill a worker when shards are there."""
    while len(list(out.glob("*.safetensors"))) < 3:
        time.sleep(0.01)
    ours = psutil.Process().children(recursive=True)
    workers = [each for each in ours if "_Worker" in " ".join(each.cmdline())]
    workers[0].kill()
    killed.append(workers[0].pid)


@pytest.mark.usefixtures("cluster")
def test_a_worker_is_killed(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = save_model(tiny_models, tmp_path / "model")
    data = tmp_path / "d.jsonl"
    records = [
        {"id": f"ex/{i}", "label": i % 2, "text": f"{i} " + "x" * (i % 50)} for i in range(NUM)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "acts"
    killed: list[int] = []
    killer = threading.Thread(target=kill_one, args=(out, killed), daemon=True)
    killer.start()
    activations = capture_on_ray(
        {"model": str(model), **ENGINE},
        dataset.DataFile(str(data)),
        out,
        {"post_block": [1]},
        workers=2,
        block_examples=8,
    )
    killer.join(60)
    assert killed and activations.complete
    assert [line["id"] for line in activations.manifest()] == [r["id"] for r in records]
    rows = activations.rows("post_block", 1)
    assert rows.column("example").tolist() == list(range(NUM))
    # The rows are those of one machine, where batches round differently.
    with engine(model, **ENGINE, skip_tokenizer_init=False, capture_consumers=["inline"]) as llm:
        alone = dataset.capture(
            llm, dataset.DataFile(str(data)), tmp_path / "alone", {"post_block": [1]}
        )
    found, want = rows.tensor(), alone.rows("post_block", 1).tensor()
    size = want.norm()
    assert (found - want).norm() <= 1e-4 * size < 0.05 * size < (found - want.roll(1, 0)).norm()
