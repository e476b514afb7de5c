# SPDX-License-Identifier: Apache-2.0
"""What every peer is asked to do: the options, the prompts, the timing and the form of the answer.

Two workloads, both of random token ids, the same for every peer:

extraction   each shape of --extract, so many requests of so many prompt tokens, one token
             generated; the stream after --few layers, or after all of them, of every prompt token.
generation   --requests prompts of --prompt tokens, --generated tokens each, greedy; output tokens
             over the time of the whole batch, prefill included.

Extraction is a loop of --calls calls, `results = extract(prompts)`: the results of a call are held
until the next one has its own, and are let go on the clock. A call ends when every result says that
it is complete and one number of its last layer has been read, which waits for copies still under
way; or when its files are complete. Nothing is thrown away: call 1 is a result, and a row's values
are those of the calls after it. What has warmed up is one call without capture of the same shape
(upstream's `extract_hidden_states` knows none: there it extracts). Files are removed between calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.results import Row

Fact = float | int | str | bool
Facts = Mapping[str, Fact]
NONE: Facts = {}
T = TypeVar("T")
"""What extraction returns."""

OUTPUT, PROMPT = "output rate", "prompt rate"
"""What generation and extraction are measured in."""

FEW = 4
"""So many layers are few, if no option says otherwise."""

PLAIN = "plain vLLM"
ALL_INLINE, ALL_FILES = "ours, all layers, inline", "ours, all layers, files"
LAST_ROW = "ours, last prompt row, all layers"
DISK = "disk alone"
"""Cases that targets name."""


def few_inline(layers: int) -> str:
    """The case in which the rows of so many layers come inline."""
    return f"ours, {layers} layers, inline"


@dataclass
class Answer:
    """What a peer's script prints, as one line of JSON."""

    peer: str
    status: str = "ok"
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def print(self) -> None:
        print("\n" + json.dumps(asdict(self)), flush=True)

    @property
    def summary(self) -> str:
        """All but the rows."""
        said = {**self.versions, **self.settings}
        return ", ".join([self.status, *(f"{name}: {value}" for name, value in said.items())])

    @classmethod
    def find(cls, printed: str) -> Answer | None:
        """The answer in all that a script printed."""
        for line in reversed(printed.splitlines()):
            if line.startswith('{"peer":'):
                return cls(**json.loads(line))
        return None


@dataclass(frozen=True)
class Load:
    """A shape of extraction: so many requests, of so many prompt tokens each."""

    requests: int
    prompt: int

    @classmethod
    def parse(cls, text: str) -> Load:
        requests, prompt = text.split("x")
        return cls(int(requests), int(prompt))

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}"

    @property
    def tokens(self) -> int:
        return self.requests * self.prompt


LOADS = [Load(16, 512), Load(64, 1024), Load(256, 128)]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line that all peers share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--stock", type=Path, required=True, help="upstream's tree, unpatched")
    parser.add_argument("--files", type=Path, default=Path("/tmp"), help="where files go")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generated", type=int, default=64)
    parser.add_argument(
        "--extract",
        type=Load.parse,
        nargs="+",
        default=LOADS,
        metavar="REQUESTSxTOKENS",
        help="shapes of extraction",
    )
    parser.add_argument("--calls", type=int, default=4, help="of each case of extraction")
    parser.add_argument("--few", type=int, default=FEW, help="layers, evenly spaced")
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=5, help="of generation, after a first")
    parser.add_argument("--kv-bytes", type=int, default=16 << 30)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of engines of vLLM")
    parser.add_argument("--landing-gib", type=float, help="capture_landing_bytes of ours, in GiB")
    parser.add_argument("--buffer-mib", type=int, help="capture_buffer_bytes of ours, in MiB")
    parser.add_argument("--wait", action="store_true", help="measure when stdin says so")
    parser.add_argument("--eager", action="store_true", help="no compilation, as on a CPU")
    return parser


READY = "ready"


def ready(args: argparse.Namespace) -> None:
    """All is loaded: measure when it is this peer's turn."""
    if args.wait:
        print(f"\n{READY}", flush=True)
        sys.stdin.readline()


def installed(answer: Answer, *packages: str) -> bool:
    """Note in `answer` which packages are absent."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        answer.status = f"not installed: {', '.join(absent)}"
    return not absent


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    vocabulary: int

    @classmethod
    def of(cls, model: Path) -> Shape:
        config = json.loads((model / "config.json").read_text())
        return cls(config["hidden_size"], config["num_hidden_layers"], config["vocab_size"])

    def few(self, count: int) -> list[int]:
        """Evenly spaced layers, the last one among them."""
        count = min(count, self.layers)
        return [self.layers * (i + 1) // count - 1 for i in range(count)]


def prompts(shape: Shape, requests: int, length: int) -> list[list[int]]:
    generator = random.Random(length)
    return [[generator.randrange(shape.vocabulary) for _ in range(length)] for _ in range(requests)]


class Timer:
    """Times work and adds its rows to an answer."""

    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._rounds, self._calls, self._answer = args.rounds, args.calls, answer
        self._generated = args.requests * args.generated
        size = args.tensor_parallel_size
        self._where = {"tensor parallel": size} if size > 1 else {}
        self._at = {name: getattr(args, name) for name in ("requests", "prompt", "generated")}
        self._at |= self._where

    def generate(
        self,
        case: str,
        work: Callable[[], object],
        clean: Callable[[], None] = lambda: None,
        facts: Facts = NONE,
    ) -> None:
        """Time rounds of generation.

        Args:
            work: all requests.
            clean: what is to be done after each round, untimed.
        """
        rates = []
        for number in range(self._rounds + 1):
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            clean()
            if number:  # the first one warms up
                rates.append(self._generated / seconds)
        self._add(Row(case, OUTPUT, "tok/s", rates, self._at, facts))

    def extract(
        self,
        load: Load,
        case: str,
        work: Callable[[], T],
        check: Callable[[T], Facts] = lambda results: NONE,
        clean: Callable[[], None] = lambda: None,
        beside: Sequence[str] = (),
        facts: Facts = NONE,
    ) -> None:
        """Time calls that extract, with the results of the one before held meanwhile.

        Args:
            work: all requests, to the end of reading; returns the results.
            check: looks at all of the last results, untimed; returns what is to be known of them.
            clean: what is to be done after each call, untimed.
            beside: cases that the row is compared with.
        """
        rates = []
        held: T | None = None
        for _ in range(self._calls):
            started = time.perf_counter()
            held = work()
            rates.append(load.tokens / (time.perf_counter() - started))
            clean()
        assert held is not None
        self.add_calls(load, case, rates, beside, {**facts, **check(held)})

    def add_calls(
        self,
        load: Load,
        case: str,
        rates: Sequence[float],
        beside: Sequence[str],
        facts: Facts,
    ) -> None:
        """Add a row of calls: its values are those after the first, where there are any."""
        steady = rates[1:] or rates
        each = {call(n): round(rate) for n, rate in enumerate(rates, 1)}
        if "row bytes" in facts:
            moved = float(facts["row bytes"]) * statistics.median(steady) / 1e9
            facts = {**facts, "rows GB/s": moved}
        at = {"requests": load.requests, "prompt": load.prompt, **self._where}
        self._add(Row(case, PROMPT, "tok/s", steady, at, {**each, **facts}, beside))

    def _add(self, row: Row) -> None:
        self._answer.rows.append(asdict(row))
        self._answer.print()  # so far, if the time should not do


def call(number: int) -> str:
    """The fact of a row that is the rate of one call."""
    return f"call {number}"
