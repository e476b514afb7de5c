# SPDX-License-Identifier: Apache-2.0
"""The one form of a benchmark's results: a printed table, and the JSON that `report` reads.

    rows = [Row("off", "TPOT", "ms", values, {"batch": 32}), Row("idle", ...)]
    publish(Run("tpot", setup(args), rows, baselines=("stock", "off")), args.json)

A file holds one run of one script: `benchmark`, `setup` (where, with what, when), and `rows`. Rows
of the same `at` and quantity are compared with those of the run's baselines among them, and with
those of the cases that they name in `beside`. A row has

    case, at, quantity, unit     what was measured, e.g. "idle", {"batch": 32}, "TPOT", "ms"
    values                       one of each round, in their order
    median, min, max, rounds     of them
    spread                       (max - min) / median
    against                      for each baseline: median, min and max of the ratio to it
    facts                        what else is to be known of the row (optional)

If rounds went around the cases (`paired`), a ratio is taken within each round, so that what drifts
from round to round cancels. Else it is of the medians, and has no min and max.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

At = Mapping[str, int | str]


@dataclass(frozen=True)
class Row:
    """What one case came to in each round.

    `at`: what it is compared at, e.g. the batch size. `beside`: cases that it is compared with
    beside the run's baselines.
    """

    case: str
    quantity: str
    unit: str
    values: Sequence[float]
    at: At = field(default_factory=dict)
    facts: Mapping[str, float | int | str | bool] = field(default_factory=dict)
    beside: Sequence[str] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def like(self, other: Row) -> bool:
        """Are they of one group, so that their ratio means something?"""
        return (self.quantity, self.unit, self.at) == (other.quantity, other.unit, other.at)


@dataclass(frozen=True)
class Run:
    """One run of one script."""

    benchmark: str
    setup: Mapping[str, Any]
    rows: Sequence[Row]
    baselines: Sequence[str] = ("stock", "off")
    paired: bool = True

    def against(self, row: Row) -> dict[str, dict[str, float]]:
        """Of each baseline that `row` can be compared with, the ratio to it."""
        found: dict[str, dict[str, float]] = {}
        for other in self.rows:
            known = other.case in self.baselines or other.case in row.beside
            if other is row or not known or not row.like(other):
                continue
            if self.paired:
                ratios = [a / b for a, b in zip(row.values, other.values, strict=True)]
                found[other.case] = {
                    "median": statistics.median(ratios),
                    "min": min(ratios),
                    "max": max(ratios),
                }
            else:
                found[other.case] = {"median": row.median / other.median}
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "setup": dict(self.setup),
            "paired": self.paired,
            "rows": [
                {
                    **asdict(row),
                    "values": list(row.values),
                    "median": row.median,
                    "min": min(row.values),
                    "max": max(row.values),
                    "spread": row.spread,
                    "rounds": len(row.values),
                    "against": self.against(row),
                }
                for row in self.rows
            ],
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every script has."""
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument(
        "--commit",
        default=os.environ.get("BENCHMARK_COMMIT"),
        help="what was measured, where no git can say (default: $BENCHMARK_COMMIT)",
    )


def setup(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Where, when and with what options this runs; `more` is what the script knows of it."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": args.commit or _asked("git", "rev-parse", "--short", "HEAD"),
        "gpu": _asked("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "triton", "transformers")},
    }
    options = {name: _plain(value) for name, value in vars(args).items()}
    for name in ("json", "commit"):
        options.pop(name, None)
    return {**found, **more, "options": options}


def publish(run: Run, file: Path | None) -> None:
    """Print the run as a table; write it to `file`, if there is one."""
    for name, value in run.setup.items():
        print(f"{name}: {value}")
    print()
    wide = max((len(row.case) for row in run.rows), default=0)
    long = max((len(row.quantity) for row in run.rows), default=0)
    for row in run.rows:
        at = " ".join(f"{name} {value}" for name, value in row.at.items())
        ratios = "".join(
            f"  x{ratio['median']:.4f} of {name}"
            + (f" ({ratio['min']:.4f}-{ratio['max']:.4f})" if "min" in ratio else "")
            for name, ratio in run.against(row).items()
        )
        facts = "".join(f"  {name}: {_short(value)}" for name, value in row.facts.items())
        print(
            f"{at:12} {row.case:{wide}} {row.quantity:{long}} {row.median:10.3f} {row.unit}"
            f"  spread {row.spread:.1%} of {len(row.values)}{ratios}{facts}"
        )
    write(run, file)


def write(run: Run, file: Path | None) -> None:
    """To `file`, if there is one; also before all is measured, so that what there is is kept."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(run.as_json(), indent=1) + "\n")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _asked(*command: str) -> str:
    """What a program answers; empty if it is not there or cannot say."""
    if not shutil.which(command[0]):
        return ""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return "; ".join(answer.stdout.split("\n")[:-1]) if answer.returncode == 0 else ""
