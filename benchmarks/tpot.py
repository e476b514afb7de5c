# SPDX-License-Identifier: Apache-2.0
"""Time per output token: upstream, nothing enabled, idle, steered, captured, bystanders.

    python -m benchmarks.tpot --model CONFIG_DIR [--stock DIR] [--batch 1 32 256] [--json FILE]
        [--processes] [--settle SECONDS] [--landing-gib GIB]

"rule": every request has one, which scores each generated token and never fires. "32 probes of 3
layers" are an operator's, linear, and judge every generated token of every request; "an MLP, an
attention probe" likewise, of 64 units and of 4 heads, over 3 layers each. "lens": each has
the logit lens of the middle layer, of each generated token; "32 features" the most active of the
65,536 of an autoencoder there, and with "set a feature" each request sets one of its own.

TPOT = (t(8 + n tokens) - t(8 tokens)) / n, n of --tokens; of a batch that is sent at once. Engines
stay loaded and rounds go around the cases, forth and back, so that drift of the machine hits all
alike. "stock" is upstream's own tree, "off" this build with nothing enabled. Five engines share the
device: for an 8B model about 120 GiB. `--processes`: their engine cores in processes of their own.

"idle" has steering and capture enabled and no request that asks for either. Steered requests are
steered at every position, at 3 points of all layers, each with vectors of its own ("one content":
all with the same). Bystanders: one request of eight is steered at all points and captures one
layer, and the time is that of the others, until the last of them is complete. The engine that
captures was started for `post_block` alone, and the one that steers captures nothing; "all taps":
one that can do both everywhere, which idles and has the bystanders too. --cases starts those
engines alone that its cases need. With --before DIR, another build of this fork that was assembled
into DIR runs each case, too, in the same rounds.

On a CPU, in a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.tpot --model TINY --dtype float32 --eager --kv-bytes 16777216 --rounds 2 --tokens 16
--prompt 16 --batch 1 16 --stock build/upstream-cpu-* (with --processes OMP_NUM_THREADS=1, and four)
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.autoencoders import save_autoencoder
from benchmarks.engines import (
    NOTHING,
    Answer,
    Asks,
    Batch,
    Engine,
    Engines,
    add_arguments,
    model_shape,
    run_name,
)
from benchmarks.probes import LINEAR, POOLED, save_rules
from benchmarks.results import Row, Run

SHORT = 8
EVERY = 8
"""In a batch with bystanders, one request of so many asks for something."""
OTHERS = f"TPOT of {EVERY - 1} in {EVERY}"

BEFORE = ", before"
"""End of the names of cases and engines of another build."""
ONE_CONTENT = "steer, one content"


@dataclass(frozen=True)
class Case:
    """Whom to ask, for what; `own`: every steered request has a content of its own."""

    engine: str
    asks: Asks = NOTHING
    own: bool = False
    least: int = 1
    """The smallest batch with which this means something."""


CASES = {
    "stock": Case("stock"),
    "off": Case("off"),
    "idle": Case("both"),
    "idle, steering only": Case("steering"),
    "idle, capture only": Case("capture"),
    "steer": Case("steering", own=True),
    ONE_CONTENT: Case("steering", Asks(distinct=1), least=2),
    "capture 1 layer": Case("capture", Asks(capture="middle")),
    "capture all layers": Case("capture", Asks(capture="all")),
    "rule": Case("capture", Asks(rule=True)),
    "32 probes of 3 layers": Case("judged"),
    "an MLP, an attention probe": Case("pooled"),
    "idle, lens": Case("lens"),
    "lens of 1 layer": Case("lens", Asks(capture="lens")),
    "idle, features": Case("features"),
    "set a feature": Case("features", Asks(feature=True)),
    "32 features": Case("features", Asks(capture="features")),
    "steer, all taps": Case("both", own=True),
    "capture 1 layer, all taps": Case("both", Asks(capture="middle")),
    "capture all layers, all taps": Case("both", Asks(capture="all")),
    "bystanders": Case("both", Asks(capture="middle", every=EVERY), own=True, least=EVERY),
}


def engines_of(
    largest: int, landing_gib: float | None, features: str, rules: Path
) -> dict[str, Engine]:
    """The engines by name, for batches of up to `largest` requests.

    Args:
        features: the entry of an autoencoder.
        rules: the folder with the operator's rules.
    """
    steering = {"enable_steering": True, "max_steering_configs": largest}
    capture: dict[str, Any] = {"capture_consumers": ["inline"], "capture_inline_max_bytes": 1 << 34}
    if landing_gib is not None:
        capture["capture_landing_bytes"] = int(landing_gib * 2**30)
    return {
        "stock": Engine(stock=True),
        "off": Engine(),
        "both": Engine({**steering, **capture}, modules=largest),
        "steering": Engine(steering, modules=largest),
        "capture": Engine({**capture, "capture_points": ["post_block"]}),
        "judged": Engine({**capture, "rules": str(rules / LINEAR)}),
        "pooled": Engine({**capture, "rules": str(rules / POOLED)}),
        "features": Engine(
            {
                **{**steering, **capture, "capture_points": ["post_block"]},
                **{"steering_points": ["post_block"], "steering_families": ["add", "feature"]},
                "features": [features],
            }
        ),
        "lens": Engine({**capture, "capture_points": ["post_block"], "capture_lens": ["logit"]}),
    }


class Measured:
    """Seconds a token of each case in each round, at one batch size."""

    def __init__(
        self,
        args: argparse.Namespace,
        engines: Engines,
        requests: int,
        cases: Mapping[str, Case],
    ) -> None:
        self._args = args
        self._engines = engines
        self._requests = requests
        self._cases = {n: case for n, case in cases.items() if case.least <= requests}
        self._all: dict[str, list[float]] = defaultdict(list)
        self._others: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, Answer] = {}

    def _ask(self, name: str, tokens: int) -> Answer:
        case = self._cases[name]
        asks = case.asks
        if case.own:
            asks = replace(asks, distinct=-(-self._requests // asks.every))
        batch = Batch(self._requests, self._args.prompt, tokens, asks)
        return self._engines.ask(case.engine, batch)

    def warm_up(self, tokens: int) -> None:
        """`tokens`: so many of each case, or more."""
        most = SHORT + self._args.tokens
        for name in self._cases:
            for begun in range(0, tokens, most):
                self._ask(name, min(tokens - begun, most))

    def round(self, number: int) -> None:
        for name in [*self._cases] if number % 2 else [*reversed(self._cases)]:
            short = self._ask(name, SHORT)
            long = self._last[name] = self._ask(name, SHORT + self._args.tokens)
            took = [b - a for a, b in zip(ends(short), ends(long), strict=True)]
            self._all[name].append(took[0] / self._args.tokens * 1e3)
            self._others[name].append(took[1] / self._args.tokens * 1e3)

    def rows(self) -> list[Row]:
        at = {"batch": self._requests}
        found = []
        for name, case in self._cases.items():
            answer = self._last[name]
            facts: dict[str, float] = {}
            if "off" in self._last and name != "off":
                facts["answered as off"] = answer.same_tokens(self._last["off"])
            if answer.captured:
                facts["captured GB"] = answer.captured / 1e9
            beside = (ONE_CONTENT,) if name == "steer" else ()
            if case.asks.every == 1:
                found.append(Row(name, "TPOT", "ms", self._all[name], at, facts, beside))
        if "bystanders" in self._cases:
            for name in ("stock", "off", "bystanders"):
                if name in self._cases:
                    found.append(Row(name, OTHERS, "ms", self._others[name], at))
        return found


def ends(answer: Answer) -> tuple[float, float]:
    """When all requests were complete, and when those were that ask for nothing among others."""
    others = [t for i, t in enumerate(answer.finished) if i % EVERY]
    return max(answer.finished), max(others, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=6 << 30)
    results.add_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--tokens", type=int, default=128, help="that the difference is over")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument(
        "--warm-up", type=int, default=512, help="tokens, after which graphs for one site are there"
    )
    parser.add_argument("--landing-gib", type=float, help="of captured rows in host memory")
    parser.add_argument(
        "--settle", type=float, default=0, help="seconds before the first round, without requests"
    )
    args = parser.parse_args()
    if args.stock is None:
        args.cases = [name for name in args.cases if name != "stock"]
    cases = {name: CASES[name] for name in args.cases}
    if args.before is not None:
        ours = [name for name in cases if name != "stock"]
        cases |= {f"{n}{BEFORE}": replace(CASES[n], engine=CASES[n].engine + BEFORE) for n in ours}
    largest = max(args.batch)
    used = {case.engine for case in cases.values()}
    folder = tempfile.TemporaryDirectory()
    features = ""
    if "features" in used:
        features = save_autoencoder(Path(folder.name) / "sae", args.model)
    rules = Path(folder.name)
    save_rules(rules, args.model)
    known = engines_of(largest, args.landing_gib, features, rules)
    known |= {f"{name}{BEFORE}": replace(engine, before=True) for name, engine in known.items()}
    started = {name: engine for name, engine in known.items() if name in used}
    common = {
        "max_model_len": args.prompt + SHORT + args.tokens,
        "max_num_seqs": largest,
        "max_num_batched_tokens": max(8192, largest * args.prompt),
    }
    if not args.eager:
        # The graphs that are used, so that five engines start soon.
        common["compilation_config"] = {"cudagraph_capture_sizes": sorted(args.batch)}
    name = run_name("tpot", args)
    with Engines(started, args, **common) as engines:
        setup = results.setup(args, model=model_shape(args.model), engines=engines.versions)
        batches = [Measured(args, engines, requests, cases) for requests in args.batch]
        for number, measured in enumerate(batches):
            measured.warm_up(SHORT if number else args.warm_up)
        time.sleep(args.settle)  # memory that rows land in is registered after the start, too
        for number in range(args.rounds):
            if number and engines.time_is_up:
                break
            for measured in batches:
                measured.round(number)
            run = Run(name, setup, [row for measured in batches for row in measured.rows()])
            # Each time, so that what is there is kept if the machine is taken away.
            results.write(run, args.json)
    results.publish(run, args.json)


if __name__ == "__main__":
    main()
