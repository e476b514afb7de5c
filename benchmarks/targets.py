# SPDX-License-Identifier: Apache-2.0
"""What speed is wanted, row by row, and whether the measured rows have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.show import Json, number, percent, place
from benchmarks.tpot import ONE_CONTENT, OTHERS


@dataclass(frozen=True)
class Target:
    """One wanted ratio, of every row of a case.

    `ratio`: at most so much, if `most`, else at least. `baselines`: the first that was measured
    counts. `fact`, `least`: met as well if this fact of the row is so much.
    """

    text: str
    benchmark: str
    case: str
    quantity: str
    ratio: float
    most: bool = True
    baselines: Sequence[str] = ("stock", "off")
    fact: str = ""
    least: float = 0.0

    @property
    def wanted(self) -> str:
        also = f", or {self.least:.0%} {self.fact}" if self.fact else ""
        return f"{'≤' if self.most else '≥'} {self.ratio:g}{also}"


_STEER = "every token steered at 3 points x all layers, each request with vectors of its own"
_OWN = "engine in a process of its own, as users run it"

TARGETS = (
    Target("nothing enabled: TPOT", "tpot", "off", "TPOT", 1.003),
    Target("enabled, idle: TPOT", "tpot", "idle", "TPOT", 1.003),
    Target("enabled, idle: prefill", "prefill", "idle", "prefill", 0.997, most=False),
    Target(f"{_STEER}: TPOT", "tpot", "steer", "TPOT", 1.01),
    Target("the same: prefill", "prefill", "steer", "prefill", 0.99, most=False),
    Target(
        "as many contents as requests, against one content: TPOT",
        *("tpot", "steer", "TPOT", 1.02),
        baselines=(ONE_CONTENT,),
    ),
    Target(
        "capture of the last prompt token, all layers: requests/s",
        *("prefill", "capture last prompt", "requests", 0.99),
        most=False,
    ),
    Target("capture of every generated token, 1 layer", "tpot", "capture 1 layer", "TPOT", 1.01),
    Target("the same, all layers", "tpot", "capture all layers", "TPOT", 1.03),
    Target(
        "capture of every prompt token, all layers, to host memory: prefill",
        *("prefill", "capture all prompt", "prefill", 0.9),
        most=False,
        fact="of the copy rate",
        least=0.8,
    ),
    Target(
        "bystanders, where others steer and capture: TPOT",
        *("tpot", "bystanders", OTHERS, 1.01),
    ),
    Target(
        f"{_OWN}: capture of every generated token, 1 layer",
        *("tpot-processes", "capture 1 layer", "TPOT", 1.01),
    ),
    Target("the same, all layers", "tpot-processes", "capture all layers", "TPOT", 1.03),
    Target(
        "filesystem consumer, sharded: bytes/s",
        *("filesystem", "sharded", "write", 0.9),
        most=False,
        baselines=("disk",),
    ),
    Target(
        "start-up, all enabled, from a warm compile cache",
        *("startup", "steering + capture", "warm start", 1.1),
    ),
)


def verdict(target: Target, row: Json, ratio: Json) -> str:
    """Is it met, and if not, by how much it is missed; and whether the rounds agree on that."""
    median, sign = ratio["median"], 1 if target.most else -1
    met = sign * (median - target.ratio) <= 0
    met |= bool(target.fact) and row["facts"].get(target.fact, 0.0) >= target.least
    said = "yes" if met else f"no, by {percent(abs(median - target.ratio))}"
    if "min" in ratio and ratio["min"] < target.ratio < ratio["max"]:
        return f"{said}; not the same in all rounds"
    return said


def measured(target: Target, runs: Sequence[Json]) -> Iterator[tuple[Json, str, Json]]:
    """Rows of the case, each with the baseline that counts and the ratio to it."""
    seen = []
    for run in runs:
        if run["benchmark"] != target.benchmark:
            continue
        for row in run["rows"]:
            if (row["case"], row["quantity"]) != (target.case, target.quantity):
                continue
            found = [name for name in target.baselines if name in row["against"]]
            if found and row["at"] not in seen:
                seen.append(row["at"])
                yield row, found[0], row["against"][found[0]]


def table(runs: Sequence[Json]) -> Iterator[str]:
    """Lines of the table; what no run has says so."""
    yield "| case | target | measured (median, spread) | met? |"
    yield "|---|---|---|---|"
    for target in TARGETS:
        nothing = True
        for row, baseline, ratio in measured(target, runs):
            nothing = False
            case = f"{target.text}{', ' if row['at'] else ''}{place(row['at'])}"
            spread = f"{ratio['min']:.4f} to {ratio['max']:.4f}" if "min" in ratio else "-"
            seen = (
                f"**{ratio['median']:.4f}** of {baseline} ({spread}): {number(row['median'])} "
                f"{row['unit']}, {percent(row['spread'])}"
            )
            if target.fact:
                seen += f"; {number(row['facts'][target.fact])} {target.fact}"
            yield f"| {case} | {target.wanted} | {seen} | {verdict(target, row, ratio)} |"
        if nothing:
            yield f"| {target.text} | {target.wanted} | not measured | |"
