# SPDX-License-Identifier: Apache-2.0
"""Shards without an engine: killed at any moment nothing is there twice and nothing is missing;
what plain libraries read; full disks; and what a `DataLoader` gets."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from torch.utils.data import DataLoader

from tests.support.disks import largest_file, small_disk
from vllm.pilot.dataset import Activations, DatasetError
from vllm.pilot.dataset.capture_run import Captured
from vllm.pilot.dataset.examples import Example
from vllm.pilot.dataset.shard_store import LABELS, Shard, ShardStore
from vllm.pilot.dataset.size import Estimate, duration, estimate, size
from vllm.pilot.dataset.writer import ShardWriter, stored_bytes
from vllm.v1.capture.small_rows import FORMS, SmallDtype, StoreDtype

pytestmark = pytest.mark.quick

SITES = ("pre_attn.0", "post_block.3")
WIDTH = 6


def captured(number: int) -> Captured:
    """Of every fourth example no row."""
    n = number % 4
    random = np.random.default_rng(number)
    values = {
        site: torch.from_numpy(random.normal(size=(n, WIDTH))).to(torch.bfloat16) for site in SITES
    }
    example = Example(number, f"d.jsonl:{number + 1}", f"ex/{number}", number % 2, "x" * (n + 1))
    ids = random.integers(0, 100, n)
    return Captured(example, np.arange(n), ids, values, n, 1, "", None)


def plan(total: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 1, "data": {"examples": total, "sha256": "0"}, **more}


def store_all(
    root: str,
    total: int,
    shard_bytes: int = 200,
    dtype: StoreDtype | None = None,
    only: Iterable[int] | None = None,
    waits: Path | None = None,
) -> None:
    """Write what is missing, as `dataset.capture` does.

    Args:
        waits: a file to make before the last example, which then never comes.
    """
    store = ShardStore(root)
    with store.locked():
        store.check(plan(total))
        store.begin(plan(total))
        writer = ShardWriter(store, str, dtype, shard_bytes, 60.0)
        try:
            for shard in store.missing(total):
                for number in range(shard.start, shard.stop):
                    if waits is not None and number == total - 1:
                        waits.touch()
                        signal.pause()
                    if only is None or number in only:
                        writer.add(captured(number))
        finally:
            writer.close()


def need_all(root: str, total: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Every example is there once, with its rows."""
    activations = Activations(root)
    assert activations.complete
    lines = list(activations.manifest())
    assert [line["example"] for line in lines] == list(range(total))
    for point, layer in (("pre_attn", 0), ("post_block", 3)):
        rows = activations.rows(point, layer)
        expected = torch.cat([captured(i).values[f"{point}.{layer}"] for i in range(total)])
        assert torch.equal(rows.tensor(), expected.to(dtype))
        assert rows.column("example").tolist() == [i for i in range(total) for _ in range(i % 4)]


# -- killed --------------------------------------------------------------------------------------

TOTAL, KILLS = 400, 6


def test_killed_at_any_moment(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    random = np.random.default_rng()
    root = str(tmp_path / "acts")
    for number in range(KILLS):
        # It waits at its end, so that it is killed before that, however late.
        waits = tmp_path / f"waits{number}"
        child = processes.Process(target=store_all, args=(root, TOTAL), kwargs={"waits": waits})
        before = len(list(tmp_path.glob("acts/*.safetensors")))
        child.start()
        # Not to synchronise: it is in the middle of it, at whatever moment.
        while len(list(tmp_path.glob("acts/*.safetensors"))) < before + 5 and not waits.exists():
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.01))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert not Activations(root).complete
    store_all(root, TOTAL)
    ShardStore(root).write_manifest()
    need_all(root, TOTAL)
    assert not [name for name in os.listdir(root) if name.endswith(".tmp")]
    text = (tmp_path / "acts" / "manifest.jsonl").read_text()
    assert [json.loads(line)["id"] for line in text.splitlines()] == [
        f"ex/{i}" for i in range(TOTAL)
    ]


def test_two_runs_at_once(tmp_path: Path) -> None:
    one, other = ShardStore(str(tmp_path)), ShardStore(str(tmp_path))
    refused = pytest.raises(DatasetError, match="another run is writing to it")
    with one.locked(), refused, other.locked():
        pass
    with other.locked():
        pass


def test_holes_are_filled(tmp_path: Path) -> None:
    store_all(str(tmp_path), 40)
    shards = ShardStore(str(tmp_path)).shards()
    assert len(shards) > 4
    for shard in (shards[2], shards[4]):
        (tmp_path / shard.name).unlink()
    assert ShardStore(str(tmp_path)).missing(40) == [shards[2], shards[4]]
    with pytest.raises(AssertionError):
        need_all(str(tmp_path), 40)
    store_all(str(tmp_path), 40, shard_bytes=1 << 20)
    need_all(str(tmp_path), 40)
    assert ShardStore(str(tmp_path)).shards() == shards


def test_the_same_examples_twice(tmp_path: Path) -> None:
    store_all(str(tmp_path), 40)
    (tmp_path / Shard(1, 3).name).write_bytes(b"")
    with pytest.raises(DatasetError, match=r"have the same examples, as of two runs at once"):
        ShardStore(str(tmp_path)).shards()


def test_begun_differently(tmp_path: Path) -> None:
    store = ShardStore(str(tmp_path))
    asked = plan(3, capture={"hooks": {"post_block": "all"}, "positions": "all"})
    other = plan(4, capture={"hooks": {"post_block": "1"}, "positions": "all"})
    store.begin(asked)
    store.check(other)  # nothing was written yet
    (tmp_path / Shard(0, 3).name).write_bytes(b"")
    store.check(asked)
    with pytest.raises(DatasetError) as raised:
        store.check(other)
    assert 'capture.hooks.post_block was "all", is "1"; data.examples was 3, is 4' in str(
        raised.value
    )
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"dataset.json: is damaged: KeyError"):
        store.check(asked)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(DatasetError, match=r"has shards and no dataset.json"):
        store.check(asked)


# -- full disks ----------------------------------------------------------------------------------


def test_what_is_written_before_a_full_disk_stays(tmp_path: Path) -> None:
    root = str(tmp_path / "acts")
    store_all(root, 200, only=range(100))
    safe = ShardStore(root).shards()
    with largest_file(2048), pytest.raises(OSError, match="File too large"):
        store_all(root, 200, shard_bytes=1 << 20)
    assert ShardStore(root).shards() == safe
    assert not list(Path(root).glob(".*.tmp"))
    store_all(root, 200)
    need_all(root, 200)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    with small_disk(tmp_path / "disk", "256k") as mounted:
        if not mounted:
            pytest.skip("only root may mount a tmpfs; the test above needs no rights")
        yield tmp_path / "disk"


def test_a_full_disk(tmpfs: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        store_all(str(tmpfs), 4000, shard_bytes=1 << 13)
    shards = ShardStore(str(tmpfs)).shards()
    assert shards and not Activations(str(tmpfs)).complete
    for shard in shards:
        ShardStore(str(tmpfs)).header(shard)


# -- reading -------------------------------------------------------------------------------------


def test_plain_libraries_read_it(tmp_path: Path) -> None:
    store_all(str(tmp_path), 40, dtype="float32")
    need_all(str(tmp_path), 40, dtype=torch.float32)
    found: list[np.ndarray] = []
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors = load_numpy(path)
        assert set(tensors) == {*SITES, *LABELS}
        assert len(tensors["example"]) == len(tensors["post_block.3"])
        found.append(tensors["post_block.3"])
        with safe_open(path, "pt") as file:
            lines = [json.loads(line) for line in file.metadata()["manifest"].split("\n")]
        for line in lines:
            rows = slice(line["first"], line["first"] + line["rows"])
            assert set(tensors["example"][rows].tolist()) <= {line["example"]}
            assert tensors["position"][rows].tolist() == line["positions"]
            assert tensors["token_id"][rows].tolist() == line["token_ids"]
            assert line["tokens"] == [str(token) for token in line["token_ids"]]
    assert np.array_equal(
        np.concatenate(found), Activations(str(tmp_path)).rows("post_block", 3).numpy()
    )


def check_items(root: str, total: int) -> None:
    rows = Activations(root).rows("post_block", 3)
    numbers = [i for i in range(total) for _ in range(i % 4)]
    assert len(rows) == len(numbers)
    assert [rows[i]["example"] for i in range(len(rows))] == numbers
    last = rows[-1]
    expected = captured(numbers[-1])
    assert torch.equal(last["values"], expected.values["post_block.3"][-1])
    assert (last["position"], last["label"]) == (expected.positions[-1], numbers[-1] % 2)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_map_style(tmp_path: Path) -> None:
    store_all(str(tmp_path), 41)
    check_items(str(tmp_path), 41)
    rows = Activations(str(tmp_path)).rows("pre_attn", 0)
    assert rows.labels().tolist() == [i % 2 for i in rows.column("example")]
    assert rows.numpy().dtype == np.float32
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again.tensor(), rows.tensor())
    loaded = DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches = list(loaded)
    assert torch.equal(torch.cat([batch["values"] for batch in batches]), rows.tensor())
    labels = torch.cat([batch["label"] for batch in batches])
    assert labels.tolist() == rows.labels().tolist()
    with pytest.raises(KeyError, match=r"has no post_attn.0, it has pre_attn.0, post_block.3"):
        Activations(str(tmp_path)).rows("post_attn", 0)


def test_an_object_store() -> None:
    root = "memory://acts/one"
    store_all(root, 41)
    check_items(root, 41)
    need_all(root, 41)
    ShardStore(root).write_manifest()
    lines = fsspec.filesystem("memory").cat_file("/acts/one/manifest.jsonl").splitlines()
    assert len(lines) == 41


def test_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"has no dataset.json"):
        Activations(str(tmp_path))
    with pytest.raises(DatasetError, match="cannot be opened"):
        Activations("nosuch://a")


@pytest.mark.parametrize("dtype", list(FORMS))
def test_small_rows(tmp_path: Path, dtype: SmallDtype) -> None:
    """Each row is what its form makes of it, item by item and all at once; half the bytes."""
    store_all(str(tmp_path), 40, dtype=dtype)
    activations = Activations(str(tmp_path))
    assert [f"{point}.{layer}" for point, layer in activations.sites] == list(SITES)
    rows = activations.rows("post_block", 3)
    given = torch.cat([captured(i).values["post_block.3"] for i in range(40)])
    form = FORMS[dtype]
    expected = form.unpack(*form.pack(given))
    assert torch.equal(rows.tensor(), expected) and not torch.equal(expected, given.float())
    assert torch.equal(rows[7]["values"], expected[7]) and rows.numpy().dtype == np.float32
    assert pickle.loads(pickle.dumps(rows))[3]["values"].tolist() == expected[3].tolist()
    assert stored_bytes(dtype)(given) == len(given) * (WIDTH + 4)


# -- sizes ---------------------------------------------------------------------------------------


def test_estimates() -> None:
    alike = [captured(i) for i in (1, 5, 9)]
    row = 2 * WIDTH * len(SITES) + 24
    told = estimate(alike, stored_bytes(None), 1000, 2000.0, 3.0, 10**6, "o")
    assert told.exact and told.num_bytes == 1000 * (row + 330)
    assert told.seconds == 1000 and told.fits
    assert estimate(
        alike, stored_bytes("float32"), 1000, 2000.0, 3.0, None, "o"
    ).num_bytes == 1000 * (row + 2 * WIDTH * len(SITES) + 330)
    mixed = [captured(i) for i in (1, 2, 3)]  # prompts of 2, 3, 4 characters; 6 rows
    told = estimate(mixed, stored_bytes(None), 1000, 3000.0, 3.0, 100, "o")
    assert not told.exact and told.num_bytes == int(6 * row / 9 * 3000) + 1000 * 2 * 180
    assert not told.fits
    assert str(told) == (
        f"1,000 examples: about {size(told.num_bytes)} in o, 100 B are free there; about 17 min"
    )


def test_words() -> None:
    assert [size(n) for n in (5, 2048, 3 << 20, 1 << 40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "1.0 TiB",
    ]
    assert [duration(s) for s in (7.2, 90, 7300)] == ["7 s", "2 min", "2 h 02 min"]
    assert Estimate(1, 1, True, 1.0, None, "s3://a").fits
