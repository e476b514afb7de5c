# SPDX-License-Identifier: Apache-2.0
"""The records of operations: what they name exists, and the page has what they say."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from vllm.config.operations import (
    HEAD_OPERATIONS,
    INF,
    OPERATIONS,
    STREAM_OPERATIONS,
    Number,
    Operation,
)
from vllm.config.steering import ASKED, FAMILIES, SteeringConfig
from vllm.v1.steering_formula import Scalars

pytestmark = pytest.mark.quick


def row_of_page(name: str) -> str:
    """The cell of fields of an operation in the table of docs/steering.md."""
    page = (ROOT / "docs" / "steering.md").read_text()
    [cell] = re.findall(rf"^\| `{name}` \| ([^|]*) \|", page, re.MULTILINE)
    return str(cell)


def said(operation: Operation) -> list[str]:
    """The fields of a record as the page writes them."""
    fields = [f"`{operation.vector}`"] if operation.vector else []
    fields += [f"`{key}`" for key in (operation.reads, operation.other) if key]
    fields += [f"`{operation.shift}`?"] if operation.shift else []
    if operation.rows:
        fields.append("`values`")
    for number in operation.numbers:
        default = number.default
        end = "" if default is None else f"={default:g}" if not number.flag else "=false"
        fields.append(f"`{number.key}`{'?' if abs(number.default or 0) == INF else end}")
    return fields


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_page_has_all_fields(name: str) -> None:
    missing = [field for field in said(OPERATIONS[name]) if field not in row_of_page(name)]
    assert missing == []


def test_a_field_that_the_page_lacks_is_found() -> None:
    """The twin: another default, another key."""
    other = Operation("ablate", (Number("strength", 2.0),), vector="axis")
    assert [field for field in said(other) if field not in row_of_page("ablate")] == [
        "`axis`",
        "`strength`=2",
    ]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_numbers_are_those_of_the_formula(operation: Operation) -> None:
    columns = [column for number in operation.numbers for column in number.becomes]
    columns += [column for column, _ in operation.fixed]
    assert set(columns) <= set(Scalars._fields) and len(set(columns)) == len(columns)
    assert {operation.scaled, operation.times} <= {"", *columns}
    keys = {number.key for number in operation.numbers}
    assert set(operation.one_of) <= keys


def test_families_and_help() -> None:
    assert (*OPERATIONS, *ASKED, "gate") == FAMILIES
    assert set(STREAM_OPERATIONS) | set(HEAD_OPERATIONS) == set(OPERATIONS)
    source = (ROOT / "vllm" / "config" / "steering.py").read_text()
    field = source[source.index("steering_families: list[str]") :]
    text = field[: field.index("max_steering_rows")]
    assert [name for name in OPERATIONS if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("more", [[], ["focus"], ["ablate"], ["reconstruct"]])
def test_all_is_every_family_but_those_that_must_be_named(more: list[str]) -> None:
    config = SteeringConfig(enable_steering=True, steering_families=["all", *more])
    named = {*FAMILIES} - {*ASKED} | {*more}
    assert {*config.steering_families} == named and config.focuses == (more == ["focus"])
    each = SteeringConfig(enable_steering=True, steering_families=sorted(named))
    assert config.compute_hash() == each.compute_hash()


EXAMPLES = (
    "tests/support/op_reference.py",
    "tests/support/terms.py",
    "tests/support/costly_fields.py",
    "tests/serving/test_steering_ops.py",
    "tests/serving/test_lane_ops.py",
    "tests/gpu/steering.py",
    "tests/interventions/test_ops.py",
)
"""Files in which every operation on the stream has an example or its meaning. Most of them are read
by tests with engines, which take minutes; this test tells at once which lack an operation."""


def named_in(source: str) -> set[str]:
    """Operations whose name is a string in a source."""
    return {name for name in STREAM_OPERATIONS if re.search(rf"[\"']{name}[\"']", source)}


@pytest.mark.parametrize("path", EXAMPLES)
def test_each_operation_has_its_examples(path: str) -> None:
    source = (ROOT / path).read_text()
    assert named_in(source) == set(STREAM_OPERATIONS)
    assert named_in(source.replace('"ablate"', "")) == {*STREAM_OPERATIONS} - {"ablate"}
    assert f"`{path}:" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("add", {"constant": 1.0}, {"scale": 1.0}),
        ("clamp", {"lo": -INF, "hi": 2.0, "strength": 1.0}, {"hi": 2.0}),
        (
            "clamp",
            {"lo": -1.0, "hi": 2.0, "strength": 0.5},
            {"lo": -1.0, "hi": 2.0, "strength": 0.5},
        ),
        ("pin", {"lo": 3.0, "hi": 3.0, "strength": 1.0}, {"value": 3.0}),
        ("normalize", {"renorm": 1.0}, {}),
    ],
)
def test_numbers_are_written_as_they_are_read(
    name: str, numbers: dict[str, float], expected: dict[str, float]
) -> None:
    assert OPERATIONS[name].written(numbers) == expected
