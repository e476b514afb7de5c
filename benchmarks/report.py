# SPDX-License-Identifier: Apache-2.0
"""Makes docs/performance.md, a page for each run, and plots: `python -m benchmarks.report`.

    python -m benchmarks.report [--measurements DIR] [--page FILE]

The words are those of `performance.in.md` and, for the index of runs, `measurements.in.md`. A line
`{{name}}` there is replaced by links to the runs of that benchmark, `{{headlines}}` and
`{{targets}}` by tables of targets, and `{{others}}` by runs that no line names. Runs are all files
of `docs/measurements/*.json` in the form of `benchmarks.results`; each has its tables in a page
beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots, show, show_kernels, targets
from benchmarks.show import Json

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "measurements"
TEMPLATE = Path(__file__).with_name("performance.in.md")
INDEX_TEMPLATE = Path(__file__).with_name("measurements.in.md")
INDEX = "README.md"
"""Name of the index of runs, in the folder of the measurements."""

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
    """Path of a run's plot from the folder of pages."""
    return f"figures/{Path(name).stem}.svg"


def page_of(name: str) -> str:
    """Name of a run's page, beside its file."""
    return f"{Path(name).stem}.md"


def render(runs: dict[str, Json], template: str) -> str:
    """Return a template with links to runs and tables of targets in their places."""
    named = set(_PLACE.findall(template))

    def put(match: re.Match[str]) -> str:
        place = match.group(1)
        if place in ("targets", "headlines"):
            table = targets.table if place == "targets" else targets.headlines
            return "\n".join(table([*runs.values()]))
        if place == "others":
            chosen = {n: run for n, run in runs.items() if run["benchmark"] not in named}
        else:
            chosen = {n: run for n, run in runs.items() if run["benchmark"] == place}
        return "\n".join(link(name, run) for name, run in chosen.items()) or "No run yet."

    return _PLACE.sub(put, template)


def link(name: str, run: Json) -> str:
    """A line of the index: a run's page, its numbers, and where it ran."""
    return f"* [{run['benchmark']}]({page_of(name)}), [{name}]({name}): {_setting(run)}"


def _setting(run: Json) -> str:
    return ", ".join(str(run["setup"][k]) for k in ("gpu", "cpu", "date") if run["setup"].get(k))


def run_page(name: str, run: Json) -> str:
    """Return the page of one run: its setup, its plot, its tables."""
    lines = [f"# {Path(name).stem}", "", f"{_setting(run)}: [{name}]({name}).", ""]
    lines += [f"[All runs]({INDEX}) say what the cases are.", ""]
    if is_plotted(run):
        lines += [f"![{run['benchmark']}](../{figure(name)})", ""]
    lines += TABLES.get(run["benchmark"], show.tables)(run)
    lines += ["## Setup", "", *show.setup(run)]
    return "\n".join(lines) + "\n"


def pages(runs: dict[str, Json]) -> dict[str, str]:
    """Return the pages in the folder of the measurements: file name -> text."""
    index = render(runs, INDEX_TEMPLATE.read_text())
    return {INDEX: index} | {page_of(name): run_page(name, run) for name, run in runs.items()}


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
    for old in args.measurements.glob("*.md"):
        old.unlink()
    for name, text in pages(runs).items():
        (args.measurements / name).write_text(text)
    drawn = draw(runs, args.page)
    print(f"{args.page}: {len(runs)} runs, {len(drawn)} plots")


if __name__ == "__main__":
    main()
