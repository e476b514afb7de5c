# SPDX-License-Identifier: Apache-2.0
"""Reads the lines of JSONL, CSV and TSV as a stream; what is broken names its file and line."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DatasetError(ValueError):
    """Raised where data cannot be read, or its activations cannot be captured or written."""


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Read a text file, in UTF-8 with or without byte order mark.

    Yields:
        `file:line`, and the line with its end.

    Raises:
        DatasetError: a line is not UTF-8.
        OSError: the file cannot be read.
    """
    with open(file, "rb") as opened:
        for number, line in enumerate(opened, start=1):
            place = f"{file}:{number}"
            try:
                yield place, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DatasetError(f"{place}: is not UTF-8: {error}") from error


def read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    """Read a JSON value a line; empty lines are skipped.

    Yields:
        `file:line`, and the value.

    Raises:
        DatasetError: a line is not JSON, or as of `read_lines`.
    """
    for place, line in read_lines(file):
        if line.strip():
            yield place, parse_json(line.strip(), place)


def read_csv(file: Path, delimiter: str = ",") -> Iterator[tuple[str, dict[str, str]]]:
    """Read records below a header; empty lines are skipped.

    Yields:
        `file:line` where the record begins, as a quoted field may have lines of its own; and its
        fields by name.

    Raises:
        DatasetError: a quote is wrong, a record is not as long as the header, or as of
            `read_lines`.
    """
    # The standard library refuses fields of more than 128 KiB, for the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))
    reader = csv.reader((line for _, line in read_lines(file)), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        place = f"{file}:{reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DatasetError(f"{place}: is no CSV: {error}") from error
        if fields is None:
            return
        if names is None:
            names = fields
        elif fields:
            if len(fields) != len(names):
                raise DatasetError(f"{place}: has {len(fields)} fields, the header {len(names)}")
            yield place, dict(zip(names, fields, strict=True))


def parse_json(text: str, place: str) -> Any:
    """Parse JSON that stands at `place`; of a file as a whole the error adds the line.

    Raises:
        DatasetError: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if error.lineno > 1 or not place[-1].isdigit() else ""
        raise DatasetError(f"{place}{line}: is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deep
        raise DatasetError(f"{place}: is not JSON: {error}") from error
