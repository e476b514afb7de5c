# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer and its reader: each layout on each kind of store, bit by bit."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec.core
import pytest
import safetensors
import safetensors.torch
import torch

from tests import ROOT
from tests.support.s3_server import s3_server
from tests.support.stored import (
    LAYOUTS,
    SITES,
    WIDTH,
    batch,
    finish,
    publish,
    request,
    same,
    started,
    whole,
)
from vllm.v1.capture import reader
from vllm.v1.capture.consumer import RequestEnd
from vllm.v1.capture.consumers.filesystem.publication import CollisionError

pytestmark = pytest.mark.quick

Store = tuple[str, dict[str, Any]]
"""Root and storage options."""


@pytest.fixture(scope="module")
def s3() -> Iterator[Store]:
    """A bucket of a server that speaks S3, with moto behind it."""
    with s3_server("captures") as server:
        yield "s3://captures", server.options


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return str(tmp_path / "deep" / "root"), {}
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", {}
    root, options = request.getfixturevalue("s3")
    return f"{root}/{uuid.uuid4().hex}", options


def files(store: Store) -> list[str]:
    """All below the root, relative to it."""
    fs, root = fsspec.core.url_to_fs(store[0], **store[1])
    fs.invalidate_cache()
    return sorted(str(path).removeprefix(root).lstrip("/") for path in fs.find(root))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    check_round_trip((str(tmp_path), {}), layout, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_what_was_taken(store: Store, layout: str) -> None:
    check_round_trip(store, layout, torch.bfloat16)


def check_round_trip(store: Store, layout: str, dtype: torch.dtype) -> None:
    root, options = store
    with started(root, layout=layout, storage_options=options) as consumer:
        info = request(dtype=dtype, external_id="from outside", request_id="probe_1", tag="t")
        payload, batches = publish(consumer, info)
        other, others = publish(consumer, request(dtype=dtype, tag="t"), ((5,), (6, 9)))
    assert payload["paths"] and set(payload["paths"]) | set(other["paths"]) == set(files(store))
    assert (payload["layout"], payload["tag"], payload["request_id"]) == (layout, "t", "probe_1")
    assert payload["rows"] == 3 * len(SITES)
    assert payload["bytes"] == 3 * (len(SITES) * WIDTH * dtype.itemsize + 3 * 8)
    captures = reader.open(root, options)
    assert {r.name for r in captures} == {"probe_1", "engine-id"}
    stored = captures.find("probe_1")
    assert (stored.external_id, stored.sample, stored.model) == ("from outside", 0, "some/model")
    assert (stored.sites, stored.num_rows, stored.layout) == (SITES, 3, layout)
    assert stored.complete and stored.error is None and not list(captures.incomplete())
    assert stored.record.num_tokens == 9 and stored.record.num_prompt_tokens == 3
    for i, site in enumerate(SITES):
        assert same(stored.rows(*site), whole(batches, i))
        assert not same(stored.rows(*site), whole(batches, i - 1))
        assert same(captures.find("engine-id", "t").rows(*site), whole(others, i))
    with pytest.raises(KeyError, match=r"no pre_attn.12, it has pre_attn.0, post_block.0"):
        stored.rows("pre_attn", 12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_library_alone_reads_it(tmp_path: Path, layout: str) -> None:
    with started(str(tmp_path), layout=layout) as consumer:
        info = request(request_id="probe", tag="t", metadata={"label": 1})
        payload, batches = publish(consumer, info)
    prefix = "probe/" if layout == "sharded" else ""
    found: dict[str, torch.Tensor] = {}
    for path in payload["paths"]:
        found |= safetensors.torch.load_file(tmp_path / path)
        with safetensors.safe_open(tmp_path / path, "pt") as file:
            metadata = file.metadata()
    labels = {"positions": 0, "token_ids": 0, "versions": 0}
    sites = {f"{point}.{layer}": i for i, (point, layer) in enumerate(SITES)}
    assert found.keys() == {prefix + name for name in labels | sites}
    for name, i in sites.items():
        expected = whole(batches, i).values
        assert torch.equal(found[prefix + name].view(torch.int16), expected.view(torch.int16))
    assert found[f"{prefix}positions"].tolist() == [0, 1, 2]
    assert found[f"{prefix}token_ids"].tolist() == [1, 8, 15]
    assert found[f"{prefix}versions"].tolist() == [3, 3, 3]
    record = json.loads(metadata["request/probe"]) if layout == "sharded" else metadata
    unique = record.pop("publication"), record.pop("point", ""), record.pop("layer", "")
    assert len(unique[0]) == 32
    assert record == {
        "capture_format": "1",
        "request_id": "probe",
        "tag": "t",
        "external_id": "external",
        "engine_id": "engine-id",
        "sample": "0",
        "num_samples": "1",
        "prompt": "0",
        "model": "some/model",
        "sites": "pre_attn.0 post_block.0 post_block.12",
        "dtype": "bfloat16",
        "width": "8",
        "hidden_size": "8",
        "projected": "false",
        "rows": "3",
        "num_prompt_tokens": "3",
        "num_tokens": "9",
        "complete": "true",
        "error": "",
        "replaces": "false",
        "given_id": "probe",
        "metadata": '{"label": 1}',
        "reduce": "",
    }


def test_layouts_side_by_side(store: Store) -> None:
    """A request may choose its own; where each lies is part of the format."""
    root, options = store
    with started(root, storage_options=options) as consumer:
        for layout in LAYOUTS:
            publish(consumer, request(request_id=f"r-{layout}", tag="t", layout=layout))
        publish(consumer, request("unnamed"))
    shard = next(name for name in files(store) if "_shards" in name)
    assert shard.startswith("t/_shards/") and shard.endswith(".safetensors")
    assert files(store) == sorted(
        [f"t/r-per_file/{p}.{n}.safetensors" for p, n in SITES]
        + ["t/r-packed.safetensors", shard, "default/unnamed.safetensors"]
    )
    captures = reader.open(root, options)
    assert {r.layout: r.name for r in captures.requests("t")} == {n: f"r-{n}" for n in LAYOUTS}
    assert captures.tags() == ["default", "t"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_incomplete_requests_say_so(store: Store, layout: str) -> None:
    root, options = store
    with started(root, layout=layout, storage_options=options) as consumer:
        publish(consumer, request(request_id="full"))
        publish(consumer, request(request_id="short"), error="it stopped before position 7")
        publish(consumer, request(request_id="cut"), aborted=True)
        nothing, _ = publish(consumer, request(request_id="empty"), (), aborted=True)
        publish(consumer, request(request_id="none"), (), error="no row was reached")
        consumer.open(request(request_id="failed")).failed("no time")
    assert nothing is None
    captures = reader.open(root, options)
    assert {r.name: r.error for r in captures} == {
        "full": None,
        "short": "it stopped before position 7",
        "cut": "the request was aborted",
        "none": "no row was reached",
    }
    assert {r.name for r in captures.incomplete()} == {"short", "cut", "none"}
    rows = captures.find("none").rows(*SITES[0])
    assert len(rows) == 0 and rows.values.shape == (0, WIDTH)


def test_completions_of_one_request(store: Store) -> None:
    root, options = store
    with started(root, storage_options=options) as consumer:
        for layout in LAYOUTS:
            for sample in range(2):
                ids: dict[str, Any] = {"request_id": f"a-{layout}", "layout": layout}
                publish(consumer, request(f"x{sample}", sample=sample, num_samples=2, **ids))
        publish(consumer, replace(request(request_id="b"), prompt=3))
    names = {f"a-{layout}-0-{sample}": sample for layout in LAYOUTS for sample in range(2)}
    found = {r.name: r.sample for r in reader.open(root, options)}
    assert found == names | {"b-3-0": 0}


# -- collisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("restart", [False, True])
def test_collisions(store: Store, layout: str, restart: bool) -> None:
    """The three policies, in one process and after another start."""
    root, options = store

    def two(policy: str, name: str, second_sites: Any = SITES) -> tuple[Any, Any, Any, Any]:
        made: list[Any] = []
        kinds = {"layout": layout, "on_collision": policy, "storage_options": options}
        with started(root, **kinds) as first:
            made += publish(first, request("e1", request_id=name), seed=1)
            if not restart:
                made += publish(first, request("e2", second_sites, request_id=name), seed=2)
        if restart:
            with started(root, **kinds) as second:
                made += publish(second, request("e2", second_sites, request_id=name), seed=2)
        return made[0], made[1], made[2], made[3]

    with pytest.raises(CollisionError, match="default/name exists already: choose another"):
        two("error", "name")
    captures = reader.open(root, options)
    kept = captures.find("name")
    info = request("e1", request_id="name")
    assert same(kept.rows(*SITES[1]), whole([batch(info, [0, 1], 1), batch(info, [2], 1)], 1))

    _, _, second, rows = two("suffix", "twice")
    assert second["request_id"].startswith("twice--")
    assert same(captures.find(second["request_id"]).rows(*SITES[1]), whole(rows, 1))
    assert captures.find("twice").record.engine_id == "e1"

    # With fewer sites, so that nothing of the first must be left.
    _, _, second, rows = two("overwrite", "over", SITES[1:2])
    assert second["request_id"] == "over"
    stored = captures.find("over")
    assert stored.sites == SITES[1:2] and stored.complete
    assert same(stored.rows(*SITES[1]), whole(rows, 0))
    assert len([r for r in captures if r.name == "over"]) == 1
    assert not [name for name in files(store) if ".tmp" in name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["error", "overwrite", "suffix"])
def test_a_race_of_threads(store: Store, layout: str, policy: str) -> None:
    root, options = store
    threads = 6
    with started(root, layout=layout, on_collision=policy, storage_options=options) as consumer:
        barrier, lost = threading.Barrier(threads), list[FileExistsError]()

        def one(i: int) -> str:
            session = consumer.open(request(f"e{i}", request_id="same"))
            session.rows(batch(request(), [0, 1], seed=i))
            barrier.wait()
            try:
                return str(finish(session)["request_id"])
            except FileExistsError as error:
                lost.append(error)
                return ""

        with ThreadPoolExecutor(threads) as pool:
            names = list(pool.map(one, range(threads)))
    stored = list(reader.open(root, options))
    won = {"error": 1, "suffix": threads, "overwrite": 1}[policy]
    assert len(stored) == won
    if policy == "overwrite":
        # An object store has no folders to swap: of several at once some are refused.
        assert not lost or (layout == "per_file" and "being written" in str(lost[0]))
        assert set(names) - {""} == {"same"}
    else:
        assert policy == "suffix" or {type(error) for error in lost} == {CollisionError}
        assert sorted(r.name for r in stored) == sorted(filter(None, names))
    for each in stored:
        seed = int(each.record.engine_id.removeprefix("e"))
        assert each.complete
        assert names[seed] == each.name
        for i, site in enumerate(SITES):
            assert same(each.rows(*site), whole([batch(request(), [0, 1], seed)], i))
    assert not [name for name in files(store) if ".tmp" in name]


# -- shards -------------------------------------------------------------------------------------


def test_requests_that_end_together_share_a_shard(tmp_path: Path) -> None:
    with started(str(tmp_path), layout="sharded", flush_seconds=3600) as consumer:
        sessions = [consumer.open(request(f"e{i}")) for i in range(20)]
        for i, session in enumerate(sessions):
            session.rows(batch(request(), [i], i))
        futures = [session.done(RequestEnd(2)) for session in sessions]
        assert not any(future.done() for future in futures)
        assert files((str(tmp_path), {})) == []
        consumer.shutdown()
        paths = {path for future in futures for path in future.result(0)["paths"]}
    assert len(paths) == 1
    assert paths == set(files((str(tmp_path), {})))
    stored = {r.name: r for r in reader.open(str(tmp_path))}
    assert len(stored) == 20
    assert stored["e7"].rows(*SITES[0]).positions.tolist() == [7]


def test_a_shard_is_closed_when_it_is_full(tmp_path: Path) -> None:
    size = 3 * len(SITES) * WIDTH * 2 + 3 * 3 * 8
    kinds = {"layout": "sharded", "flush_seconds": 3600, "shard_max_bytes": 2 * size}
    with started(str(tmp_path), **kinds) as consumer:
        futures = []
        for i in range(6):
            session = consumer.open(request(f"e{i}"))
            session.rows(batch(request(), [0, 1, 2], i))
            futures.append(session.done(RequestEnd(3)))
        shards = [future.result(30)["paths"] for future in futures]
    assert shards[0] == shards[1] != shards[2] == shards[3] != shards[4] == shards[5]


def test_a_dropped_request_is_in_no_shard(tmp_path: Path) -> None:
    with started(str(tmp_path), layout="sharded", flush_seconds=3600) as consumer:
        sessions = {name: consumer.open(request(request_id=name)) for name in ("kept", "dropped")}
        futures = {}
        for name, session in sessions.items():
            session.rows(batch(request(), [0]))
            futures[name] = session.done(RequestEnd(3))
        sessions["dropped"].failed("too late")
    assert futures["kept"].result(0)["request_id"] == "kept"
    assert [r.name for r in reader.open(str(tmp_path))] == ["kept"]


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/capture-files.md reads files as it says."""
    page = (ROOT / "docs" / "capture-files.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    with started(str(tmp_path)) as consumer:
        publish(consumer, request(request_id="probe_0001", metadata={"label": 0}))
        publish(consumer, request(request_id="short", metadata={"label": 1}), error="it stopped")
        publish(consumer, request(request_id=17, metadata={"label": 1}))
    exec(program, {"ROOT": str(tmp_path)})
    said = capsys.readouterr().out
    assert "lacks rows: short it stopped" in said
    assert "default probe_0001 post_block 12 [0 1 2] torch.Size([3, 8])" in said
    assert "found <packed default/probe_0001> 9 some/model" in said
    assert "table (3, 8) [1 0 1] ['17', 'probe_0001', 'short']" in said
    assert "left {'mmlu/abstract_algebra/12': 'Today I went'}" in said
