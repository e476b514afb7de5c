# SPDX-License-Identifier: Apache-2.0
"""Fit a linear probe while the model serves: no row is stored.

    python -m examples.capture_consumers.online_probe [--model DIR --texts FILE ...]

A training loop that reads from `AsyncLLM.generate`: rows come as tokens do, and each batch of them
is a step of logistic regression. Every row is judged before it is learned from, so the accuracy is
one on unseen rows. A second probe learns the same rows with labels that mean nothing (a control
task, Hewitt and Liang 2019): what it reaches says how much is memory.

`--texts` are lines `label<TAB>text`, label 0 or 1. Without it the demo's cheerful and gloomy
passages are used, and without `--model` its small model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from demo.environment import prepare_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

BUILD = Path(__file__).parents[2] / "build"
POINT = "post_block"
Labelled = tuple[str, int]


class OnlineProbe:
    """Logistic regression on rows that are seen once."""

    def __init__(self, hidden_size: int, learning_rate: float = 0.05) -> None:
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        # Components of the stream differ by orders of magnitude; Adam steps alike in all of them.
        self.optimizer = torch.optim.Adam(self.linear.parameters(), lr=learning_rate)
        self.correct: list[bool] = []
        """Of each row, in the order they came: whether it was right before it was learned."""

    def learn(self, rows: torch.Tensor, labels: torch.Tensor) -> None:
        """
        Args:
            rows: [n, hidden].
            labels: [n], 0 or 1.
        """
        rows = functional.normalize(rows.float(), dim=-1)
        logits = self.linear(rows).squeeze(-1)
        self.correct += ((logits > 0) == (labels > 0.5)).tolist()
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def accuracy(self, last: int) -> float:
        recent = self.correct[-last:]
        return sum(recent) / len(recent)


async def rows_of(
    engine: AsyncLLM, texts: Iterable[Labelled], layer: int, positions: Any, concurrent: int
) -> Any:
    """Yield (rows [n, hidden], label) of all texts, in the order the engine computes them.

    At most `concurrent` requests are served at once, and a queue of that length lies between them
    and who iterates: a slow learner slows the requests down, and memory does not grow.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        output_kind=RequestOutputKind.DELTA,  # each output has the rows that are new
        capture={"inline": {"hooks": {POINT: [layer]}, "positions": positions}},
    )
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=concurrent)
    remaining = iter(enumerate(texts))

    async def serve() -> None:
        for index, (text, label) in remaining:
            async for output in engine.generate(text, params, f"probe-{index}"):
                results = output.outputs[0].capture_results
                assert results is not None  # it was asked for
                result = results["inline"]
                if result.error is not None:
                    raise RuntimeError(result.error)
                rows = result.payload[POINT, layer].values
                if len(rows):
                    await queue.put((rows, label))

    async def serve_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrent):
                    group.create_task(serve())
        finally:
            await queue.put(None)

    serving = asyncio.create_task(serve_all())
    while (item := await queue.get()) is not None:
        yield item
    await serving  # raises what went wrong there


async def train(
    engine: AsyncLLM, texts: Iterable[Labelled], layer: int, report: int = 50
) -> tuple[OnlineProbe, OnlineProbe]:
    """The probe, and the one with labels by lot."""
    hidden_size = engine.model_config.get_hidden_size()
    probe, control = OnlineProbe(hidden_size), OnlineProbe(hidden_size)
    lot = random.Random(0)
    count = 0
    async for rows, label in rows_of(engine, texts, layer, "last_prompt", concurrent=16):
        probe.learn(rows, torch.full([len(rows)], float(label)))
        control.learn(rows, torch.full([len(rows)], float(lot.random() < 0.5)))
        count += len(rows)
        if count % report == 0:
            print(
                f"{count} rows: accuracy {probe.accuracy(report):.2f}, "
                f"control {control.accuracy(report):.2f}",
                flush=True,
            )
    return probe, control


def demo_texts(count: int) -> list[Labelled]:
    """Prompts that end alike and differ in mood, shuffled."""
    from demo.corpus import contrast_prompts

    cheerful, gloomy = contrast_prompts(pairs=count // 2, seed=0)
    texts = [(text, 1) for text in cheerful] + [(text, 0) for text in gloomy]
    random.Random(1).shuffle(texts)
    return texts


def read_texts(path: Path) -> list[Labelled]:
    lines = path.read_text().splitlines()
    return [(text, int(label)) for label, text in (line.split("\t", 1) for line in lines)]


async def run(model: Path, texts: list[Labelled], layer: int | None) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            capture_consumers=["inline"],
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 28,
            disable_log_stats=True,
        )
    )
    try:
        if layer is None:
            layer = engine.model_config.get_total_num_hidden_layers() // 2
        probe, control = await train(engine, texts, layer)
        half = len(texts) // 2
        print(
            f"second half: accuracy {probe.accuracy(half):.3f}, "
            f"control {control.accuracy(half):.3f}"
        )
    finally:
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--texts", type=Path, help="lines of label<TAB>text")
    parser.add_argument("--count", type=int, default=600, help="of the demo's passages")
    parser.add_argument("--layer", type=int, help="default: the middle one")
    given = parser.parse_args()
    prepare_environment(small_model=given.model is None)
    model = given.model
    if model is None:
        from rich.console import Console

        from demo.train import Recipe, cached_model

        model = cached_model(BUILD / "demo-model", Recipe(), Console())
    texts = demo_texts(given.count) if given.texts is None else read_texts(given.texts)
    asyncio.run(run(model, texts, given.layer))


if __name__ == "__main__":
    main()
