# SPDX-License-Identifier: Apache-2.0
"""What speed is wanted, row by row, and whether the measured rows have it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.workloads import (
    ALL_FILES,
    ALL_INLINE,
    DISK,
    FEW,
    LAST_ROW,
    PLAIN,
    PROMPT,
    call,
    few_inline,
)
from benchmarks.show import Json, number, percent, place
from benchmarks.tpot import ONE_CONTENT, OTHERS


@dataclass(frozen=True)
class Target:
    """One wanted ratio, of every row of a case.

    `ratio`: at most so much, if `most`, else at least. `baselines`: the first that was measured
    counts. `facts`: of the row, the first one's ratio to the second one is meant in place of that
    to a baseline. `headline`: its name among the twelve that the page begins with.
    """

    text: str
    benchmark: str
    case: str
    quantity: str
    ratio: float
    most: bool = True
    baselines: Sequence[str] = ("stock", "off")
    facts: tuple[str, str] | None = None
    headline: str = ""

    @property
    def wanted(self) -> str:
        return f"{'≤' if self.most else '≥'} {self.ratio:g}"


def _extraction(text: str, case: str, ratio: float, headline: str = "") -> Target:
    """The prompt rate of a case of ours, against upstream's of the same prompts."""
    baselines = (PLAIN,)
    return Target(
        text, "peers", case, PROMPT, ratio, most=False, baselines=baselines, headline=headline
    )


def _apart(text: str, case: str, quantity: str, ratio: float, headline: str) -> Target:
    """Time per token of an engine in a process of its own, as users run it."""
    return Target(text, "tpot-processes", case, quantity, ratio, headline=headline)


_LAST = "last token, all heads"
_ONE = ", engine in the process of its requests"
_STEER = "every token steered at 3 points x all layers, each request with vectors of its own"
_ALL = "everything enabled, engine in a process of its own"

TARGETS = (
    Target(
        "nothing enabled: TPOT",
        "tpot",
        "off",
        "TPOT",
        1.003,
        headline="time per token, nothing enabled",
    ),
    Target(
        "enabled, idle: TPOT",
        "tpot",
        "idle",
        "TPOT",
        1.003,
        headline="time per token, enabled and idle",
    ),
    Target("enabled, idle: prefill", "prefill", "idle", "prefill", 0.997, most=False),
    Target(f"{_STEER}: TPOT", "tpot", "steer", "TPOT", 1.01),
    Target("the same: prefill", "prefill", "steer", "prefill", 0.99, most=False),
    Target(
        "as many contents as requests, against one content: TPOT",
        *("tpot", "steer", "TPOT", 1.02),
        baselines=(ONE_CONTENT,),
    ),
    _apart(
        f"{_STEER}, {_ALL}: TPOT",
        *("steer, all taps", "TPOT", 1.01),
        "time per token, every token steered at 3 points of all layers",
    ),
    _apart(
        f"capture of every generated token, 1 layer, {_ALL}: TPOT",
        *("capture 1 layer, all taps", "TPOT", 1.01),
        "time per token, every token captured at one layer",
    ),
    _apart(
        "the same, all layers",
        *("capture all layers, all taps", "TPOT", 1.03),
        "time per token, every token captured at all layers",
    ),
    _apart(
        f"bystanders, where others steer and capture, {_ALL}: TPOT",
        *("bystanders", OTHERS, 1.01),
        "time per token, plain requests beside others that steer and capture",
    ),
    _extraction(
        f"capture of every prompt token, {FEW} layers, to host memory: prompt rate",
        *(few_inline(FEW), 0.98),
    ),
    _extraction(
        "the same, all layers",
        *(ALL_INLINE, 0.98),
        "prompt tokens per second, all rows of all layers to host memory",
    ),
    Target(
        "the same, the first call against the second",
        *("peers", ALL_INLINE, PROMPT, 0.9),
        most=False,
        facts=(call(1), call(2)),
    ),
    _extraction(
        "capture of the last prompt token, all layers: prompt rate",
        *(LAST_ROW, 0.99),
        "prompt tokens per second, the last row of all layers",
    ),
    Target(
        "attention of each generated token to two ranges of keys, 4 heads of 6 layers: TPOT",
        *("attention-processes", "tracker", "TPOT", 1.05),
        headline="time per token, attention sums of 4 heads in 6 layers",
    ),
    Target(
        "the same of prompts' last tokens, all heads of all layers: prompt rate",
        *("attention-processes", _LAST, "prefill", 0.98),
        most=False,
    ),
    Target(
        "focus of each generated token, all heads of all layers: TPOT",
        *("attention-processes", "focus", "TPOT", 1.10),
        headline="time per token, focus in all heads of all layers",
    ),
    Target(
        f"attention of two ranges of keys, as above{_ONE}: TPOT",
        *("attention", "tracker", "TPOT", 1.05),
    ),
    Target(
        f"the same of prompts' last tokens{_ONE}: prompt rate",
        *("attention", _LAST, "prefill", 0.98),
        most=False,
    ),
    Target(f"focus, as above{_ONE}: TPOT", *("attention", "focus", "TPOT", 1.10)),
    Target(
        "an autoencoder of 65,536 features, idle: TPOT", "tpot", "idle, features", "TPOT", 1.003
    ),
    Target("a feature set in each request: TPOT", "tpot", "set a feature", "TPOT", 1.02),
    Target("32 features of each generated token: TPOT", "tpot", "32 features", "TPOT", 1.10),
    Target(
        "32 probes of 3 layers judge every token: TPOT",
        "tpot-processes",
        "32 probes of 3 layers",
        "TPOT",
        1.03,
    ),
    Target(
        "an MLP and an attention probe judge every token: TPOT",
        *("tpot-processes", "an MLP, an attention probe", "TPOT", 1.03),
    ),
    Target(
        "32 features of every prompt token: prompt rate",
        *("prefill", "32 features", "prefill", 0.8),
        most=False,
    ),
    Target(
        "files of every prompt token, all layers, against what the disk does alone",
        *("peers", ALL_FILES, PROMPT, 0.9),
        most=False,
        baselines=(DISK,),
        headline="prompt tokens per second to files, against the disk alone",
    ),
    Target(
        "start-up, all enabled, from a warm compile cache",
        *("startup", "steering + capture", "warm start", 1.2),
        headline="warm start with everything enabled",
    ),
)


def verdict(target: Target, ratio: Json) -> str:
    """Is it met, and if not, by how much it is missed; and whether the rounds agree on that."""
    median, sign = ratio["median"], 1 if target.most else -1
    met = sign * (median - target.ratio) <= 0
    said = "yes" if met else f"no, by {percent(abs(median - target.ratio))}"
    if "min" in ratio and ratio["min"] < target.ratio < ratio["max"]:
        return f"{said}; not the same in all rounds"
    return said


def measured(target: Target, runs: Sequence[Json]) -> Iterator[tuple[Json, str, Json]]:
    """Rows of the case on GPUs, of the newest run that has them, each with the baseline that counts
    and the ratio to it."""
    seen = []
    for run in sorted(runs, key=lambda run: run["setup"]["date"], reverse=True):
        if run["benchmark"] != target.benchmark or not run["setup"]["gpu"]:
            continue
        for row in run["rows"]:
            if (row["case"], row["quantity"]) != (target.case, target.quantity):
                continue
            found = compared(target, row)
            if found and row["at"] not in seen:
                seen.append(row["at"])
                yield row, *found


def compared(target: Target, row: Json) -> tuple[str, Json] | None:
    """What the row is compared with, and the ratio to it; None if it was not measured."""
    if target.facts:
        first, second = (row["facts"].get(name) for name in target.facts)
        return (target.facts[1], {"median": first / second}) if first and second else None
    found = [name for name in target.baselines if name in row["against"]]
    return (found[0], row["against"][found[0]]) if found else None


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
            yield f"| {case} | {target.wanted} | {seen} | {verdict(target, ratio)} |"
        if nothing:
            yield f"| {target.text} | {target.wanted} | not measured | |"


RESOLVED = 0.02
"""Hosts differ by so much in equal programs: a target within it is met."""


def headlines(runs: Sequence[Json]) -> Iterator[str]:
    """Lines of the short table: a line for each headline on one GPU, in two digits."""
    yield "| quantity, as a ratio to stock | target | measured | met within 2 % |"
    yield "|---|---|---|---|"
    for target in (t for t in TARGETS if t.headline):
        found = [
            (row["at"], ratio["median"])
            for row, _, ratio in measured(target, runs)
            if "tensor parallel" not in row["at"]
        ]
        found.sort(key=lambda one: [str(value).zfill(8) for value in one[0].values()])
        said = ", ".join(f"{value:.2f} ({place(at) or 'all'})" for at, value in found)
        sign = 1 if target.most else -1
        met = [sign * (value - target.ratio) <= RESOLVED for _, value in found]
        verdict = "yes" if all(met) else f"{sum(met)} of {len(met)}" if any(met) else "no"
        wanted = f"{'≤' if target.most else '≥'} {target.ratio:.2f}"
        yield f"| {target.headline} | {wanted} | {said or 'not measured'} | {verdict} |"
