# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and the pages of runs follow the measurements; results name their setup."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill, report, results, scale, show, targets, tpot
from benchmarks.results import Row, Run

pytestmark = pytest.mark.quick

TEMPLATE, INDEX_TEMPLATE = report.TEMPLATE.read_text(), report.INDEX_TEMPLATE.read_text()
MADE_BY = {"gpu": "none", "date": "2026-01-01 00:00 UTC"}
IDLE = next(t for t in targets.TARGETS if (t.benchmark, t.case) == ("tpot", "idle"))


def made(idle: float) -> dict[str, Any]:
    """A run in which a token takes `idle` ms where enabled, and 10 ms in upstream."""
    rows = [
        Row("stock", "TPOT", "ms", [10.0, 11.0, 12.0], {"batch": 32}),
        Row("idle", "TPOT", "ms", [idle, idle * 1.1, idle * 1.2], {"batch": 32}),
    ]
    run: dict[str, Any] = json.loads(json.dumps(Run("tpot", MADE_BY, rows).as_json()))
    return run


def test_pages_are_generated() -> None:
    """After measuring, or a change of the words: `python -m benchmarks.report`."""
    runs = report.load(report.MEASUREMENTS)
    assert report.PAGE.read_text() == report.render(runs, TEMPLATE)
    found = {path.name: path.read_text() for path in report.MEASUREMENTS.glob("*.md")}
    assert found == report.pages(runs)
    shown = {name for name, run in runs.items() if report.is_plotted(run)}
    figures = {path.name for path in (report.PAGE.parent / "figures").glob("*.svg")}
    assert figures == {Path(report.figure(name)).name for name in shown}


def test_page_of_many_gpus_is_generated() -> None:
    """After measuring, or a change of the words: `python -m benchmarks.scale`."""
    runs, template = report.load(report.MEASUREMENTS), scale.TEMPLATE.read_text()
    assert scale.PAGE.read_text() == scale.render(runs, template)
    other = deepcopy(runs)
    for row in other["h200-extraction.json"]["rows"]:
        row["median"] *= 1.1
    assert scale.render(other, template) != scale.render(runs, template)


def test_pages_follow_the_numbers() -> None:
    """The twin: one number that changes changes the summary, the index and the run's page."""
    run = made(idle=10.0)
    other = deepcopy(run)
    other["rows"][1]["median"] += 0.5
    other["rows"][1]["against"]["stock"]["median"] += 0.05
    for template in (TEMPLATE, INDEX_TEMPLATE):
        page = report.render({"a.json": run}, template)
        assert page == report.render({"a.json": deepcopy(run)}, template)
        assert page != report.render({"a.json": other}, template)
        assert page != report.render({}, template)
    assert report.run_page("a.json", run) != report.run_page("a.json", other)


def test_runs_that_the_words_do_not_name_are_listed() -> None:
    run = made(idle=10.0) | {"benchmark": "of another helper"}
    listed = report.render({"a.json": run}, INDEX_TEMPLATE)
    assert "[of another helper](a.md)" in listed.split("## More runs")[1]


def test_engines_in_processes_of_their_own_are_listed_apart() -> None:
    """In the place that the words have for them, and not against the targets of the others."""
    page = report.render(
        {"a.json": made(idle=10.0) | {"benchmark": "tpot-processes"}}, INDEX_TEMPLATE
    )
    before, after = page.split("## Time per output token, engine in a process of its own")
    assert "a.json" in after.split("\n## ")[0] and "a.json" not in before
    assert "a.json" not in page.split("## More runs")[1]


def test_headlines_are_twelve() -> None:
    """Each has a line, one that is missed by more than hosts differ says so."""
    assert sum(bool(target.headline) for target in targets.TARGETS) == 12
    for idle, said in ((10.0, "| yes |"), (10.15, "| yes |"), (10.5, "| no |")):
        [line] = [each for each in targets.headlines([made(idle)]) if "enabled and idle" in each]
        assert line.endswith(said), line


@pytest.mark.parametrize(
    ("idle", "said"),
    [(10.0, "yes"), (10.02, "yes"), (10.5, "no, by 4.7 %"), (20.0, "no, by 99.7 %")],
)
def test_a_target_is_met_or_missed(idle: float, said: str) -> None:
    [(_, baseline, ratio)] = targets.measured(IDLE, [made(idle)])
    assert (baseline, targets.verdict(IDLE, ratio)) == ("stock", said)


def test_targets_are_of_gpus() -> None:
    """Of a run on a CPU ratios are shown, and judged by no target."""
    run = made(idle=10.0) | {"setup": MADE_BY | {"gpu": ""}}
    assert not [*targets.measured(IDLE, [run])]
    assert "a.json" in report.render({"a.json": run}, INDEX_TEMPLATE)


def test_a_newer_run_takes_the_place_of_an_older_one() -> None:
    old, new = made(idle=20.0), made(idle=10.0)
    new["setup"] = MADE_BY | {"date": "2026-01-02 00:00 UTC"}
    for runs in ([old, new], [new, old]):
        [(row, _, _)] = targets.measured(IDLE, runs)
        assert row["median"] == new["rows"][1]["median"] != old["rows"][1]["median"]


def test_rounds_that_disagree_are_told() -> None:
    rows = [
        Row("stock", "TPOT", "ms", [10.0, 10.0, 10.0], {"batch": 32}),
        Row("idle", "TPOT", "ms", [9.0, 10.0, 11.0], {"batch": 32}),
    ]
    [(_, _, ratio)] = targets.measured(IDLE, [Run("tpot", MADE_BY, rows).as_json()])
    assert targets.verdict(IDLE, ratio) == "yes; not the same in all rounds"


def test_targets_name_cases_that_scripts_measure() -> None:
    """A name that is changed in a script would leave its target unmeasured, without a word."""
    known = {("tpot", quantity, n) for quantity in ("TPOT", tpot.OTHERS) for n in tpot.CASES}
    known |= {
        ("prefill", quantity, n) for quantity in prefill.CASES for n in prefill.CASES[quantity]
    }
    for target in targets.TARGETS:
        if target.benchmark in ("tpot", "prefill"):
            assert (target.benchmark, target.quantity, target.case) in known


def test_ratios_are_taken_within_a_round() -> None:
    """What drifts from round to round cancels; of the medians alone it would not."""
    slow = Row("off", "TPOT", "ms", [1.0, 2.0, 9.0])
    row = Row("idle", "TPOT", "ms", [1.1, 4.4, 9.9])
    paired = Run("x", {}, [slow, row]).against(row)["off"]
    assert paired["median"] == pytest.approx(1.1) and paired["max"] == pytest.approx(2.2)
    apart = Run("x", {}, [slow, row], paired=False).against(row)["off"]
    assert apart == {"median": pytest.approx(2.2)}


def test_only_rows_of_one_place_are_compared() -> None:
    baseline = Row("off", "TPOT", "ms", [1.0], {"batch": 1})
    run = Run("x", {}, [baseline, Row("idle", "TPOT", "ms", [2.0], {"batch": 1})])
    assert run.against(run.rows[1])["off"]["median"] == 2.0
    for other in (
        Row("idle", "TPOT", "ms", [2.0], {"batch": 32}),
        Row("idle", "prefill", "ms", [2.0], {"batch": 1}),
    ):
        assert Run("x", {}, [baseline, other]).against(other) == {}


def test_a_baseline_of_one_case_alone() -> None:
    first, second = Row("one content", "TPOT", "ms", [1.0]), Row("off", "TPOT", "ms", [2.0])
    row = Row("steer", "TPOT", "ms", [4.0], beside=("one content",))
    run = Run("x", {}, [first, second, row])
    assert {name: ratio["median"] for name, ratio in run.against(row).items()} == {
        "one content": 4.0,
        "off": 2.0,
    }
    assert set(run.against(first)) == {"off"}


def test_long_tables_turn() -> None:
    rows = [Row(case, "time", "us", [1.0], {"n": n}) for n in range(30) for case in ("a", "b")]
    lines = list(show.tables(Run("x", {}, rows).as_json()))
    assert "| at | a | b |" in lines
    assert sum(line.startswith("| n ") for line in lines) == 30
    lines = list(show.tables(Run("x", {}, rows[:10]).as_json()))
    assert sum(line.startswith("| n ") for line in lines) == 10


def test_results_are_written_as_they_are_read(tmp_path: Path) -> None:
    run = Run("tpot", MADE_BY, [Row("off", "TPOT", "ms", [1.0, 3.0], {"batch": 1})])
    results.write(run, tmp_path / "a.json")
    (tmp_path / "old.json").write_text('[{"batch": 1}]')  # of another form
    [(name, loaded)] = report.load(tmp_path).items()
    [row] = loaded["rows"]
    assert (name, row["median"], row["spread"], row["rounds"]) == ("a.json", 2.0, 1.0, 2)
