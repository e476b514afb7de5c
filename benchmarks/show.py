# SPDX-License-Identifier: Apache-2.0
"""Style in which the page of measurements writes numbers, places and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]

MOST_ROWS = 40
"""A longer table is cut by place, or has its cases as columns."""


def number(value: object) -> str:
    """Four digits, more where there are more before the point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def place(at: Mapping[str, object]) -> str:
    """Where a row was measured, in words: "batch 32"."""
    return ", ".join(f"{name} {value}" for name, value in at.items())


def ratio_of(ratio: Mapping[str, float]) -> str:
    if "min" not in ratio:
        return f"{ratio['median']:.4f}"
    return f"{ratio['median']:.4f} ({ratio['min']:.4f} to {ratio['max']:.4f})"


def cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def tables(run: Json) -> Iterator[str]:
    """A run's rows, a table for each quantity."""
    quantities = dict.fromkeys((row["quantity"], row["unit"]) for row in run["rows"])
    for quantity, unit in quantities:
        rows = [r for r in run["rows"] if (r["quantity"], r["unit"]) == (quantity, unit)]
        for part in _parts(rows):
            yield f"**{title(part)}**"
            yield ""
            yield from _wide(part) if len(part) > MOST_ROWS else _long(part)
            yield ""


def _parts(rows: Sequence[Json]) -> Sequence[Sequence[Json]]:
    """All rows; many that have facts, which a wide table leaves out, a part for each place."""
    if len(rows) <= MOST_ROWS or not any(row["facts"] for row in rows):
        return [rows]
    places = dict.fromkeys(place(row["at"]) for row in rows)
    return [[row for row in rows if place(row["at"]) == where] for where in places]


def title(rows: Sequence[Json]) -> str:
    """Of rows of one quantity, with their place if it is the same for all."""
    places = {place(row["at"]) for row in rows}
    only = f" ({next(iter(places))})" if len(places) == 1 and "" not in places else ""
    return f"{rows[0]['quantity']}, {rows[0]['unit']}{only}"


def _long(rows: Sequence[Json]) -> Iterator[str]:
    """A line a row: at, case, numbers, ratios, facts; columns that say nothing are left out."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    baselines = sorted({name for row in rows for name in row["against"]}, key=cases.index)
    with_at = len({place(row["at"]) for row in rows}) > 1
    with_facts = any(row["facts"] for row in rows)
    repeated = any(r["rounds"] > 1 for r in rows)
    head = (["at"] if with_at else []) + ["case", "median"]
    head += ["min to max", "spread"] if repeated else []
    head += [f"of {name}" for name in baselines] + (["beside"] if with_facts else [])
    yield line(head)
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = ([place(row["at"])] if with_at else []) + [row["case"], number(row["median"])]
        if repeated:
            cells += [
                f"{number(row['min'])} to {number(row['max'])}",
                f"{percent(row['spread'])} of {row['rounds']}",
            ]
        ratios = [row["against"].get(name) for name in baselines]
        cells += [ratio_of(ratio) if ratio else "" for ratio in ratios]
        if with_facts:
            cells.append("; ".join(f"{name}: {number(v)}" for name, v in row["facts"].items()))
        yield line(cells)


def _wide(rows: Sequence[Json]) -> Iterator[str]:
    """A line for each `at`, a column for each case: median, spread, ratio to each baseline."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    by_place: dict[str, dict[str, Json]] = {}
    for row in rows:
        by_place.setdefault(place(row["at"]), {})[row["case"]] = row
    yield line(["at", *cases])
    yield "|" + "---|" * (len(cases) + 1)
    for where, found in by_place.items():
        yield line([where, *(_short(found[case]) if case in found else "" for case in cases)])


def _short(row: Json) -> str:
    ratios = [f"{ratio['median']:.3f} of {name}" for name, ratio in row["against"].items()]
    return ", ".join([f"{number(row['median'])} ± {percent(row['spread'] / 2)}", *ratios])


def setup(run: Json) -> Iterator[str]:
    """Where and with what a run was made, as a list."""
    for name, value in run["setup"].items():
        if isinstance(value, dict):
            told = [f"{key} {_plain(v)}" for key, v in value.items()]
            if name != "options" and any(len(part) > 60 for part in told):
                yield f"* {name}:"
                yield from (f"  * {part}" for part in told)
            elif told:
                yield f"* {name}: {'; '.join(told)}"
        elif value not in ("", None):
            yield f"* {name}: {_plain(value)}"


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value).replace("\n", " ")
