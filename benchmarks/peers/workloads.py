# SPDX-License-Identifier: Apache-2.0
"""What every peer is asked to do: the options, the prompts, the timing and the form of the answer.

Two workloads, both of random token ids, the same for every peer:

generation   --requests prompts of --prompt tokens, --generated tokens each, greedy; output tokens
             over the time of the whole batch, prefill included.
extraction   --extract-requests prompts of --extract-prompt tokens, one token generated; the stream
             after --few layers, or after all of them, of every prompt token. It ends when all rows
             are where `delivered` says: in the asking process's memory, or in complete files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import Row

Fact = float | int | str | bool

OUTPUT, PROMPT = "output rate", "prompt rate"
"""What generation and extraction are measured in."""


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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line that all peers share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--stock", type=Path, required=True, help="upstream's tree, unpatched")
    parser.add_argument("--files", type=Path, default=Path("/dev/shm"), help="where files go")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generated", type=int, default=64)
    parser.add_argument("--extract-requests", type=int, default=32)
    parser.add_argument("--extract-prompt", type=int, default=512)
    parser.add_argument("--few", type=int, default=4, help="layers, evenly spaced")
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--kv-bytes", type=int, default=16 << 30)
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
        self._rounds, self._answer = args.rounds, answer
        # Of each quantity the tokens that count, and what they are compared at.
        requests, prompt, generated = args.requests, args.prompt, args.generated
        at = {"requests": requests, "prompt": prompt, "generated": generated}
        self._workloads = {OUTPUT: (requests * generated, at)}
        requests, prompt = args.extract_requests, args.extract_prompt
        self._workloads[PROMPT] = (requests * prompt, {"requests": requests, "prompt": prompt})

    def time(
        self,
        quantity: str,
        case: str,
        work: Callable[[], object],
        clean: Callable[[], None] | None = None,
        **facts: Fact,
    ) -> None:
        """
        Args:
            work: all requests of the workload that has this quantity.
            clean: what is to be done after each round, untimed.
        """
        tokens, at = self._workloads[quantity]
        rates = []
        for number in range(self._rounds + 1):
            started = time.perf_counter()
            work()
            seconds = time.perf_counter() - started
            if clean is not None:
                clean()
            if number:  # the first one warms up
                rates.append(tokens / seconds)
        if "row bytes" in facts:
            moved = float(facts["row bytes"]) * statistics.median(rates) / 1e9
            facts = {**facts, "rows GB/s": moved}
        self._answer.rows.append(asdict(Row(case, quantity, "tok/s", rates, at, facts)))
        self._answer.print()  # so far, if the time should not do
