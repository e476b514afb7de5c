# SPDX-License-Identifier: Apache-2.0
"""Peer: ours. Idle, steering, capturing; rows inline (in memory) and in files.

python -m benchmarks.peers.pilot --model DIR --stock STOCK

Prompts whose rows of a step are more than the capture buffer has room for are computed in smaller
steps, and rows of one leave while the next one runs. --buffer-mib sets its size, and --landing-gib
how much memory results may hold where the device wrote them; without them the defaults do.

"disk alone": as many files of the same sizes as the call before left, written in the same folder by
as many threads as ours, each file synced. The two take turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.disk import Disk, filesystem_of
from benchmarks.peers.engine import Asks, describe, prepare, start, stop
from benchmarks.peers.workloads import (
    ALL_FILES,
    ALL_INLINE,
    DISK,
    LAST_ROW,
    Answer,
    Facts,
    Load,
    Shape,
    Timer,
    arguments,
    few_inline,
    ready,
)

if TYPE_CHECKING:
    from vllm import LLM

POINTS = ("pre_attn", "post_attn", "post_block")
SCALE = 0.1
"""Of the entries of steering vectors; those of the stream are of order one."""

WRITERS = 16
"""Threads of the filesystem consumer; upstream's extraction has 32."""

ROOM = 1 << 35
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


def _complete(output: Any, consumer: str) -> Any:
    """The result of a consumer, which must not be an error."""
    result = output.capture_results[consumer]
    if result.status != "ok":
        raise SystemExit(f"{consumer}: {result.error}")
    return result


class Pilot:
    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._args, self._answer = args, answer
        self._asks, self._timer = Asks(args), Timer(args, answer)
        self._shape = self._asks.shape
        self._few = self._shape.few(args.few)
        self._all = list(range(self._shape.layers))
        self._root = args.files / "benchmark-pilot"

    def run(self) -> None:
        args = self._args
        folder = {
            "name": "filesystem",
            "root": str(self._root),
            "pending_bytes": ROOM,
            "threads": WRITERS,
        }
        landing, buffer = args.landing_gib, args.buffer_mib
        options = {} if landing is None else {"capture_landing_bytes": int(landing * (1 << 30))}
        if buffer is not None:
            options["capture_buffer_bytes"] = buffer << 20
        llm = start(
            args,
            enable_steering=True,
            capture_consumers=["inline", folder],
            capture_inline_max_bytes=ROOM,
            **options,
        )
        describe(
            self._answer,
            llm,
            captured="post_block",
            files=f"packed, synced, in {args.files} ({filesystem_of(args.files)})",
            writers=str(WRITERS),
            landing="the default" if landing is None else f"{landing:g} GiB",
            buffer="the default" if buffer is None else f"{buffer} MiB",
        )
        ready(args)
        for load in args.extract:
            self._extract(llm, load)
        self._generate(llm)
        stop(llm)

    def _extract(self, llm: LLM, load: Load) -> None:
        """All layers before few: the first call of all is one that needs most memory."""
        timer = self._timer
        idle = partial(self._asks.extract, llm, load)
        idle()
        timer.extract(load, "ours, idle", idle, facts={"delivered": "nothing"})
        for case, layers, positions in (
            (ALL_INLINE, self._all, "all_prompt"),
            (few_inline(len(self._few)), self._few, "all_prompt"),
            (LAST_ROW, self._all, "last_prompt"),
        ):
            fields = asked("inline", layers, positions)
            rows = load.prompt if positions == "all_prompt" else 1
            size = self._row_bytes(layers) * rows / load.prompt  # a prompt token's share
            timer.extract(
                load,
                case,
                partial(self._read, llm, load, fields, layers[-1]),
                check=partial(self._check, layers, rows),
                facts={"delivered": "memory", "row bytes": size},
            )
        self._files(llm, load)

    def _files(self, llm: LLM, load: Load) -> None:
        """Ours and the disk alone take turns, call by call."""
        disk = Disk(self._root, WRITERS)
        rates: list[float] = []
        facts: Facts = {
            "row bytes": self._row_bytes(self._all),
            "filesystem": filesystem_of(self._root),
        }
        written: list[int] = []

        def alone() -> None:
            written[:] = disk.clear()
            rates.append(load.tokens / disk.seconds(written))

        fields = asked("filesystem", self._all, "all_prompt")
        work = partial(self._written, llm, load, fields)
        disk.clear()
        self._timer.extract(
            load,
            ALL_FILES,
            work,
            clean=alone,
            beside=[DISK],
            facts={"delivered": "files", **facts},
        )
        facts = {**facts, "files": len(written), "threads": WRITERS}
        self._timer.add_calls(load, DISK, rates, [], facts)

    def _generate(self, llm: LLM) -> None:
        args, asks, timer = self._args, self._asks, self._timer
        vectors = steering(self._shape, args.requests)
        timer.generate("ours, idle", partial(asks.generate, llm))
        timer.generate(
            "ours, steering",
            partial(asks.generate, llm, vectors),
            facts={
                "steered": f"{len(POINTS)} points x {self._shape.layers} layers",
                "distinct": args.requests,
            },
        )
        for name, layers in {
            f"{len(self._few)} layers": self._few,
            "all layers": self._all,
        }.items():
            fields = [asked("inline", layers, "all_generated")] * args.requests

            def work(layers: list[int] = layers, fields: list[dict[str, Any]] = fields) -> Facts:
                # The last generated token is never fed back.
                return self._check(layers, args.generated - 1, asks.generate(llm, fields))

            timer.generate(
                f"ours, capturing generated tokens, {name}",
                work,
                facts={"row bytes": self._row_bytes(layers), **work()},
            )

    def _read(self, llm: LLM, load: Load, fields: dict[str, Any], layer: int) -> list[Any]:
        """Every result must be complete, and one number of each is read."""
        outputs = self._asks.extract(llm, load, fields)
        for output in outputs:
            _complete(output, "inline").payload["post_block", layer].values[-1, -1].item()
        return outputs

    def _written(self, llm: LLM, load: Load, fields: dict[str, Any]) -> list[Any]:
        """A result that is complete says that its files are."""
        outputs = self._asks.extract(llm, load, fields)
        for output in outputs:
            _complete(output, "filesystem")
        return outputs

    def _check(self, layers: list[int], rows: int, outputs: list[Any]) -> Facts:
        """Every row must be there. The mean size of the first request's of the last layer."""
        shape = (rows, self._shape.hidden)
        for output in outputs:
            payload = _complete(output, "inline").payload
            for layer in layers:
                values = payload["post_block", layer].values
                if values.shape != shape:
                    raise SystemExit(f"rows {tuple(values.shape)}, not {shape}")
        first = _complete(outputs[0], "inline").payload["post_block", layers[-1]]
        return {"mean |row|": first.values.float().abs().mean().item()}

    def _row_bytes(self, layers: list[int]) -> int:
        return len(layers) * self._shape.hidden * 2


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("pilot")
    prepare()
    Pilot(args, answer).run()
    answer.print()


if __name__ == "__main__":
    main()
