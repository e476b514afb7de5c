# SPDX-License-Identifier: Apache-2.0
"""The plots of the page of measurements: ratios as points with their range, or rates as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.show import Json, number, place, title

COMPARED = ("tpot", "tpot-processes", "tpot-processes-before", "prefill", "prefill-processes")
"""Benchmarks whose ratios are drawn."""

FURTHEST = (0.85, 1.15)
"""Ratios outside are drawn at the edge, with their value."""

COLOURS = ("#1f6feb", "#d1542f", "#2f8f4e", "#8250df", "#9a6700")

plt.rcParams |= {"svg.hashsalt": "vllm-pilot", "font.size": 9, "axes.spines.top": False}
plt.rcParams |= {"axes.spines.right": False}


def draw(run: Json, file: Path) -> None:
    """Ratios to a build where there is one to compare with, else bars."""
    quantities: dict[str, list[Json]] = {}
    for row in run["rows"]:
        quantities.setdefault(f"{row['quantity']}, {row['unit']}", []).append(row)
    baseline = _baseline(run)
    ratios = {n: [r for r in rows if baseline in r["against"]] for n, rows in quantities.items()}
    shown = {name: rows for name, rows in ratios.items() if rows} or quantities
    places = list(dict.fromkeys(place(row["at"]) for rows in shown.values() for row in rows))
    heights = [0.8 + 0.3 * _lines(rows, baseline) for rows in shown.values()]
    figure, panels = plt.subplots(
        len(shown),
        1,
        figsize=(8, sum(heights) + 0.3 * len(shown)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axes, rows in zip(panels[:, 0], shown.values(), strict=True):
        axes.set_title(title(rows), loc="left")
        if baseline:
            _points(axes, rows, baseline, places)
        else:
            _bars(axes, rows)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _lines(rows: Sequence[Json], baseline: str) -> int:
    return len({row["case"] for row in rows}) if baseline else len(rows)


def _baseline(run: Json) -> str:
    """The one that ratios are shown to; none: rates are shown."""
    if run["benchmark"] not in COMPARED:
        return ""
    known = {name for row in run["rows"] for name in row["against"]}
    return next((name for name in ("stock", "off") if name in known), "")


def _points(axes: Any, rows: Sequence[Json], baseline: str, places: Sequence[str]) -> None:
    """A line a case, a colour a place."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    low, high = FURTHEST
    for row in rows:
        ratio = row["against"][baseline]
        index = places.index(place(row["at"]))
        line = cases.index(row["case"]) + (index - (len(places) - 1) / 2) * 0.2
        colour = COLOURS[index % len(COLOURS)]
        median = ratio["median"]
        if low <= median <= high:
            ends = [max(low, ratio.get("min", median)), min(high, ratio.get("max", median))]
            axes.plot(ends, [line, line], color=colour, lw=1.5)
            axes.plot(median, line, "o", ms=4, color=colour)
        else:
            edge, mark, side = (high, ">", "right") if median > high else (low, "<", "left")
            axes.plot(edge, line, mark, ms=5, color=colour, clip_on=False)
            text = f"{median:.2f}  " if median > high else f"  {median:.2f}"
            axes.text(edge, line, text, ha=side, va="center", color=colour, fontsize=7)
    axes.axvline(1.0, color="#888888", lw=0.8)
    axes.set_xlim(low, high)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_xlabel(f"ratio to {baseline}")
    marks = [plt.Line2D([], [], marker="o", ls="", color=c) for c in COLOURS[: len(places)]]
    axes.legend(marks, places, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)


def _bars(axes: Any, rows: Sequence[Json]) -> None:
    """A bar a row, its range as a line."""
    one = len({place(row["at"]) for row in rows}) == 1
    names = [row["case"] if one else f"{row['case']}, {place(row['at'])}" for row in rows]
    for line, row in enumerate(rows):
        axes.barh(line, row["median"], color=COLOURS[0], height=0.6)
        axes.plot([row["min"], row["max"]], [line, line], color="black", lw=1)
        axes.text(row["max"], line, f" {number(row['median'])}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
