# SPDX-License-Identifier: Apache-2.0
"""Every file of ours is in an area, and what counts as a line of code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delivery.fork import Fork
from tools import areas
from tools.check import check
from tools.code_lines import code_lines
from tools.pins import ROOT, BuildError

pytestmark = pytest.mark.quick

LEGAL = {
    "vllm/v1/capture/consumer.py": ("consumers", True),
    "vllm/v1/capture/consumers/logging.py": ("files and consumers", False),
    "vllm/v1/capture/reader.py": ("files and consumers", False),
    "vllm/v1/capture/transport/host.py": ("transport", True),
    "vllm/v1/interventions/terms.py": ("operations, gates", True),
    "vllm/v1/interventions/sites.py": ("shared words", True),
    "vllm/v1/interventions/worker/runner.py": ("runner, start-up", True),
    "vllm/v1/interventions/worker/making/lens.py": ("lenses", True),
    "vllm/entrypoints/serve/steering/client/answers.py": ("server and client", False),
    "vllm/entrypoints/serve/steering/body.py": ("server and client", False),
    "vllm/pilot/sweep.py": ("toolkit", False),
}


@pytest.mark.parametrize("name", LEGAL)
def test_the_longest_place_is_the_area(miniature: Fork, name: str) -> None:
    area = areas.area_of(name)
    assert area and (area.name, area.core) == LEGAL[name]
    write(miniature.root / name)
    assert areas.misplaced(miniature.root) == []


@pytest.mark.parametrize(
    "name",
    [
        "vllm/v1/steer.py",
        "vllm/v1/engine/capture.py",
        "vllm/v1/capture_more/consumer.py",
        "vllm/config/capture.pyi",
        "vllm/pilot.py",
    ],
)
def test_a_file_in_no_area(miniature: Fork, name: str) -> None:
    write(miniature.root / name)
    assert areas.area_of(name) is None
    (said,) = areas.misplaced(miniature.root)
    assert said.startswith(f"{name} is in no area; move it to one of vllm/config/capture.py, ")
    assert "vllm/pilot/" in said and said.endswith("in tools/areas.py:AREAS")


@pytest.mark.parametrize(
    "name", ["patches/foo.patch", "patches/seams/more/a.patch", "patches/taps/notes.txt"]
)
def test_a_patch_in_no_place(miniature: Fork, name: str) -> None:
    assert areas.misplaced(miniature.root) == []
    write(miniature.root / name)
    (said,) = areas.misplaced(miniature.root)
    assert said.startswith(f"{name} is where nothing reads it; a seam goes into patches/seams")


def test_check_says_what_is_misplaced(miniature: Fork) -> None:
    write(miniature.root / "vllm/v1/capture/ours.py")
    miniature.seam()
    miniature.assemble()
    assert check(miniature.root, miniature.pin) == []
    write(miniature.root / "patches/foo.patch")
    write(miniature.root / "vllm/v1/ours.py")
    miniature.assemble()
    area, patch = check(miniature.root, miniature.pin)
    assert "vllm/v1/ours.py is in no area" in area and "patches/foo.patch is where" in patch
    (miniature.root / "patches/foo.patch").rename(miniature.root / "patches/seams/foo.patch")
    with pytest.raises(BuildError, match=r"foo.patch is not listed in .*series; add it there"):
        check(miniature.root, miniature.pin)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


CODE = '''# a comment
"""A docstring,
of two lines."""

import os  # does not count


class One:
    """Another."""

    field: int = 0
    """Of a field."""

    def method(self) -> str:
        text = """not a docstring

        so all lines count"""
        return os.path.join(
            text,

            # a comment within
            "x",
        )
'''


def test_code_lines() -> None:
    assert code_lines(CODE) == 3 + 3 + 4
    assert code_lines(CODE.replace('"""Of a field."""', "other: int = 0")) == 11
    assert code_lines("# nothing\n\n") == 0


def test_table(miniature: Fork) -> None:
    miniature.seam()
    reader = miniature.root / "vllm/v1/capture/reader.py"
    write(reader)
    reader.write_text("a = 1\n# not code\nb = 2\n")
    lines = areas.table(miniature.root).splitlines()
    got = {line[:25].strip(): line[25:].split() for line in lines[2:]}
    assert got["modules, globals"][0] == got["core"][0] == got["seams"][0] == "1"
    assert got["files and consumers"][0] == got["satellites"][0] == "2"
    assert got["toolkit"][0] == "0"
    core = [area for area in areas.AREAS if area.core]
    assert got["core"][1:] == [f"{sum(area.budget for area in core):,}", "10,045"]


def test_more_lines_than_the_budget(miniature: Fork) -> None:
    """With a twin that has as many lines as it may have."""
    rules = miniature.root / "vllm/v1/capture/rules.py"
    write(rules)
    [budget] = [area.budget for area in areas.AREAS if area.name == "rules"]
    rules.write_text("a = 1\n" * budget)
    assert areas.over_budget(miniature.root) == []
    rules.write_text("a = 1\n" * (budget + 1))
    miniature.seam()
    miniature.assemble()
    [said] = areas.over_budget(miniature.root)
    assert said.startswith(f"rules has {budget + 1} lines of code, its budget in tools/areas.py")
    assert check(miniature.root, miniature.pin) == [said]


def test_every_area_is_within_its_budget() -> None:
    assert areas.over_budget(ROOT) == []


def test_no_place_is_listed_twice_and_files_exist() -> None:
    places = [place for area in areas.AREAS for place in area.places]
    assert len(places) == len(set(places))
    gone = [place for place in places if place.endswith(".py") and not (ROOT / place).exists()]
    assert gone == []
