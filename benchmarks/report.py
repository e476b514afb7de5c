# SPDX-License-Identifier: Apache-2.0
"""Makes docs/performance.md and its plots of what was measured: `python -m benchmarks.report`.

    python -m benchmarks.report [--measurements DIR] [--page FILE]

The words are those of `performance.in.md`; a line `{{name}}` there is replaced by the runs of that
benchmark, `{{targets}}` by the table of targets, and `{{others}}` by runs that no line names. Runs
are all files of `docs/measurements/*.json` in the form of `benchmarks.results`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import plots, show, show_kernels, targets
from benchmarks.show import Json

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "measurements"
TEMPLATE = Path(__file__).with_name("performance.in.md")

PLOTTED = (*plots.COMPARED, "filesystem", "peers", "startup")
TABLES = {"csrc": show_kernels.tables}
"""Of runs whose rows have a form of their own."""
_PLACE = re.compile(r"^{{([\w-]+)}}$", re.MULTILINE)


def load(folder: Path) -> dict[str, Json]:
    """file name -> run. Files of another form are not ours to show."""
    found = {file.name: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    return {name: run for name, run in found.items() if isinstance(run, dict) and "rows" in run}


def is_plotted(run: Json) -> bool:
    """Tell whether a run has a plot: those of GPUs, whose cases are of one order of magnitude."""
    return run["benchmark"] in PLOTTED and bool(run["setup"]["gpu"])


def figure(name: str) -> str:
    """Where the plot of a run is, from the page's folder."""
    return f"figures/{Path(name).stem}.svg"


def render(runs: dict[str, Json], template: str) -> str:
    """The page."""
    named = set(_PLACE.findall(template))

    def put(match: re.Match[str]) -> str:
        place = match.group(1)
        if place == "targets":
            return "\n".join(targets.table([*runs.values()]))
        if place == "others":
            chosen = {n: run for n, run in runs.items() if run["benchmark"] not in named}
        else:
            chosen = {n: run for n, run in runs.items() if run["benchmark"] == place}
        parts = [section(name, run, titled=place == "others") for name, run in chosen.items()]
        return "\n\n".join("\n".join(part).strip() for part in parts) or "Nothing measured."

    return _PLACE.sub(put, template)


def section(name: str, run: Json, titled: bool) -> Iterator[str]:
    """One run: its setup, its plot, its tables."""
    if titled:
        yield f"### {run['benchmark']}"
        yield ""
    setup = run["setup"]
    where = ", ".join(str(setup[key]) for key in ("gpu", "cpu", "date") if setup.get(key))
    yield f"{where}: [{name}](measurements/{name})."
    yield ""
    if is_plotted(run):
        yield f"![{run['benchmark']}]({figure(name)})"
        yield ""
    yield from TABLES.get(run["benchmark"], show.tables)(run)
    yield "<details><summary>Setup</summary>"
    yield ""
    yield from show.setup(run)
    yield ""
    yield "</details>"


def draw(runs: dict[str, Json], page: Path) -> Sequence[Path]:
    """Write the plots that the page shows; those of runs that are gone are removed."""
    folder = page.parent / "figures"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    drawn = []
    for name, run in runs.items():
        if is_plotted(run):
            plots.draw(run, page.parent / figure(name))
            drawn.append(page.parent / figure(name))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    runs = load(args.measurements)
    args.page.write_text(render(runs, TEMPLATE.read_text()))
    drawn = draw(runs, args.page)
    print(f"{args.page}: {len(runs)} runs, {len(drawn)} plots")


if __name__ == "__main__":
    main()
