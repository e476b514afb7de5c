# SPDX-License-Identifier: Apache-2.0
"""Peer: ours. Idle, steering, capturing; rows inline (in memory) and in files.

python -m benchmarks.peers.pilot --model DIR --stock STOCK

The capture buffer is the default one, 256 MiB: prompts whose rows of a step would be more are
computed in smaller steps, and rows of one leave while the next one runs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.engine import Asks, describe, prepare, start, stop
from benchmarks.peers.workloads import OUTPUT, PROMPT, Answer, Shape, Timer, arguments, ready

if TYPE_CHECKING:
    from vllm import LLM

POINTS = ("pre_attn", "post_attn", "post_block")
SCALE = 0.1
"""Of the entries of steering vectors; those of the stream are of order one."""

WRITERS = 16
"""Threads of the filesystem consumer; upstream's extraction has 32."""

ROOM = 1 << 34
"""For consumers to hold: no request waits for another's files."""


def steering(shape: Shape, requests: int) -> list[dict[str, Any]]:
    """Another vector at each point, layer and request."""
    fields = []
    for request in range(requests):
        generator = torch.Generator().manual_seed(request)
        rows = torch.randn(len(POINTS), shape.layers, shape.hidden, generator=generator) * SCALE
        vectors = {p: dict(enumerate(rows[i])) for i, p in enumerate(POINTS)}
        fields.append({"steering_vectors": vectors})
    return fields


def asked(consumer: str, layers: list[int], positions: str) -> dict[str, Any]:
    return {"capture": {consumer: {"hooks": {"post_block": layers}, "positions": positions}}}


def _need_written(ask: Callable[[], list[Any]]) -> None:
    """An output with an `ok` says that its files are complete."""
    for output in ask():
        result = output.capture_results["filesystem"]
        if result.status != "ok":
            raise SystemExit(f"filesystem: {result.error}")


class Pilot:
    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._args, self._answer = args, answer
        self._asks, self._timer = Asks(args), Timer(args, answer)
        self._shape = self._asks.shape
        self._root = args.files / "benchmark-pilot"

    def run(self) -> None:
        args = self._args
        folder = {
            "name": "filesystem",
            "root": str(self._root),
            "pending_bytes": ROOM,
            "threads": WRITERS,
        }
        llm = start(
            args,
            enable_steering=True,
            capture_consumers=["inline", folder],
            capture_inline_max_bytes=ROOM,
        )
        describe(
            self._answer,
            llm,
            captured="post_block",
            files=f"packed, synced, in {args.files}",
            writers=str(WRITERS),
        )
        ready(args)
        self._generate(llm)
        self._extract(llm)
        stop(llm)

    def _generate(self, llm: LLM) -> None:
        args, asks, timer = self._args, self._asks, self._timer
        vectors = steering(self._shape, args.requests)
        timer.time(OUTPUT, "ours, idle", partial(asks.generate, llm))
        timer.time(
            OUTPUT,
            "ours, steering",
            partial(asks.generate, llm, vectors),
            steered=f"{len(POINTS)} points x {self._shape.layers} layers",
            distinct=args.requests,
        )
        for name, layers in self._layers().items():
            fields = [asked("inline", layers, "all_generated")] * args.requests
            # The last generated token is never fed back.
            rows, ask = args.generated - 1, partial(asks.generate, llm, fields)
            facts = self._facts(layers) | {"mean |row|": self._check(ask, layers, rows)}
            work = partial(self._check, ask, layers, rows)
            timer.time(OUTPUT, f"ours, capturing generated tokens, {name}", work, **facts)

    def _extract(self, llm: LLM) -> None:
        asks, timer, rows = self._asks, self._timer, self._args.extract_prompt
        timer.time(PROMPT, "ours, idle", partial(asks.extract, llm), delivered="nothing")
        for name, layers in self._layers().items():
            ask = partial(asks.extract, llm, asked("inline", layers, "all_prompt"))
            facts = self._facts(layers) | {"mean |row|": self._check(ask, layers, rows)}
            work = partial(self._check, ask, layers, rows)
            timer.time(PROMPT, f"ours, {name}, inline", work, delivered="memory", **facts)

            ask = partial(asks.extract, llm, asked("filesystem", layers, "all_prompt"))
            write = partial(_need_written, ask)
            facts = self._facts(layers)
            timer.time(
                PROMPT, f"ours, {name}, files", write, self._clean, delivered="files", **facts
            )

    def _layers(self) -> dict[str, list[int]]:
        few = self._shape.few(self._args.few)
        return {f"{len(few)} layers": few, "all layers": list(range(self._shape.layers))}

    def _check(self, ask: Callable[[], list[Any]], layers: list[int], rows: int) -> float:
        """Every row must be there. The mean size of the first request's of the last layer."""
        shape, outputs = (rows, self._shape.hidden), ask()
        for output in outputs:
            result = output.capture_results["inline"]
            if result.status != "ok":
                raise SystemExit(f"inline: {result.error}")
            for layer in layers:
                values = result.payload["post_block", layer].values
                if values.shape != shape:
                    raise SystemExit(f"rows {tuple(values.shape)}, not {shape}")
        first = outputs[0].capture_results["inline"].payload["post_block", layers[-1]]
        return first.values.float().abs().mean().item()

    def _facts(self, layers: list[int]) -> dict[str, Any]:
        return {"row bytes": len(layers) * self._shape.hidden * 2}

    def _clean(self) -> None:
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("pilot")
    prepare()
    Pilot(args, answer).run()
    answer.print()


if __name__ == "__main__":
    main()
