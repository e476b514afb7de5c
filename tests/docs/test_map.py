# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/map.md name places that exist, in the process in which they run."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.docs.links import resolves

pytestmark = pytest.mark.quick

PAGE = (ROOT / "docs" / "map.md").read_text()
TITLES = (
    "A request, in",
    "Rows, out",
    "A change of the global state",
    "The start of an engine",
    "An HTTP body",
)
FOLDERS = {"frontend": "frontend", "scheduler": "engine core", "worker": "worker"}
"""Folder of `vllm/v1/interventions` -> the process in which its code runs."""
_PLACE = re.compile(r"([\w./-]+\.py):([A-Za-z_][\w.]*)")


def pictures(page: str) -> dict[str, str]:
    """Title -> its picture."""
    found = re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return dict(found)


def wrong(picture: str) -> list[str]:
    """Return the places that do not exist, and those that stand beside another process."""
    found, process = [], ""
    for line in picture.splitlines():
        process = line[:14].strip() or process
        for path, symbol in _PLACE.findall(line):
            folder = path.removeprefix("vllm/v1/interventions/").split("/")[0]
            if not resolves(path, symbol) or FOLDERS.get(folder, process) != process:
                found.append(f"{path}:{symbol}")
    return found


def test_there_are_five_pictures() -> None:
    assert tuple(pictures(PAGE)) == TITLES
    assert len(re.findall("^```text$", PAGE, re.MULTILINE)) == len(TITLES)


@pytest.mark.parametrize("title", TITLES)
def test_a_picture(title: str) -> None:
    picture = pictures(PAGE)[title]
    assert len(_PLACE.findall(picture)) >= 6
    assert wrong(picture) == []
    assert max(map(len, picture.splitlines())) <= 110


def test_what_is_not_there_is_reported() -> None:
    """The twin: a symbol and a file that do not exist, and a place in another process."""
    picture = """frontend      vllm/v1/interventions/frontend/request/resolve.py:resolve
              vllm/v1/interventions/frontend/request/resolve.py:nothing
              vllm/v1/interventions/nothing.py:resolve
              vllm/v1/interventions/scheduler/turns.py:Turns
engine core   vllm/v1/interventions/scheduler/turns.py:Turns
"""
    assert wrong(picture) == [
        "vllm/v1/interventions/frontend/request/resolve.py:nothing",
        "vllm/v1/interventions/nothing.py:resolve",
        "vllm/v1/interventions/scheduler/turns.py:Turns",
    ]
