# SPDX-License-Identifier: Apache-2.0
"""What the peers' benchmark counts: each call, results that are held, files as large as ours."""

from __future__ import annotations

import argparse
import weakref
from pathlib import Path

import pytest

from benchmarks import show, targets
from benchmarks.peers.disk import Disk, filesystem_of
from benchmarks.peers.workloads import (
    ALL_FILES,
    ALL_INLINE,
    DISK,
    PLAIN,
    Answer,
    Load,
    Timer,
    arguments,
)
from benchmarks.results import Row, Run

pytestmark = pytest.mark.quick

LOAD = Load(4, 8)
MADE_BY = {"gpu": "none", "date": "2026-01-01 00:00 UTC"}


class Result:
    """Something that a call returns."""


def options(*more: str) -> argparse.Namespace:
    return arguments(None).parse_args(["--model", "m", "--stock", "s", *more])


def test_shapes_are_said_as_they_are_shown() -> None:
    args = options("--extract", "16x512", "64x1024")
    assert args.extract == [Load(16, 512), Load(64, 1024)]
    assert [str(load) for load in args.extract] == ["16x512", "64x1024"]
    assert LOAD.tokens == 32
    with pytest.raises(SystemExit):
        options("--extract", "16")


def test_every_call_is_told_and_holds_the_results_of_the_one_before() -> None:
    answer = Answer("test")
    made: list[weakref.ref[Result]] = []
    alive: list[int] = []

    def work() -> Result:
        alive.append(sum(each() is not None for each in made))
        result = Result()
        made.append(weakref.ref(result))
        return result

    Timer(options("--calls", "3"), answer).extract(LOAD, "case", work, lambda r: {"checked": True})
    [row] = answer.rows
    assert alive == [0, 1, 1]
    assert len(row["values"]) == 2 and row["facts"]["checked"]
    assert [round(rate) for rate in row["values"]] == [row["facts"][f"call {n}"] for n in (2, 3)]
    assert row["facts"]["call 1"] > 0


def test_first_call_has_a_target_of_its_own() -> None:
    target = next(t for t in targets.TARGETS if t.facts)
    for first, said in ((95, "yes"), (80, "no, by 10.0 %")):
        facts = {"call 1": first, "call 2": 100}
        run = Run("peers", MADE_BY, [Row(ALL_INLINE, "prompt rate", "tok/s", [100.0], {}, facts)])
        [(_, _, ratio)] = targets.measured(target, [run.as_json()])
        assert targets.verdict(target, ratio) == said
    run = Run("peers", MADE_BY, [Row(ALL_INLINE, "prompt rate", "tok/s", [100.0])])
    assert not list(targets.measured(target, [run.as_json()]))


def test_files_are_compared_with_the_disk_alone() -> None:
    target = next(t for t in targets.TARGETS if t.case == ALL_FILES)
    rows = [
        Row(PLAIN, "prompt rate", "tok/s", [100.0]),
        Row(ALL_FILES, "prompt rate", "tok/s", [19.0], beside=[DISK]),
        Row(DISK, "prompt rate", "tok/s", [20.0]),
    ]
    for measured, count in ((rows, 1), (rows[:2], 0)):
        run = Run("peers", MADE_BY, measured, baselines=(PLAIN,), paired=False)
        assert len(list(targets.measured(target, [run.as_json()]))) == count


def test_disk_writes_what_was_there(tmp_path: Path) -> None:
    sizes = [0, 1, 5000, (16 << 20) + 7]
    disk = Disk(tmp_path, threads=2)
    (tmp_path / "folder").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / "folder" / str(number)).write_bytes(bytes(size))
    assert sorted(disk.clear()) == sizes
    assert disk.seconds(sizes) > 0
    assert disk.clear() == []
    for number, size in enumerate(sizes):
        disk._write(tmp_path / str(number), number, size)
    assert sorted(disk.clear()) == sizes


def test_filesystem_is_named() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/")) != "proc"


def test_long_tables_with_facts_are_cut_by_place() -> None:
    rows = [
        Row(f"case {n}", "rate", "tok/s", [1.0], {"requests": r}, {"call 1": n})
        for r in (1, 2)
        for n in range(30)
    ]
    lines = list(show.tables(Run("x", {}, rows).as_json()))
    titles = [line for line in lines if line.startswith("**")]
    assert titles == ["**rate, tok/s (requests 1)**", "**rate, tok/s (requests 2)**"]
    assert any("call 1: 7" in line for line in lines)
