# SPDX-License-Identifier: Apache-2.0
"""Many clients at one real server, every answer checked.

    python -m benchmarks.serve_soak [--requests 2000] [--clients 16] [--seed 0] [--model DIR]
        [--device cuda]
        [--url URL --root DIR]     # a server that runs, and the root of its filesystem consumer

Starts `vllm serve`, on the CPU if no other device is named, with steering and capture (a tiny
random Llama, if no model is given), and sends it plain, steered and captured requests, whole,
streamed, read slowly, two prompts in a body, and streams whose client goes away. Every answer is
compared with its offline twin (`benchmarks.soak_asks`), at the end every file is read, and the
server must be as it was: no slot, no row and no capture held, its memory near the start's. Exits
with 1 on any disagreement.

A server of its own must offer families `add` and `ablate`, consumers `inline` and `filesystem`, and
float32; VLLM_STEERING_API_KEY is its key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from benchmarks.server_state import Counters, counters, resident, settled

if TYPE_CHECKING:
    from benchmarks.soak_asks import Ask, Asks
    from tests.conformance.engine import Device
    from vllm.entrypoints.serve.steering.client import (
        AsyncSteeringClient,
        Choice,
        Rows,
        Site,
    )

MODES = {"whole": 0.35, "stream": 0.25, "slow": 0.1, "two prompts": 0.1, "gone": 0.2}
LAYOUTS = ("packed", "per_file", "sharded")
GROWTH = 64 << 20
"""Most bytes that one of the server's processes may have grown by, from when all was warm on."""


@dataclass(frozen=True)
class Job:
    number: int
    mode: str
    ask: int

    @property
    def asks(self) -> list[int]:
        return [self.ask, self.ask ^ 1] if self.mode == "two prompts" else [self.ask]

    @property
    def name(self) -> str:
        return f"job{self.number}"

    def files(self) -> list[str]:
        """Names its captures are published under."""
        if self.mode != "two prompts":
            return [self.name]
        return [f"{self.name}-{i}-0" for i in range(2)]


def draw_jobs(asks: Asks, count: int, seed: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    jobs = []
    for number in range(count):
        mode = str(rng.choice(list(MODES), p=list(MODES.values())))
        ask = int(rng.integers(len(asks.asks)))
        if mode == "two prompts" and asks.asks[ask].chat:
            mode = "whole"
        jobs.append(Job(number, mode, ask))
    return jobs


@dataclass
class Soak:
    """One run, and what was wrong in it."""

    asks: Asks
    root: Path
    tag: str
    """Of the files."""
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    worst_row: float = 0.0

    def wrong(self, job: Job, text: str) -> None:
        self.problems.append(f"{job.name} ({job.mode}, ask {job.ask}): {text}")

    # -- asking -----------------------------------------------------------------------------

    async def send(self, url: str, jobs: Sequence[Job], clients: int) -> None:
        """All of `jobs`, by so many clients with connections of their own."""
        from vllm.entrypoints.serve.steering.client import AsyncSteeringClient

        left = iter(jobs)

        async def work() -> None:
            async with AsyncSteeringClient(url) as client:
                for job in left:
                    try:
                        await self._do(client, job)
                    except Exception as error:
                        self.wrong(job, f"{type(error).__name__}: {error}")

        await asyncio.gather(*(work() for _ in range(clients)))

    async def _do(self, client: AsyncSteeringClient, job: Job) -> None:
        from vllm.entrypoints.serve.steering.client import joined

        asks = [self.asks.asks[n] for n in job.asks]
        body = self.asks.body(job.ask)
        if asks[0].consumers:
            body["capture"] = {
                name: self._capture(name, asks[0], job) for name in asks[0].consumers
            }
        prompt: Any = [ask.prompt for ask in asks] if len(asks) > 1 else asks[0].prompt
        if asks[0].chat:
            prompt = [{"role": "user", "content": prompt}]
        self.counts[job.mode] += 1
        if job.mode in ("whole", "two prompts"):
            answer = await client.complete(prompt, **body)
            for ask, choice in zip(job.asks, answer.choices, strict=True):
                self._check(job, ask, choice)
            return
        stream = client.stream(prompt, **body)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if job.mode == "slow":
                await asyncio.sleep(0.01)
            if job.mode == "gone" and len(chunks) > job.number % 3:
                await stream.aclose()
        if job.mode == "gone":
            if not self.asks.twins[job.ask].text.startswith(joined(chunks).text):
                self.wrong(job, f"began with {joined(chunks).text!r}")
        else:
            self._check(job, job.ask, joined(chunks))

    def _capture(self, consumer: str, ask: Ask, job: Job) -> dict[str, Any]:
        if consumer == "inline":
            return dict(ask.selection)
        layout = LAYOUTS[job.number % 3]
        return {**ask.selection, "request_id": job.name, "tag": self.tag, "layout": layout}

    def _check(self, job: Job, ask: int, choice: Choice) -> None:
        """A whole answer."""
        twin, consumers = self.asks.twins[ask], self.asks.asks[ask].consumers
        self.counts["answers"] += 1
        if (choice.text, choice.finish_reason) != (twin.text, "length"):
            self.wrong(job, f"{choice.text!r} ({choice.finish_reason}), its twin {twin.text!r}")
        if choice.capture_status != dict.fromkeys(consumers, "ok"):
            self.wrong(job, f"captures {choice.capture_results}, asked were {consumers}")
        elif "inline" in consumers:
            self.counts["captured inline"] += 1
            self._check_rows(job, twin.rows, choice.rows)

    def _check_rows(self, job: Job, wanted: dict[Site, Rows], rows: dict[Site, Rows]) -> None:
        from benchmarks.soak_asks import TOLERANCE, apart

        difference = apart(rows, wanted)
        self.worst_row = max(self.worst_row, difference)
        if not difference <= TOLERANCE:
            self.wrong(job, f"its rows differ from its twin's by {difference:.2g}")

    # -- afterwards -------------------------------------------------------------------------

    def check_files(self, jobs: Sequence[Job]) -> None:
        """All are there, none else, each is whole and its twin's; those whose client went hold the
        beginning of it."""
        from vllm.entrypoints.serve.steering.client import Rows
        from vllm.v1.capture import reader

        wanted = {
            name: (job, ask)
            for job in jobs
            for name, ask in zip(job.files(), job.asks, strict=True)
            if "filesystem" in self.asks.asks[ask].consumers
        }
        for stored in reader.open(str(self.root)).requests(self.tag) if wanted else ():
            if stored.name not in wanted:
                self.problems.append(f"nobody asked for {stored!r}, or it is there twice")
                continue
            job, ask = wanted.pop(stored.name)
            if not stored.complete and job.mode != "gone":
                self.wrong(job, f"{stored!r} is not complete: {stored.error}")
            self.counts["files, whole" if stored.complete else "files, cut off"] += 1
            whole, n = self.asks.twins[ask].rows, stored.num_rows
            if stored.complete or n:
                read = {site: stored.rows(*site) for site in stored.sites}
                self._check_rows(
                    job,
                    {
                        site: Rows(
                            rows.positions[:n], rows.token_ids[:n], rows.values[:n],
                            rows.versions[:n],
                        ) if not stored.complete else rows
                        for site, rows in whole.items()
                    },
                    {
                        site: Rows(rows.positions, rows.token_ids, rows.numpy(), rows.versions)
                        for site, rows in read.items()
                    },
                )  # fmt: skip
        for name, (job, ask) in wanted.items():
            if job.mode == "gone" and self._generated_only(ask):
                # It went before the first row.
                self.counts["files without rows: none"] += 1
                continue
            self.wrong(job, f"there is no file of {name}")
        for path in self.root.rglob("*.tmp"):
            self.problems.append(f"{path} was left behind")

    def _generated_only(self, ask: int) -> bool:
        return self.asks.asks[ask].selection["positions"] == "all_generated"

    def check_counters(self, jobs: Sequence[Job], before: Counters, after: Counters) -> None:
        """Each capture ended once, and as it should. One that was cut off is no error."""
        for consumer in ("inline", "filesystem"):
            moved = {name: n - before[consumer][name] for name, n in after[consumer].items()}
            of = {gone: 0 for gone in (False, True)}
            for job in jobs:
                for ask in job.asks:
                    of[job.mode == "gone"] += consumer in self.asks.asks[ask].consumers
            self.counts[f"{consumer} ok"] = moved["ok"]
            self.counts[f"{consumer} cut off"] = moved["partial_error"]
            ended = moved["ok"] + moved["partial_error"]
            if moved["ok"] < of[False] or ended != sum(of.values()) or moved["error"]:
                self.problems.append(f"{consumer}: {of} captures (gone or not) ended as {moved}")


def soak(
    url: str,
    key: str,
    asks: Asks,
    root: Path,
    jobs: Sequence[Job],
    clients: int,
    pid: int | None,
    tag: str = "soak",
) -> Iterator[str]:
    """Lines of a report; the last one is empty if all was well.

    Args:
        pid: of the server, to measure its memory.
    """
    from vllm.entrypoints.serve.steering.client import SteeringClient

    run = Soak(asks, root, tag)
    with SteeringClient(url, steering_key=key) as client:
        for name, vectors in asks.modules.items():
            client.register_module(name, vectors)
    before = counters(url)
    memory = [resident(pid)]
    started, idle = time.monotonic(), 0.0
    # Memory is compared from the first fifth on, when caches and pools have their size.
    fifth = -(-len(jobs) // 5)
    for first in range(0, len(jobs), fifth):
        asyncio.run(run.send(url, jobs[first : first + fifth], clients))
        sent = time.monotonic()
        holds = settled(url)
        idle += time.monotonic() - sent
        memory.append(resident(pid))
    seconds = time.monotonic() - started
    run.problems += [f"still held: {name} {n:g}" for name, n in holds.items() if n]
    run.check_files(jobs)
    run.check_counters(jobs, before, counters(url))
    for process, size in memory[-1].items():
        if (grown := size - memory[1].get(process, 0)) > GROWTH:
            run.problems.append(f"process {process} of the server grew by {grown >> 20} MiB")
    with SteeringClient(url, steering_key=key) as client:
        for name in asks.modules:
            client.unregister_module(name)
    yield f"{len(jobs)} requests of {clients} clients in {seconds:.0f} s, {len(asks.asks)} distinct"
    yield f"  ({idle:.1f} s of them until nothing was held any more)"
    for name, count in sorted(run.counts.items()):
        yield f"  {count:6} {name}"
    yield f"rows differ from their twins by {run.worst_row:.1e} of their norm at most; rows of two"
    yield f"  asks by {asks.least_apart:.1e} at least, and those of an ask without its steering by"
    yield f"  {asks.least_steered:.1e}; {asks.refused} pairs were drawn and not taken"
    yield f"held at the end: {', '.join(f'{name} {n:g}' for name, n in holds.items())}"
    if pid is not None:
        shown = " ".join(f"{sum(sizes.values()) / 2**20:.0f}" for sizes in memory)
        yield f"RSS of the server's processes (MiB), at first and after each fifth: {shown}"
    for problem in run.problems[:50]:
        yield f"WRONG: {problem}"
    yield f"{len(run.problems)} disagreements" if run.problems else ""


def make_asks(model: Path, pairs: int, seed: int, device: Device = "cpu") -> Asks:
    from benchmarks.soak_asks import Drawer, offline_options
    from tests.conformance.engine import engine

    more = {"gpu_memory_utilization": 0.05} if device == "cuda" else {}
    with engine(model, **offline_options(), **more) as llm:
        return Drawer(llm, seed).draw(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=60, help="of distinct requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="default: a tiny random Llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--url", help="of a server of that model that runs")
    parser.add_argument("--root", type=Path, help="of that server's filesystem consumer")
    args = parser.parse_args()
    if args.url and not (args.model and args.root):
        parser.error("--url needs --model and --root")

    from tests.conformance.engine import prepare_environment

    prepare_environment("v1" if args.device == "cpu" else "v2", args.device)
    from tests.conftest import TinyModels
    from tests.http.server import CUDA_OPTIONS, KEY, save_model, serve

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-soak-")))
        model = args.model or save_model(TinyModels(), folder / "model")
        asks = make_asks(model, args.pairs, args.seed, args.device)
        jobs = draw_jobs(asks, args.requests, args.seed)
        print(f"{platform.platform()}, {os.cpu_count()} cores; seed {args.seed}", flush=True)
        if args.url:
            key = os.environ.get("VLLM_STEERING_API_KEY", "")
            lines = soak(args.url, key, asks, args.root, jobs, args.clients, None)
        else:
            root = folder / "acts"
            more = f"--capture-consumers=filesystem:root={root}"  # beside inline
            options = (more, *CUDA_OPTIONS) if args.device == "cuda" else (more,)
            server = stack.enter_context(serve(model, folder / "server.log", *options))
            lines = soak(server.url, KEY, asks, root, jobs, args.clients, server.process.pid)
        last = ""
        try:
            for last in lines:
                print(last, flush=True)
        except httpx.TransportError:
            for log in folder.glob("server.log"):
                print(f"the server is gone:\n{log.read_text()[-20000:]}", file=sys.stderr)
            raise
        if not last:
            print("every answer was checked, no disagreement")
    return int(bool(last))


if __name__ == "__main__":
    sys.exit(main())
