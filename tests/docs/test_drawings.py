# SPDX-License-Identifier: Apache-2.0
"""The drawings in docs/drawings are what `python -m tools.drawings` draws, of names in the code."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import ROOT
from tests.docs.links import resolves
from tools import drawings
from tools.drawings import DRAWINGS, FOLDER
from tools.svg import Drawing, Name

pytestmark = pytest.mark.quick

_LIKE_A_NAME = re.compile(r"[a-z0-9][A-Z]|[A-Za-z]_[a-z]|[a-z]\.[a-z]|\w\(|\.py")


def wrong(drawing: Drawing) -> list[str]:
    """Names that are not in the code, folders that are not there, words that look like names."""
    found = [
        f"{name.path}:{name.symbol}"
        for name in drawing.names
        if not resolves(name.path, name.symbol) or not name.symbol.endswith(name.shown)
    ]
    found += [folder for folder in drawing.folders if not (ROOT / folder).is_dir()]
    return found + [words for words in drawing.words if _LIKE_A_NAME.search(words)]


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_shows_what_is_in_the_code(name: str) -> None:
    drawing = DRAWINGS[name]()
    assert len(drawing.names) >= 5
    assert wrong(drawing) == []


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_file_is_what_the_script_draws(name: str) -> None:
    """After a change: `python -m tools.drawings`."""
    assert (FOLDER / f"{name}.svg").read_text() == DRAWINGS[name]().svg()


def test_the_script_writes_all(tmp_path: Path) -> None:
    assert drawings.main(tmp_path) == 0
    for name in DRAWINGS:
        assert (tmp_path / f"{name}.svg").read_text() == (FOLDER / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", DRAWINGS)
def test_all_that_is_drawn_is_inside(name: str) -> None:
    drawing = DRAWINGS[name]()
    for node in ElementTree.fromstring(drawing.svg()).iter():
        x, y = float(node.get("x", 0)), float(node.get("y", 0))
        assert 0 <= x <= drawing.width and 0 <= y <= drawing.height
        if node.tag.endswith("rect"):
            assert x + float(node.get("width", 0)) <= drawing.width
            assert y + float(node.get("height", 0)) <= drawing.height


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_document_shows_it(name: str) -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert f"(drawings/{name}.svg)" in pages


def test_what_is_wrong_is_reported() -> None:
    """The twin: a symbol, a file and a folder that there are not, and a name among words."""
    drawing = Drawing("wrong", 100, 100)
    drawing.lane(0, 0, 100, 100, "Nowhere", "vllm/v1/nowhere")
    drawing.name(0, 10, Name(drawings.TAPS, "SiteTap.reads"))
    drawing.name(0, 20, Name("vllm/v1/nothing.py", "nothing"))
    drawing.name(0, 30, Name(drawings.TAPS, "SiteTap.read", "steer"))
    drawing.name(0, 40, Name(drawings.TAPS, "SiteTap.read"))
    drawing.sentence(0, 50, "calls ", Name(drawings.TAPS, "SiteTaps"), " and steer_pair")
    drawing.text(0, 60, "a RowRelay")
    drawing.text(0, 70, "a row of the stream x[l+1], once")
    assert wrong(drawing) == [
        f"{drawings.TAPS}:SiteTap.reads",
        "vllm/v1/nothing.py:nothing",
        f"{drawings.TAPS}:SiteTap.read",
        f"{drawings.TAPS}:SiteTaps",
        "vllm/v1/nowhere",
        " and steer_pair",
        "a RowRelay",
    ]
