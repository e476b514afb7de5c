# SPDX-License-Identifier: Apache-2.0
"""How cheerful: two measures with one shape, `measure(bench, prompts, steerings)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from demo import mood
from demo.engine import Bench, Steering, Written


@dataclass(frozen=True)
class Scored:
    """values: float64 [steerings, prompts] in nats, positive for cheerful. answers: what was
    written, [steerings][prompts], if the measure had to write."""

    values: torch.Tensor
    answers: list[list[Written]] | None = None


class Measure(Protocol):
    """Scores every prompt under every steering, in one `generate` call."""

    @property
    def unit(self) -> str:
        """What one unit of the score is, for labels."""

    def __call__(
        self, bench: Bench, prompts: Sequence[str], steerings: Sequence[Steering | None]
    ) -> Scored: ...


@dataclass(frozen=True)
class GrammarMood:
    """The mood the grammar reads in what the model writes after the prompt (`demo.mood`)."""

    unit: str = "nats per mood-bearing slot"

    def __call__(
        self, bench: Bench, prompts: Sequence[str], steerings: Sequence[Steering | None]
    ) -> Scored:
        written = bench.write(prompts, steerings)
        moods = [[mood.read(a.prompt, a.whole_words()).mood for a in row] for row in written]
        return Scored(torch.tensor(moods, dtype=torch.float64), written)


@dataclass(frozen=True)
class ContinuationOdds:
    """log P of cheerful continuations minus log P of gloomy ones, each a mean over its list."""

    cheerful: tuple[str, ...]
    gloomy: tuple[str, ...]
    unit: str = "nats, cheerful minus gloomy continuations"

    def __call__(
        self, bench: Bench, prompts: Sequence[str], steerings: Sequence[Steering | None]
    ) -> Scored:
        endings = self.cheerful + self.gloomy
        tails = [bench.tokenizer.encode(e, add_special_tokens=False) for e in endings]
        whole = [bench.encode(p) + tail for p in prompts for tail in tails]
        asked = [s for s in steerings for _ in whole]
        logprobs = bench.prompt_logprobs(whole * len(steerings), asked)
        sums = [sum(values[-len(tails[i % len(tails)]) :]) for i, values in enumerate(logprobs)]
        table = torch.tensor(sums, dtype=torch.float64).view(len(steerings), len(prompts), -1)
        cheerful = table[..., : len(self.cheerful)].mean(-1)
        return Scored(cheerful - table[..., len(self.cheerful) :].mean(-1))
