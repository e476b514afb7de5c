# SPDX-License-Identifier: Apache-2.0
"""What a sweep costs others: time per output token of streams, alone and beside 5,712 cells.

    python -m benchmarks.sweep [--model DIR] [--cells 28 204] [--streams 16] [--json FILE]

Starts `vllm serve`. Some clients stream answers, one after the other, for as long as it takes. They
are measured alone; beside one `POST /v1/steering/sweep`, which puts rows of another prompt behind
so many blocks at so many positions; and beside its twin, which is as many plain prompts as the
sweep has cells, as many in flight, with another token where a cell has another row: of each, the
cache of prefixes has what it has of the cell. So the twin is a share that any client could take.

Rounds go around the three. Prompts are of the round, or the cache would have all of the last one's
cells. "TPOT" is the median over the streams: seconds between tokens, without what precedes an
answer's first token. "longest gap": the longest that any stream waited for a token in that time.

Without --model: a tiny random Llama, eager, on a CPU (with --cells 4 24 in a minute). With it: a
model of that folder's config.json, with graphs; nothing else is read, weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import httpx

from benchmarks import servers
from benchmarks.results import Row, Run, add_arguments, publish, setup, write

MOST_AT_ONCE = 64
"""Cells in flight that a server allows; half of --max-num-seqs, if that is less."""
WARM_UP = 1.0
"""Seconds that all streams run before they are measured."""
TOKENS = range(60)
"""Of prompts: those which the tokenizer knows."""
COMPLETIONS, SWEEP = "/v1/completions", "/v1/steering/sweep"

CASES = ("alone", "plain requests", "sweep")


@dataclass(frozen=True)
class Cells:
    """The cells of a round: behind the first blocks, at each position of a random prompt."""

    layers: int
    positions: int
    number: int

    def prompts(self) -> tuple[list[int], list[int]]:
        """The prompt, and the clean one."""
        draw = Random(self.number)
        prompt, clean = (draw.choices(TOKENS, k=self.positions) for _ in range(2))
        return prompt, clean

    def sweep(self) -> dict[str, Any]:
        prompt, clean = self.prompts()
        layers = [*range(self.layers)]
        return {"prompt": prompt, "clean": clean, "layers": layers, "answer": 1, "other": 2}

    def plain(self, together: int) -> list[dict[str, Any]]:
        """Requests of so many prompts, in the order of the cells, each with its cell's prefix."""
        prompt, _ = self.prompts()
        asks = {"max_tokens": 1, "temperature": 0, "logprobs": 2}
        prompts = [
            [*prompt[:p], len(TOKENS) + layer, *prompt[p + 1 :]]
            for p in reversed(range(self.positions))
            for layer in range(self.layers)
        ]
        return [
            {**asks, "prompt": prompts[i : i + together]} for i in range(0, len(prompts), together)
        ]


def run_sweep(url: str, cells: Cells) -> float:
    """Cells a second of one sweep."""
    begun = time.monotonic()
    answer = httpx.post(url + SWEEP, json=cells.sweep(), timeout=3600)
    took = time.monotonic() - begun
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["noise_floor"] is not None and None not in found["grid"][0][0]
    return float(found["cells"] / took)


def run_plain(url: str, cells: Cells, at_once: int, together: int) -> float:
    """Prompts a second of its twin."""
    together = min(together, at_once)
    asks = iter(cells.plain(together))

    async def send() -> None:
        async with httpx.AsyncClient(timeout=3600) as client:

            async def work() -> None:
                for ask in asks:
                    answer = await client.post(url + COMPLETIONS, json=ask)
                    assert answer.status_code == 200, answer.text

            await asyncio.gather(*(work() for _ in range(at_once // together)))

    begun = time.monotonic()
    asyncio.run(send())
    return cells.layers * cells.positions / (time.monotonic() - begun)


class Stream:
    """A client that streams one answer after the other: when so many tokens had come."""

    def __init__(self, number: int) -> None:
        self._ask = {
            "prompt": Random(-1 - number).choices(TOKENS, k=32),
            "max_tokens": 256,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        self.answers: list[list[tuple[float, int]]] = []
        self.begun = asyncio.Event()

    async def run(self, client: httpx.AsyncClient, url: str, done: Callable[[], bool]) -> None:
        while not done():
            self.answers.append([])
            async with client.stream("POST", url + COMPLETIONS, json=self._ask) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        count = json.loads(line.removeprefix("data: "))["usage"]
                        self.answers[-1].append((time.monotonic(), count["completion_tokens"]))
                        self.begun.set()
                    if done():
                        break

    def within(self, begin: float, end: float) -> tuple[float, float]:
        """Milliseconds a token between two times, and the longest gap."""
        seconds, tokens, longest = 0.0, 0, 0.0
        for answer in self.answers:
            inside = [(at, count) for at, count in answer if begin <= at <= end]
            for (before, fewer), (at, count) in pairwise(inside):
                seconds, tokens = seconds + at - before, tokens + count - fewer
                longest = max(longest, at - before)
        assert tokens, "no stream got two tokens in the time: more cells or seconds"
        return 1e3 * seconds / tokens, 1e3 * longest


async def streams_beside(
    url: str, count: int, begin: Callable[[], Future[float]]
) -> tuple[list[tuple[float, float]], float]:
    """What `Stream.within` says of each stream while something runs, and what that returns."""
    streams = [Stream(number) for number in range(count)]
    ended = asyncio.Event()
    async with httpx.AsyncClient(timeout=3600) as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(client, url, ended.is_set))
        for stream in streams:
            await stream.begun.wait()
        await asyncio.sleep(WARM_UP)
        begun = time.monotonic()
        result = await asyncio.wrap_future(begin())
        end = time.monotonic()
        ended.set()
    return [stream.within(begun, end) for stream in streams], result


class Measured:
    """What the rounds found."""

    def __init__(self, args: argparse.Namespace, url: str, at_once: int, other: Executor) -> None:
        self._args, self._url, self._at_once, self._other = args, url, at_once, other
        self._found: dict[tuple[str, str], list[float]] = defaultdict(list)

    def _begin(self, case: str, number: int) -> Future[float]:
        layers, positions = self._args.cells
        cells = Cells(layers, positions, number)
        if case == "alone":
            return self._other.submit(idle, self._args.seconds)
        if case == "sweep":
            return self._other.submit(run_sweep, self._url, cells)
        return self._other.submit(run_plain, self._url, cells, self._at_once, self._args.prompts)

    def round(self, number: int) -> None:
        for case in CASES if number % 2 else reversed(CASES):
            streams, rate = asyncio.run(
                streams_beside(self._url, self._args.streams, partial(self._begin, case, number))
            )
            took = {
                "TPOT": statistics.median(tpot for tpot, _ in streams),
                "longest gap": max(gap for _, gap in streams),
            }
            if case != "alone":
                took["cells"] = rate
            for quantity, value in took.items():
                self._found[case, quantity].append(value)
            print(f"round {number}, {case}: {took}", flush=True)

    def rows(self) -> list[Row]:
        layers, positions = self._args.cells
        at = {"cells": layers * positions, "streams": self._args.streams}
        units = {"TPOT": "ms", "longest gap": "ms", "cells": "1/s"}
        return [
            Row(case, quantity, unit, self._found[case, quantity], at)
            for quantity, unit in units.items()
            for case in CASES
            if (case, quantity) in self._found
        ]


def idle(seconds: float) -> float:
    time.sleep(seconds)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    servers.add_arguments(parser)
    parser.add_argument(
        "--cells", type=int, nargs=2, default=[28, 204], metavar=("LAYERS", "POSITIONS")
    )
    parser.add_argument("--streams", type=int, default=16)
    # With 1, the server's work on HTTP is what bounds the twin. With many, fewer are in flight:
    # each request waits for its last.
    parser.add_argument("--prompts", type=int, default=4, help="of a plain request")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="that streams run alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--budget", type=float, default=200, help="seconds from the start: then no round is begun"
    )
    add_arguments(parser)
    args = parser.parse_args()
    begun = time.monotonic()
    options = [
        "--enable-steering", "--steering-families", "add", "replace", "--capture-consumers=inline",
        "--steering-points=post_block", "--capture-points=post_block", "--max-model-len=1024",
        f"--max-num-seqs={args.max_num_seqs}",
        "--hf-overrides", json.dumps({"max_position_embeddings": 1024}),
    ]  # fmt: skip
    if args.model and not args.eager:  # few graphs, so that it starts soon
        sizes = {"cudagraph_capture_sizes": [1 << power for power in range(10)]}
        options += ["--compilation-config", json.dumps(sizes)]
    at_once = min(MOST_AT_ONCE, args.max_num_seqs // 2)
    spawn = multiprocessing.get_context("spawn")  # a client of its own; forks of threads can hang
    with (
        servers.served(args, *options) as (server, model),
        ProcessPoolExecutor(1, spawn) as other,
    ):
        plain = partial(run_plain, at_once=at_once, together=args.prompts)
        few = Cells(min(2, args.cells[0]), 8, -1)  # a warm-up
        for work in (plain, run_sweep):
            other.submit(work, server.url, few).result()
        found = {**model, "in flight": at_once}
        measured = Measured(args, server.url, at_once, other)
        print(f"started after {time.monotonic() - begun:.0f} s", flush=True)
        for number in range(args.rounds):
            if number and time.monotonic() - begun > args.budget:
                break
            measured.round(number)
            run = Run("sweep", setup(args, **found), measured.rows(), ("alone", "plain requests"))
            # Each time, so that what is there is kept if the machine is taken away.
            write(run, args.json)
    publish(run, args.json)


if __name__ == "__main__":
    main()
