# SPDX-License-Identifier: Apache-2.0
"""Engines to measure, each in a process of its own (`benchmarks.engine_process`), kept loaded.

    with Engines({"stock": Engine(stock=True), "off": Engine()}, args) as engines:
        answer = engines.ask("off", Batch(requests=32, prompt=32, tokens=8))

All start at once and are then asked one at a time. With `--stock DIR` the engines marked so import
upstream's own tree from DIR, and refuse to start when anything of vLLM comes from elsewhere. The
rest of their packages comes from where ours does. With `--processes` each has its engine core in a
process of its own, as users run it: then two processes an engine.

Whatever ends this process but SIGKILL, no process of an engine is left, as it would hold memory of
the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Engine:
    """What one engine is started with, beside what all have in common (`common_options`).

    `modules`: how many distinct steering contents (a vector for every point of every layer) it
    knows by name.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    modules: int = 0
    stock: bool = False
    before: bool = False
    """True if it runs another build of this fork, that of `--before`."""


@dataclass(frozen=True)
class Asks:
    """What the requests of a batch ask for.

    Args:
        distinct: contents among the requests that steer (all points of all layers); 0: none steers.
        capture: layers whose `post_block` is captured, "middle", "all" or "layer 7", or what the
            logit "lens" has for the middle layer: 10 tokens and the entropy; the 32 most active
            "features" of "sae"; of attention, "q and z" of all layers, the "mass" of two key
            ranges, each request's own, of all heads, or of "a few" (4 heads of 6 layers); "": none
            captures.
        positions: of the capture.
        feature: whether each has one feature of its own of the autoencoder "sae" set.
        rule: whether each has one rule at the middle layer, the same, that never fires.
        every: one request of so many asks for this, the others are bystanders.
        modules: what the names of the modules that steer begin with.
        focus: the factor of 32 keys of the prompt, each request's own, in all heads of all layers
            for every token; 0: none focuses.
    """

    distinct: int = 0
    capture: str = ""
    feature: bool = False
    rule: bool = False
    positions: str = "all_generated"
    every: int = 1
    modules: str = "module"
    focus: float = 0


NOTHING = Asks()


@dataclass(frozen=True)
class Batch:
    """Requests with random prompts of `prompt` tokens, sent at once; each generates `tokens`."""

    requests: int
    prompt: int
    tokens: int
    asks: Asks = NOTHING


@dataclass(frozen=True)
class Answer:
    """When each request was complete, in seconds from before the first was sent.

    `digests`: of the tokens of each, so that answers of two engines can be compared.
    `captured`: bytes of rows that the outputs held, in host memory.
    """

    finished: tuple[float, ...]
    digests: tuple[int, ...]
    captured: int

    def same_tokens(self, other: Answer) -> float:
        """The share of the requests that were answered as in `other`."""
        same = [a == b for a, b in zip(self.digests, other.digests, strict=True)]
        return sum(same) / len(same)


@dataclass(frozen=True)
class CopyToHost:
    """Ask for the rate of copies from the device into pinned memory, in bytes a second."""

    size: int
    repeats: int = 8


@dataclass(frozen=True)
class WeightBytes:
    """Ask for the bytes of the parameters that the engine holds."""


@dataclass(frozen=True)
class Start:
    """The first message to an engine's process."""

    model: str
    options: Mapping[str, Any]
    modules: int
    tree: str
    """The folder that vLLM is imported from; "" for ours."""
    stock: bool
    """True if that is upstream's own."""
    processes: bool


def add_arguments(parser: argparse.ArgumentParser, kv_bytes: int) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument(
        "--stock", type=Path, help="upstream's own tree, to be measured beside ours"
    )
    parser.add_argument("--before", type=Path, help="another build of this fork, likewise")
    parser.add_argument("--kv-bytes", type=int, default=kv_bytes, help="KV cache of each engine")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--budget", type=float, default=480, help="seconds of rounds, after which none is begun"
    )
    parser.add_argument("--eager", action="store_true", help="no compilation, as on a CPU")
    parser.add_argument(
        "--processes", action="store_true", help="each engine core in a process of its own"
    )


def run_name(benchmark: str, args: argparse.Namespace) -> str:
    """What the results are called: runs of one name are shown together."""
    parts = [benchmark, "eager" if args.eager else "", "processes" if args.processes else ""]
    # A run with another build has few rounds: targets take no notice of it.
    parts += ["before"] if args.before is not None else []
    return "-".join(filter(None, parts))


def model_shape(model: Path) -> dict[str, Any]:
    """What the results say of the model."""
    config = json.loads((model / "config.json").read_text())
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    return {"architecture": config["architectures"][0], **{name: config[name] for name in names}}


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of every engine that is measured."""
    return {
        "load_format": "benchmark",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": args.kv_bytes,
        "gpu_memory_utilization": 0.05,  # several share the GPU; the line above decides
        "dtype": args.dtype,
        "enforce_eager": args.eager,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def environment_of(tree: str, stock: bool) -> dict[str, str]:
    """The environment of a process whose vLLM is that of a tree.

    Args:
        tree: the folder that vLLM is imported from, before all others; "" for ours.
        stock: whether that is upstream's own. The plug-ins of other folders are left out then: the
            packages that it needs may lie beside ours, whose plug-in looks for files of ours.
    """
    path = [tree, os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    if stock:
        own = [dist.entry_points for dist in metadata.distributions(path=[tree])]
        names = {entry.name for found in own for entry in found if "plugins" in entry.group}
        environment["VLLM_PLUGINS"] = ",".join(sorted(names))
    return environment


class Engines:
    """The engines' processes. Leaving the `with` block ends them."""

    def __init__(self, engines: Mapping[str, Engine], args: argparse.Namespace, **common: Any):
        """
        Args:
            common: engine options of all of them, over those that every benchmark has.
        """
        options = {**common_options(args), **common}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pipes: dict[str, Connection] = {}
        self.versions: dict[str, str] = {}
        self._begun, self._budget = 0.0, args.budget
        model = str(args.model.resolve())
        self._starts = {
            name: Start(
                model,
                {**options, **engine.options},
                engine.modules,
                str((args.stock if engine.stock else args.before).resolve())
                if engine.stock or engine.before
                else "",
                engine.stock,
                args.processes,
            )
            for name, engine in engines.items()
        }

    def _launch(self, name: str, start: Start) -> None:
        ours, theirs = Pipe()
        environment = environment_of(start.tree, start.stock)
        if start.tree:
            # Neither tree may find what the other compiled.
            cache = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
            environment["VLLM_CACHE_ROOT"] = f"{cache}-stock" if start.stock else f"{cache}-before"
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        ours.send(start)
        self._pipes[name] = ours

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            for name, start in self._starts.items():
                self._launch(name, start)
            self.versions = {name: self._answer(name) for name in self._pipes}
            self._begun = time.monotonic()
        except BaseException:
            self._end(patience=0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(patience=60 if kind is None else 0)

    def _end(self, patience: float) -> None:
        """`patience`: seconds in which an engine may end by itself."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            # The engine core too, which may outlive the process that started it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self._begun > self._budget

    def ask(self, name: str, batch: Batch) -> Answer:
        self._pipes[name].send(batch)
        answer: Answer = self._answer(name)
        return answer

    def copy_rate(self, name: str, size: int) -> float:
        """Bytes a second that this engine's process copies from its device."""
        self._pipes[name].send(CopyToHost(size))
        return float(self._answer(name))

    def weight_bytes(self, name: str) -> int:
        """Bytes of the parameters that this engine holds."""
        self._pipes[name].send(WeightBytes())
        return int(self._answer(name))

    def _answer(self, name: str) -> Any:
        try:
            answer = self._pipes[name].recv()
        except EOFError:
            code = self._processes[name].wait()
            raise SystemExit(f"engine {name!r} ended with status {code}") from None
        if isinstance(answer, Exception):
            raise SystemExit(f"engine {name!r}: {answer}")
        return answer
