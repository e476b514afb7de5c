# SPDX-License-Identifier: Apache-2.0
"""Time that an engine takes to start and what memory it then has: off, enabled, and upstream's.

    python -m benchmarks.startup --models DIR ... --stock DIR [--cases CASE ...] [--rounds 1]
        [--warm 1] [--json FILE [--add]]

In each round, for each model and case: a start with empty compile caches, then --warm starts with
what the first one left there. Each is a process of its own (one_start.py), one after the other, and
the cases take turns; with --at-once the first starts of a model's cases run side by side, and share
the processors. A round that the --budget ends counts for nothing. With --add the rounds are put to
those that FILE has: where commands may not take long, run one for each. The key-value cache has
the same bytes in all arms, so that what differs in memory is the arm's. A start is from the call of
`LLM(...)` to the first token; imports are apart. Phases are what the engine's log says. Compiled
code is kept as upstream does with its own torch, 2.13, where a host's torch is older, too
(VLLM_USE_MEGA_AOT_ARTIFACT). Run it where both trees' files have been read before: reading them
from a disk is not what is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.engines import environment_of
from benchmarks.one_start import ARMS, CASES, Start, arguments
from benchmarks.results import Row, Run, add_arguments, publish, setup

SUMMED = {
    "compilation": r"torch\.compile took ([\d.]+) s in total",
    "Dynamo": r"Dynamo bytecode transform time: ([\d.]+) s",
    "first runs": r"Initial profiling/warmup run took ([\d.]+) s",
    "loading weights": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "graph capture": r"Graph capturing finished in ([\d.]+) secs",
    "after loading": r"init engine \(.*?\) took ([\d.]+) s",
    "graphs, GiB": r"Graph capturing finished in [\d.]+ secs, took (-?[\d.]+) GiB",
}
"""Phases in the engine's log: the sum of what the lines say, in seconds but where it says GiB."""

COUNTED = {
    "compilations": r"torch\.compile took",
    "loaded from the cache": r"Directly load (?:the compiled graph|AOT compilation)",
    "not loaded from the cache": r"Compiling model again due to a load failure",
}

FROM_MEMORY = {
    "peak allocated": "peak device memory, allocated",
    "peak reserved": "peak device memory, reserved",
    "device memory": "device memory, as its driver says",
    "peak host memory": "peak host memory",
}
"""What of a start's memory has a row; the rest are facts."""

Phases = dict[str, float]


def phases(log: str) -> Phases:
    found: Phases = {}
    for name, pattern in SUMMED.items():
        if values := re.findall(pattern, log):
            found[name] = sum(float(value) for value in values)
    for name, pattern in COUNTED.items():
        if count := len(re.findall(pattern, log)):
            found[name] = count
    return found


class Starts:
    """The starts of one case on one model."""

    def __init__(self, args: argparse.Namespace, model: Path, arm: str, until: float) -> None:
        self._args, self._model, self._arm, self._until = args, model, arm, until
        self._caches = Path()
        self._round: list[tuple[Start, Phases]] = []
        self.rounds: list[list[tuple[Start, Phases]]] = []
        """The starts of each round, the first one's before the warm ones'."""
        self.failed = ""

    def begin(self) -> None:
        """Begin a round, with empty caches."""
        self._caches = Path(tempfile.mkdtemp(prefix="startup-", dir=self._args.caches))
        self._round = []

    def end(self) -> None:
        """End a round; one that failed is left out."""
        shutil.rmtree(self._caches, ignore_errors=True)
        if not self.failed:
            self.rounds.append(self._round)

    def start(self, number: int) -> None:
        """Start number 0 finds empty caches."""
        if self.failed:
            return
        ended = self._process()
        if ended is None:
            self.failed = f"start {number}: no time left"
            return
        if logs := self._args.logs:
            logs.mkdir(parents=True, exist_ok=True)
            name = (
                f"{self._model.name}-{self._arm.replace(' ', '')}-{len(self.rounds)}-{number}.log"
            )
            (logs / name).write_text(ended.stdout)
        found = Start.find(ended.stdout)
        if found is None:
            print(ended.stdout[-6000:], file=sys.stderr)
            self.failed = f"start {number}: exit status {ended.returncode}: {_cause(ended.stdout)}"
            return
        self._round.append((found, phases(ended.stdout)))
        seconds = " ".join(f"{name} {value:.1f}" for name, value in found.seconds.items())
        print(f"{self._model.name}, {self._arm}, start {number}: {seconds}", flush=True)

    def _process(self) -> subprocess.CompletedProcess[str] | None:
        """To its end, or None if there was no time for that."""
        args, caches = self._args, self._caches
        stock = ARMS[self._arm].tree == "stock"
        environment = {
            "VLLM_USE_MEGA_AOT_ARTIFACT": "1",
            **environment_of(str(args.stock.resolve()) if stock else "", stock),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        command = [sys.executable, "-m", "benchmarks.one_start", "--model", str(self._model)]
        command += ["--arm", self._arm, "--kv-bytes", str(args.kv_bytes)]
        command += ["--max-model-len", str(args.max_model_len), *["--eager"] * args.eager]
        try:
            return subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(self._until - time.monotonic(), 1),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    def rows(self, alone: bool) -> list[Row]:
        """
        Args:
            alone: was every start alone on the device?
        """
        at = {"model": self._model.name}
        rows = []
        first = [starts[0] for starts in self.rounds]
        warm = [start for starts in self.rounds for start in starts[1:]]
        done = [start for starts in self.rounds for start in starts]
        cold = "first start" if alone else "first start, side by side"
        for quantity, starts in ((cold, first), ("warm start", warm)):
            if starts:
                times = [s.seconds["engine"] + s.seconds["first token"] for s, _ in starts]
                facts = _medians([{**s.seconds, **phase} for s, phase in starts])
                rows.append(Row(self._arm, quantity, "s", times, at, facts))
        memory = _medians([start.memory for start, _ in done])
        facts = {name: size for name, size in memory.items() if name not in FROM_MEMORY}
        for name, quantity in FROM_MEMORY.items():
            if name in memory:
                measured = done if alone or name != "device memory" else warm
                sizes = [start.memory[name] for start, _ in measured]
                if not sizes:
                    continue
                rows.append(Row(self._arm, quantity, "GiB", sizes, at, facts))
                facts = {}
        return rows


def _medians(found: list[Phases]) -> Phases:
    """Of each name that all have."""
    names = [name for name in found[0] if all(name in other for other in found)]
    return {name: statistics.median(other[name] for other in found) for name in names}


def _cause(log: str) -> str:
    """The line of a log that says why a start failed: the last that names an error."""
    lines = log.strip().splitlines() or ["nothing printed"]
    errors = [line for line in lines if re.search(r"(Error|Exception|SystemExit)\b", line)]
    return (errors or lines)[-1]


def onto(file: Path | None, rows: list[Row]) -> list[Row]:
    """The rows, with the rounds before that a file has of them."""
    if file is None or not file.exists():
        return rows
    known = {
        (row["case"], row["quantity"], *row["at"].items()): row["values"]
        for row in json.loads(file.read_text())["rows"]
    }
    return [
        replace(
            row, values=[*known.get((row.case, row.quantity, *row.at.items()), []), *row.values]
        )
        for row in rows
    ]


def added(rows: list[Row], baseline: str) -> list[Row]:
    """The same rows, and how much each is over the baseline's, in its own unit."""
    out = []
    for row in rows:
        facts = dict(row.facts)
        for other in rows:
            if other.case == baseline and row.case != baseline and row.like(other):
                facts[f"over {baseline}"] = row.median - other.median
        out.append(Row(row.case, row.quantity, row.unit, row.values, row.at, facts))
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--stock", type=Path, help="upstream's tree, unpatched")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm", type=int, default=1, help="starts of a round after the first one")
    parser.add_argument("--at-once", action="store_true", help="first starts side by side")
    parser.add_argument("--budget", type=float, default=570, help="seconds, of all")
    parser.add_argument("--caches", type=Path, help="a folder for compile caches (default: /tmp)")
    parser.add_argument("--logs", type=Path, help="a folder to leave the engines' logs in")
    parser.add_argument("--add", action="store_true", help="put the rounds to those of --json")
    add_arguments(parser)
    args = parser.parse_args()
    if args.stock is None:
        args.cases = [case for case in args.cases if ARMS[case].tree != "stock"]
    until = time.monotonic() + args.budget
    every = [(m, arm, Starts(args, m, arm, until)) for m in args.models for arm in args.cases]
    for _ in range(args.rounds):
        for model in args.models:
            turn_of([starts for m, _, starts in every if m == model], args)
    rows = [row for _, _, starts in every if starts.rounds for row in starts.rows(not args.at_once)]
    failed = {f"{m.name}, {arm}": starts.failed for m, arm, starts in every if starts.failed}
    if args.add:
        rows = onto(args.json, rows)
    models = {model.name: (model / "config.json").read_text().strip() for model in args.models}
    told = setup(args, dtype="bfloat16", failed=failed) | {"models": models}
    told["options"]["models"] = list(models)
    publish(Run("startup", told, added(rows, "stock"), paired=False), args.json)


def turn_of(cases: list[Starts], args: argparse.Namespace) -> None:
    """A round of all cases of a model."""
    for starts in cases:
        starts.begin()
    with ThreadPoolExecutor(len(cases) if args.at_once else 1) as pool:
        list(pool.map(lambda starts: starts.start(0), cases))
    for number in range(1, 1 + args.warm):
        for starts in cases:
            starts.start(number)
    for starts in cases:
        starts.end()


if __name__ == "__main__":
    main()
