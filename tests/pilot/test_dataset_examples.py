# SPDX-License-Identifier: Apache-2.0
"""Data sets in all formats are the same examples, and what is broken is named by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from vllm.pilot.dataset import DataFile, DatasetError
from vllm.pilot.dataset.examples import size_of

pytestmark = pytest.mark.quick

RECORDS: list[dict[str, Any]] = [
    {"id": f"ex/{i}", "label": i % 3, "text": f'say "{i}",\nand\tmöre {"x" * i}'} for i in range(50)
]


def write_jsonl(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_csv(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(RECORDS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(RECORDS)
    return path


def write_saved(folder: Path) -> Path:
    """As `datasets.save_to_disk` writes it, in two files."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (RECORDS[:20], RECORDS[20:]), strict=True):
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write_parquet(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def facts(data: DataFile) -> list[tuple[Any, ...]]:
    return [(e.number, e.id, int(e.label), e.prompt) for e in data]


def test_all_formats_are_the_same_examples(tmp_path: Path) -> None:
    expected = [(i, r["id"], r["label"], r["text"]) for i, r in enumerate(RECORDS)]
    assert facts(DataFile(str(write_jsonl(tmp_path / "a.jsonl")))) == expected
    assert facts(DataFile(str(write_csv(tmp_path / "a.csv")))) == expected
    assert facts(DataFile(str(write_csv(tmp_path / "a.tsv", "\t")))) == expected
    assert facts(DataFile(str(write_parquet(tmp_path / "a.parquet")))) == expected
    assert facts(DataFile(str(write_saved(tmp_path / "saved")))) == expected
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, part in enumerate((RECORDS[:7], RECORDS[7:])):
        write_parquet(folder / f"{number}.parquet", part)
    assert facts(DataFile(str(folder))) == expected
    write_saved(tmp_path / "splits" / "test")
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert facts(DataFile(str(tmp_path / "splits"), split="test")) == expected
    with pytest.raises(DatasetError, match=r"name a split \(--split\): test"):
        DataFile(str(tmp_path / "splits")).contents()


def test_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    records = [
        {"q": chat, "key": 7, "y": [1, "a"], "text": "b"},
        {"q": [3, 4], "key": 8, "y": 0},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", records))
    first, second = DataFile(path, "q", "key", "y")
    assert (first.id, first.label, first.prompt) == (7, [1, "a"], chat)
    assert (second.id, second.prompt, size_of(chat), size_of([3, 4])) == (8, [3, 4], 2, 2)
    # Without columns the first known one is taken, and the id is the number.
    (plain,) = DataFile(str(write_jsonl(tmp_path / "b.jsonl", [{"text": "t"}])))
    assert (plain.id, plain.label, plain.prompt) == (0, None, "t")


def test_contents(tmp_path: Path) -> None:
    data = DataFile(str(write_jsonl(tmp_path / "a.jsonl")))
    contents = data.contents(sample=5)
    assert contents.num_examples == 50
    assert contents.size == sum(len(r["text"]) for r in RECORDS)
    numbers = [example.number for example in contents.sample]
    assert len(set(numbers)) == 5 and numbers == sorted(numbers) and numbers[-1] > 5
    assert contents.sha256 == data.contents().sha256
    write_jsonl(tmp_path / "a.jsonl", [*RECORDS[:-1], {**RECORDS[-1], "label": 0}])
    assert contents.sha256 != data.contents().sha256


GOOD = '{"text": "fine"}'


def jsonl(*lines: str) -> Callable[[Path], Path]:
    return lambda folder: write(folder / "d.jsonl", "\n".join(lines).encode())


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no JSON": (jsonl(GOOD, "", '{"text": "cut'), "d.jsonl:3: is not JSON: "),
    "no object": (jsonl(GOOD, "[1]"), "d.jsonl:2: is no JSON object"),
    "no column": (
        jsonl(GOOD, '{"a": 1, "b": 2}'),
        "d.jsonl:2: has none of the columns messages, prompt, ",
    ),
    "empty": (jsonl('{"text": ""}'), "d.jsonl:1: its prompt is empty"),
    "a number": (jsonl('{"text": 3}'), "d.jsonl:1: its prompt is of type int"),
    "no messages": (jsonl('{"messages": [{"role": "user"}]}'), "d.jsonl:1: a message needs a "),
    "an id": (
        jsonl('{"text": "a", "id": [1]}'),
        "d.jsonl:1: its id is of type list, not a string or int",
    ),
    "no UTF-8": (
        lambda folder: write(folder / "d.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'),
        "d.jsonl:2: is not UTF-8: ",
    ),
    "nothing": (jsonl(""), "d.jsonl: has no examples"),
    "fields": (
        lambda folder: write(folder / "d.csv", b'text,label\n"a\nb",1\nc,2,3\n'),
        "d.csv:4: has 3 fields, the header 2",
    ),
    "a quote": (lambda folder: write(folder / "d.csv", b'text\n"a"b\n'), "d.csv:2: is no CSV: "),
    "no Parquet": (lambda folder: write(folder / "d.parquet", b"PAR1"), "d.parquet[0]: is damaged"),
    "suffix": (lambda folder: write(folder / "d.txt", b"a"), "d.txt: .txt suffix; .jsonl, .csv, "),
    "no folder": (lambda folder: folder, "has neither .parquet files nor what"),
    "not there": (lambda folder: folder / "x.jsonl", "x.jsonl: does not exist"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_named(tmp_path: Path, what: str) -> None:
    make, message = BROKEN[what]
    path = make(tmp_path)
    with pytest.raises(DatasetError) as raised:
        DataFile(str(path)).contents()
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "d.jsonl"))
    for columns in ({"prompt_column": "q"}, {"id_column": "q"}, {"label_column": "q"}):
        with pytest.raises(
            DatasetError, match=r"d.jsonl:1: has no column 'q', but id, label, text"
        ):
            DataFile(path, **columns).contents()


def test_a_long_field(tmp_path: Path) -> None:
    """More than csv allows by default."""
    path = write(tmp_path / "d.csv", b"text\n" + b"x" * (1 << 18) + b"\n")
    assert [len(example.prompt) for example in DataFile(str(path))] == [1 << 18]


def test_a_selection_of_a_saved_data_set(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DatasetError, match="is a selection of rows"):
        DataFile(str(folder)).contents()
