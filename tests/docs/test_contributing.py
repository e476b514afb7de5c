# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING's five walks name files that exist, with what they say is in them."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.docs.links import resolves

pytestmark = pytest.mark.quick

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WALKS = (
    "A steering operation",
    "A capture point",
    "A capture consumer",
    "A decoder class",
    "An HTTP field",
)
_PLACE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+|[\w-]+\.(?:toml|md))(?::([A-Za-z_][\w.]*))?`")


def walks(page: str) -> dict[str, list[str]]:
    """Title -> the numbered items, of the section "Where to add"."""
    section = page.split("\n## Where to add\n")[1].split("\n## ")[0]
    return {
        title: re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
        for title, text in re.findall(
            r"^### (.+?)\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL
        )
    }


def absent(items: list[str]) -> list[str]:
    """The places that items name and that there are not: files, folders, symbols of files."""
    return [
        f"{path}:{symbol}".rstrip(":")
        for item in items
        for path, symbol in _PLACE.findall(item)
        if not (resolves(path, symbol) or (not symbol and (ROOT / path).is_dir()))
    ]


def test_there_are_five_walks() -> None:
    assert tuple(walks(PAGE)) == WALKS


@pytest.mark.parametrize("title", WALKS)
def test_a_walk(title: str) -> None:
    """Each item names a place, or a command; and all places are there."""
    items = walks(PAGE)[title]
    assert len(items) >= 4
    assert all(_PLACE.search(item) or "`make " in item for item in items)
    assert absent(items) == []


def test_what_is_not_there_is_reported() -> None:
    """The twin: a file, a symbol and a folder that there are not."""
    page = """
## Where to add

### A thing

1. `vllm/v1/steering_formula.py:Scalars` and `vllm/v1/interventions/terms.py:NOTHING`
2. `vllm/v1/nothing.py`, `tests/support`, `tests/nowhere`, `upstream.toml`, `nothing.toml`

## Else

1. `vllm/not/in/a/walk.py`
"""
    assert absent(walks(page)["A thing"]) == [
        "vllm/v1/interventions/terms.py:NOTHING",
        "vllm/v1/nothing.py",
        "tests/nowhere",
        "nothing.toml",
    ]
