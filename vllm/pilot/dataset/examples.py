# SPDX-License-Identifier: Apache-2.0
"""The examples of a data set: JSONL, CSV, TSV, Parquet, or a Hugging Face data set on disk.

Read as a stream, so that it may be larger than memory, and checked example by example: what is
wrong names the file and the line.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.pilot.records import DatasetError, read_csv, read_jsonl

PROMPT_COLUMNS = ("messages", "prompt", "text")
"""Columns in which prompts are looked for if no column is named."""

Prompt = str | list[dict[str, str]] | list[int]
"""A text, the messages of a chat, or token ids."""


@dataclass(frozen=True)
class Example:
    """One entry of a data set."""

    number: int
    """Counted from 0 in the order of the data set."""
    place: str
    """Place of the example: `file:line`, or `file[row]` where there are no lines."""
    id: str | int
    """Id of the example in the data set; the example's number if the data set has none for it."""
    label: Any
    """A JSON value; None if there is no such column."""
    prompt: Prompt


@dataclass(frozen=True)
class Contents:
    """Facts about a data set that one pass over it found."""

    num_examples: int
    sha256: str
    """The digest of the bytes of its files, one after the other."""
    size: int
    """Characters of all prompts; of token ids the ids."""
    sample: list[Example]
    """Some examples, spread evenly, in order."""


@dataclass(frozen=True)
class DataFile:
    """A data set on disk. Iterating reads it, from the start each time.

    Raises, when it is read:
        DatasetError: naming file and line: no such column, a value that is no prompt, a broken
            line; or pyarrow is needed and not installed.
        OSError: the file cannot be read.
    """

    path: str
    """A .jsonl, .csv, .tsv or .parquet file; a folder of .parquet files, or one that
    `datasets.save_to_disk` wrote."""
    prompt_column: str | None = None
    """The column of prompts: texts, lists of messages, or lists of token ids. If None the first of
    `PROMPT_COLUMNS` that there is."""
    id_column: str | None = None
    """The column of ids; "id" if there is one."""
    label_column: str | None = None
    """The column of labels; "label" if there is one."""
    split: str | None = None
    """Name of the split to read, of a folder that has several."""

    def __iter__(self) -> Iterator[Example]:
        """Iterate over all examples, each checked."""
        for number, (place, record) in enumerate(self.records()):
            yield self._example(number, place, record)

    def contents(self, sample: int = 64) -> Contents:
        """Read and check all of it.

        Args:
            sample: how many examples to keep.

        Raises:
            DatasetError: there are no examples.
        """
        kept: list[Example] = []
        size = count = 0
        pick = random.Random(0)
        for example in self:
            count += 1
            size += size_of(example.prompt)
            # A reservoir: each example stays with the same chance, whatever their number.
            if len(kept) < sample:
                kept.append(example)
            elif (place := pick.randrange(count)) < sample:
                kept[place] = example
        if not count:
            raise DatasetError(f"{self.path}: has no examples")
        kept.sort(key=lambda example: example.number)
        return Contents(count, self.digest(), size, kept)

    def digest(self) -> str:
        """Return the SHA-256 of the bytes of its files, one after the other."""
        digest = hashlib.sha256()
        for file in self.files():
            with open(file, "rb") as opened:
                while block := opened.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()

    def files(self) -> list[Path]:
        """Return the files that hold the data, in their order.

        Raises:
            DatasetError: there is nothing that can be read.
        """
        path = Path(self.path)
        if not path.exists():
            raise DatasetError(f"{path}: does not exist")
        if path.is_file():
            return [path]
        if (listed := path / "dataset_dict.json").exists():
            splits = json.loads(listed.read_text())["splits"]
            if self.split is None or self.split not in splits:
                raise DatasetError(f"{path}: name a split (--split): {', '.join(splits)}")
            path = path / self.split
        if (state := path / "state.json").exists():
            facts = json.loads(state.read_text())
            if facts.get("_indices_data_files"):
                raise DatasetError(
                    f"{path}: is a selection of rows of its files; save it after "
                    "dataset.flatten_indices()"
                )
            return [path / file["filename"] for file in facts["_data_files"]]
        if found := sorted(path.glob("*.parquet")):
            return found
        raise DatasetError(
            f"{path}: has neither .parquet files nor what datasets.save_to_disk writes"
        )

    # -- formats --------------------------------------------------------------------------------

    def records(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Read the entries as they are: the place of each, and its columns by name."""
        for file in self.files():
            kind = file.suffix.lower()
            if kind in (".jsonl", ".ndjson"):
                yield from map(_need_object, read_jsonl(file))
            elif kind in (".csv", ".tsv"):
                yield from read_csv(file, "\t" if kind == ".tsv" else ",")
            elif kind in (".parquet", ".arrow"):
                yield from _arrow(file)
            else:
                raise DatasetError(
                    f"{file}: {kind or 'no'} suffix; .jsonl, .csv, .tsv, .parquet, and folders "
                    "that datasets.save_to_disk wrote are read"
                )

    def _example(self, number: int, place: str, record: Mapping[str, Any]) -> Example:
        if self.prompt_column is not None:
            prompt = _need_column(record, self.prompt_column, place)
        else:
            named = next((name for name in PROMPT_COLUMNS if name in record), None)
            if named is None:
                raise DatasetError(
                    f"{place}: has none of the columns {', '.join(PROMPT_COLUMNS)}, but "
                    f"{_names(record)}: name one (--prompt-column)"
                )
            prompt = record[named]
        own = record.get("id") if self.id_column is None else None
        if self.id_column is not None:
            own = _need_column(record, self.id_column, place)
        if not isinstance(own, str | int | None) or isinstance(own, bool):
            kind = type(own).__name__
            raise DatasetError(f"{place}: its id is of type {kind}, not a string or int")
        label = record.get("label") if self.label_column is None else None
        if self.label_column is not None:
            label = _need_column(record, self.label_column, place)
        try:
            json.dumps(label)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{place}: its label is no JSON value: {error}") from error
        checked = need_prompt(prompt, place)
        return Example(number, place, number if own is None else own, label, checked)


def size_of(prompt: Prompt) -> int:
    """Return the characters of a prompt; of token ids their number."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(part["content"]) if isinstance(part, dict) else 1 for part in prompt)


def _need_object(entry: tuple[str, Any]) -> tuple[str, Mapping[str, Any]]:
    place, record = entry
    if not isinstance(record, dict):
        raise DatasetError(f"{place}: is no JSON object")
    return place, record


def _need_column(record: Mapping[str, Any], column: str, place: str) -> Any:
    if column not in record:
        raise DatasetError(f"{place}: has no column {column!r}, but {_names(record)}")
    return record[column]


def _names(record: Mapping[str, Any]) -> str:
    """The columns, for a message: not all of hundreds."""
    names = [str(name)[:40] for name in itertools.islice(record, 8)]
    return ", ".join(names + ["..."] * (len(record) > 8))


def need_prompt(value: Any, place: str) -> Prompt:
    """Return a value of a data set as a prompt.

    Raises:
        DatasetError: it is none; the message names `place`.
    """
    if not isinstance(value, str | list):
        kind = type(value).__name__
        raise DatasetError(
            f"{place}: its prompt is of type {kind}, not a text, messages or token ids"
        )
    if not value:
        raise DatasetError(f"{place}: its prompt is empty")
    if isinstance(value, str) or all(type(part) is int for part in value):
        return value
    for message in value:
        if not isinstance(message, Mapping) or not (
            isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        ):
            raise DatasetError(f"{place}: a message needs a 'role' and a 'content', both texts")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _arrow(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"{file}: needs pyarrow to be read: pip install pyarrow") from error
    row = 0
    try:
        if file.suffix == ".arrow":
            batches: Any = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        else:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(1024)
        for batch in batches:
            for record in batch.to_pylist():
                yield f"{file}[{row}]", record
                row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{file}[{row}]: is damaged: {error}") from error
