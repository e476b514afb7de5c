# SPDX-License-Identifier: Apache-2.0
"""What the reader makes of files that are damaged, foreign, temporary or lacking."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support.stored import LAYOUTS, SITES, WIDTH, publish, request, same, started, whole
from vllm.v1.capture import reader
from vllm.v1.capture.file_format import CaptureFileError
from vllm.v1.interventions.makings import Attention, Features

pytestmark = pytest.mark.quick

Tensors = dict[str, torch.Tensor]


def one(root: Path, layout: str) -> Path:
    """The first file of one published request."""
    with started(str(root), layout=layout) as consumer:
        payload, _ = publish(consumer, request(request_id="probe", tag="t"))
    return root / str(payload["paths"][0])


def read_all(root: Path) -> None:
    for stored in reader.open(str(root)):
        for site in stored.sites:
            stored.rows(*site)


def cut(data: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes) -> bytes:
    return data + b"\0"


def empty(data: bytes) -> bytes:
    return b""


def no_header(data: bytes) -> bytes:
    return data[:11]


def endless_header(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


def not_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def changed(change: Callable[[Tensors, dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """The same file with other tensors or metadata, written by the library."""

    def rewrite(data: bytes) -> bytes:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        inner = "request/probe" in metadata
        record = json.loads(metadata["request/probe"]) if inner else metadata
        short = {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}
        change(short, record)
        if inner:
            short = {f"probe/{name}": tensor for name, tensor in short.items()}
            metadata["request/probe"] = json.dumps(record)
        return safetensors.torch.save(short, metadata)

    return rewrite


@changed
def swapped_shape(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["pre_attn.0"] = tensors["pre_attn.0"].reshape(WIDTH, -1).contiguous()


@changed
def other_dtype(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["pre_attn.0"] = tensors["pre_attn.0"].view(torch.float16)


@changed
def fewer_positions(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["positions"] = tensors["positions"][:-1].clone()


@changed
def unsorted(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["positions"] = torch.tensor([0, 2, 1])


@changed
def twice(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["positions"] = torch.tensor([0, 1, 1])


@changed
def negative(tensors: Tensors, record: dict[str, Any]) -> None:
    tensors["positions"] = torch.tensor([-1, 1, 2])


@changed
def no_rows(tensors: Tensors, record: dict[str, Any]) -> None:
    del tensors["pre_attn.0"]


@changed
def no_labels(tensors: Tensors, record: dict[str, Any]) -> None:
    del tensors["token_ids"]


@changed
def other_format(tensors: Tensors, record: dict[str, Any]) -> None:
    record["capture_format"] = "2"


@changed
def no_count(tensors: Tensors, record: dict[str, Any]) -> None:
    record["rows"] = "many"


@changed
def odd_dtype(tensors: Tensors, record: dict[str, Any]) -> None:
    record["dtype"] = "save"


@changed
def odd_site(tensors: Tensors, record: dict[str, Any]) -> None:
    record["sites"] = "pre_attn"


@changed
def unlike(tensors: Tensors, record: dict[str, Any]) -> None:
    """Nothing is changed."""


DAMAGES = {
    cut: "truncated",
    longer: "truncated",
    empty: "truncated or no safetensors",
    no_header: "truncated or no safetensors",
    endless_header: "truncated or no safetensors",
    not_json: "its header is damaged",
    swapped_shape: r"pre_attn.0 is torch.bfloat16\[8, 3\], its request has torch.bfloat16\[3, 8\]",
    other_dtype: r"pre_attn.0 is torch.float16\[3, 8\]",
    fewer_positions: r"positions is torch.int64\[2\]",
    unsorted: "positions of probe are not sorted",
    twice: "positions of probe are not sorted",
    negative: "positions of probe are not sorted",
    no_rows: "has no tensor (probe/)?pre_attn.0",
    no_labels: "has no tensor (probe/)?token_ids",
    other_format: "a capture of format '2'; format '1' is read",
    no_count: "its metadata is damaged",
    odd_dtype: "its metadata is damaged: ValueError.\"unknown dtype 'save'",
    odd_site: "its metadata is damaged",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files(tmp_path: Path, layout: str) -> None:
    file = one(tmp_path, layout)
    good = file.read_bytes()
    for damage, message in DAMAGES.items():
        file.write_bytes(damage(good))
        with pytest.raises(CaptureFileError, match=message) as raised:
            read_all(tmp_path)
        assert str(file) in str(raised.value), damage
    file.write_bytes(unlike(good))
    read_all(tmp_path)
    file.write_bytes(good)
    read_all(tmp_path)


READ = Attention(("mass", "top"), ("a", "b"), ((0, 2), (1, 3)), 2, "", 3)
"""A row of it has six numbers a head."""


def test_damaged_facts_of_attention(tmp_path: Path) -> None:
    """Its widths are those of the rows, and every field is what it must be."""
    sites, heads = (("attn", 0), ("attn", 3)), ((0, 2), (1, 3))
    info = replace(
        request("of attention", sites, torch.float32, width=12, request_id="probe", tag="t"),
        heads=heads, made=READ, projected=False,
    )  # fmt: skip
    with started(str(tmp_path), layout="packed") as consumer:
        payload, batches = publish(consumer, info)
    file = tmp_path / str(payload["paths"][0])
    good = file.read_bytes()
    rows = reader.open(str(tmp_path)).find("probe").attention(3)
    assert (rows.heads, rows.ranges, rows.give) == ((1, 3), ("a", "b"), ("mass", "top"))
    values = torch.cat([batch.values[1] for batch in batches]).unflatten(1, (2, 6))
    assert torch.equal(rows.mass.view(torch.int32), values[..., :2].view(torch.int32))
    assert torch.equal(rows.top_positions, values[..., 2:4].view(torch.int32))
    known = json.loads(facts(good)["attention"])
    wrong: dict[str, Any] = {
        "give": ["odd"], "names": 1, "ranges": [["x"]], "top": 3, "sum": "heads", "stop": None,
    }  # fmt: skip
    for damage in [*({**known, name: value} for name, value in wrong.items()), None]:

        @changed
        def damaged(tensors: Tensors, record: dict[str, Any], damage: Any = damage) -> None:
            if damage is None:
                del record["heads"]
            else:
                record["attention"] = json.dumps(damage)

        file.write_bytes(damaged(good))
        with pytest.raises(CaptureFileError, match="its metadata is damaged"):
            reader.open(str(tmp_path)).find("probe").attention(3)
    file.write_bytes(unlike(good))
    assert len(reader.open(str(tmp_path)).find("probe").attention(3)) == len(rows)


SEEN = Features("mood", 40, 2, (7, 3), 0.5, True)
"""A row of it has eight numbers."""


def test_damaged_facts_of_features(tmp_path: Path) -> None:
    """Their width is that of the rows, and every field is what it must be."""
    site = ("post_block", 3)
    info = replace(
        request("of features", (site,), torch.float32, width=8, request_id="probe", tag="t"),
        made=SEEN, projected=False,
    )  # fmt: skip
    with started(str(tmp_path), layout="packed") as consumer:
        payload, batches = publish(consumer, info)
    file = tmp_path / str(payload["paths"][0])
    good = file.read_bytes()
    rows = reader.open(str(tmp_path)).find("probe").features(*site)
    values = torch.cat([batch.values[0] for batch in batches])
    assert (rows.features, rows.asked) == ("mood", (7, 3))
    assert torch.equal(rows.top_ids, values[:, :2].view(torch.int32))
    assert torch.equal(rows.values.view(torch.int32), values[:, 4:6].view(torch.int32))
    known = json.loads(facts(good)["features"])
    wrong: dict[str, Any] = {"name": 1, "size": "x", "top": 3, "ids": [1], "above": "x", "error": 2}
    for damage in ({**known, name: value} for name, value in wrong.items()):

        @changed
        def damaged(tensors: Tensors, record: dict[str, Any], damage: Any = damage) -> None:
            record["features"] = json.dumps(damage)

        file.write_bytes(damaged(good))
        with pytest.raises(CaptureFileError, match="its metadata is damaged"):
            reader.open(str(tmp_path)).find("probe").features(*site)


def facts(data: bytes) -> dict[str, str]:
    """The metadata of a file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def test_every_truncation_and_many_flipped_bits_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing but the one kind of error comes out, whatever a header says."""
    file = one(tmp_path, "packed")
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    random = np.random.default_rng(0)
    for length in range(0, len(good), 41):
        file.write_bytes(good[:length])
        with pytest.raises(CaptureFileError):
            read_all(tmp_path)
    for _ in range(200):
        data = bytearray(good)
        data[random.integers(header)] ^= 1 << int(random.integers(8))
        file.write_bytes(data)
        with suppress(CaptureFileError):
            read_all(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_no_request_is_passed_over(tmp_path: Path, layout: str) -> None:
    file = one(tmp_path, layout)
    for folder in {tmp_path, tmp_path / "t", file.parent}:
        (folder / ".0123.tmp").write_bytes(b"half")
        (folder / "notes.txt").write_text("mine")
    (tmp_path / "t" / ".4567.tmp").mkdir()
    shutil.copy(file, tmp_path / "t" / ".4567.tmp" / "pre_attn.0.safetensors")
    (tmp_path / "other.safetensors").write_bytes(b"")
    assert [r.name for r in reader.open(str(tmp_path))] == ["probe"]
    read_all(tmp_path)


def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    one(tmp_path, "packed")
    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "t" / "model.safetensors")
    stored = {r.name: r for r in reader.open(str(tmp_path))}
    with pytest.raises(CaptureFileError, match=r"t/model.safetensors: is no capture"):
        _ = stored["model"].complete
    assert stored["probe"].complete


def test_a_lacking_file_makes_a_request_incomplete(tmp_path: Path) -> None:
    file = one(tmp_path, "per_file")
    file.unlink()
    [stored] = reader.open(str(tmp_path)).incomplete()
    assert stored.error == f"{stored.path}: the file of pre_attn.0 is missing"
    with pytest.raises(CaptureFileError, match=r"the file of pre_attn.0 is missing"):
        stored.rows("pre_attn", 0)
    assert len(stored.rows("post_block", 0)) == 3
    for left in file.parent.iterdir():
        left.unlink()
    with pytest.raises(CaptureFileError, match="has no file of captured rows"):
        list(reader.open(str(tmp_path)).incomplete())


def test_files_of_two_requests_are_no_request(tmp_path: Path) -> None:
    """As two engines at one object store could leave them."""
    file = one(tmp_path / "a", "per_file")
    other = one(tmp_path / "b", "per_file")
    shutil.copy(other, file)
    [stored] = reader.open(str(tmp_path / "a")).incomplete()
    assert stored.error == f"{stored.path}: its files are of 2 requests"
    with pytest.raises(CaptureFileError, match="is of another request than its neighbours"):
        stored.rows("pre_attn", 0)


def test_it_is_lazy(tmp_path: Path) -> None:
    """A file is opened when something of it is asked, and rows are mapped, not read."""
    with started(str(tmp_path)) as consumer:
        for i in range(5):
            _, batches = publish(consumer, request(request_id=f"r{i}"), seed=i)
    for i in range(4):
        (tmp_path / "default" / f"r{i}.safetensors").write_bytes(b"")
    captures = reader.open(str(tmp_path))
    last = list(captures)[-1]
    rows = last.rows(*SITES[1])
    assert same(rows, whole(batches, 1))
    assert captures.find("r4").complete
    mapped = Path("/proc/self/maps").read_text()
    assert last.path in mapped
    rows.values[:] = 0
    assert same(last.rows(*SITES[1]), whole(batches, 1)), "the file is not written to"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        reader.open(str(tmp_path / "none"))
    one(tmp_path, "packed")
    captures = reader.open(str(tmp_path))
    with pytest.raises(KeyError, match="no request 'other'"):
        captures.find("other")
    with pytest.raises(KeyError, match="no request 'probe'"):
        captures.find("probe", "x")
    one_more = tmp_path / "u"
    shutil.copytree(tmp_path / "t", one_more)
    with pytest.raises(ValueError, match=r"several requests are named 'probe': .*t/probe.*u/probe"):
        captures.find("probe")
    assert captures.find("probe", "u").complete
