# SPDX-License-Identifier: Apache-2.0
"""Stored rows as a table, ids and metadata as people have them, and how much `find` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.support.stored import LAYOUTS, SITES, WIDTH, publish, request, started
from vllm.v1.capture import reader
from vllm.v1.capture.consumers.filesystem import FilesystemConsumer
from vllm.v1.capture.file_format import Record

pytestmark = pytest.mark.quick

SITE = SITES[1]
IDS: list[str | int] = ["mmlu/abstract_algebra/12", 17, "Run 1", "run-3-1", "../up", "plain"]


def write(root: Path, ids: list[Any], **fields: Any) -> dict[str, Any]:
    """The rows of each id at `SITE`."""
    made = {}
    with started(str(root), **fields.pop("options", {})) as consumer:
        for i, given in enumerate(ids):
            metadata = {"label": i % 2, "id": given}
            info = request(f"e{i}", request_id=given, metadata=metadata, **fields)
            _, batches = publish(consumer, info, ((0, 1), (2 + i,)), seed=i)
            made[str(given)] = torch.cat([batch.values[1] for batch in batches])
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_as_people_have_them(tmp_path: Path, layout: str) -> None:
    rows = write(tmp_path, IDS, layout=layout)
    captures = reader.open(str(tmp_path))
    for number, given in enumerate(IDS):
        found = captures.find(given)
        assert found.id == str(given) and found.metadata == {"label": number % 2, "id": given}
        assert same(found.rows(*SITE).values, rows[str(given)])
        assert captures.find(found.name).name == found.name
    assert {stored.id for stored in captures} == set(rows)
    for other in ("mmlu/abstract_algebra/13", 18, "Run 2", "plain-0-0"):
        with pytest.raises(KeyError):
            captures.find(other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_completions_are_found_by_id(tmp_path: Path, layout: str) -> None:
    with started(str(tmp_path), layout=layout) as consumer:
        for sample in (0, 1):
            publish(consumer, request(request_id="a/b", sample=sample, num_samples=2))
    captures = reader.open(str(tmp_path))
    assert captures.find("a/b", completion=(0, 1)).sample == 1
    assert captures.find("a/b", completion=(0, 0)).sample == 0
    with pytest.raises(KeyError):
        captures.find("a/b")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table(tmp_path: Path, layout: str) -> None:
    rows = write(tmp_path, IDS, layout=layout)
    captures = reader.open(str(tmp_path))
    last = captures.table(*SITE, position=-1)
    assert last.values.shape == (len(IDS), WIDTH) and sorted(last.ids) == sorted(rows)
    for i, given in enumerate(last.ids):
        assert same(last.values[i], rows[given][-1])
        assert last.positions[i] == 2 + [str(each) for each in IDS].index(given)
    assert last.labels("label").tolist() == [r.metadata["label"] for r in last.requests]
    assert last.numpy().dtype == np.float32
    first = captures.table(*SITE, position=0)
    assert all(same(first.values[i], rows[given][0]) for i, given in enumerate(first.ids))
    everything = captures.table(*SITE, tag="default")
    assert len(everything) == 3 * len(IDS) and everything.positions[:2].tolist() == [0, 1]
    some = reader.read_table((captures.find(each) for each in (17, "plain")), *SITE, position=1)
    assert some.ids == ["17", "plain"]


def test_what_a_table_lacks(tmp_path: Path) -> None:
    write(tmp_path, ["a"])
    captures = reader.open(str(tmp_path))
    for position in (3, -4):
        with pytest.raises(KeyError, match=f"a> has no row at {position}, it has"):
            captures.table(*SITE, position=position)
    with pytest.raises(KeyError, match="has no 'colour' in its metadata"):
        captures.table(*SITE).labels("colour")
    with pytest.raises(ValueError, match="table: no requests"):
        reader.read_table([], *SITE)


def test_a_frame(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    write(tmp_path, [5, "a/b"])
    frame = reader.open(str(tmp_path)).table(*SITE, position=-1).pandas()
    assert isinstance(frame, pandas.DataFrame)
    by_id = frame.set_index("id")
    assert by_id.loc["a/b", ["tag", "label", "position"]].tolist() == ["default", 1, 3]
    assert by_id.loc["5", "values"].shape == (WIDTH,)


def test_find_reads_no_shard_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sees what was written since."""
    write(tmp_path, ["a/1", "a/2"], layout="sharded")
    captures = reader.open(str(tmp_path))
    read: list[str] = []
    cat_file = LocalFileSystem.cat_file

    def counted(self: Any, path: str, **more: Any) -> Any:
        read.append(path)
        return cat_file(self, path, **more)

    monkeypatch.setattr(LocalFileSystem, "cat_file", counted)
    for _ in range(20):
        assert captures.find("a/1").record.rows == 3
        assert captures.find("a/2").record.rows == 3
    assert len(read) == len(set(read)) > 0
    with pytest.raises(KeyError):
        captures.find("a/3")
    write(tmp_path, ["a/3"], layout="sharded")
    before = set(read)
    read.clear()
    assert captures.find("a/3").id == "a/3"
    assert len(read) == 1 and not before.intersection(read)
    options = {"on_collision": "overwrite"}
    newer = write(tmp_path, ["a/1"], layout="sharded", tag="default", options=options)
    assert same(captures.find("a/1").rows(*SITE).values, newer["a/1"])


def test_metadata_are_what_json_keeps() -> None:
    given = {"n": np.int64(3), "x": np.float32(0.5), "l": (1, 2), 4: None, "name": np.str_("é")}
    made = FilesystemConsumer.check_request({"metadata": given}, "capture.filesystem")
    assert made["metadata"] == {"n": 3, "x": 0.5, "l": [1, 2], "4": None, "name": "é"}


def test_files_from_before_have_neither(tmp_path: Path) -> None:
    write(tmp_path, ["a/1"])
    record = reader.open(str(tmp_path)).find("a/1").record
    strings = record.to_strings()
    assert Record.from_strings(strings, "file") == record
    del strings["given_id"], strings["metadata"]
    old = Record.from_strings(strings, "file")
    assert (old.given_id, old.metadata) == ("", {})
    assert old.request_id == record.request_id
