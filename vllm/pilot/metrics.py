# SPDX-License-Identifier: Apache-2.0
"""Metrics of the change that steering makes: the odds of one text against another, or a score of
the text that the model writes."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from vllm.pilot.bench import Bench, Steering, surprise
from vllm.pilot.pairs import Pairs, Text, last_words
from vllm.pilot.rows import encode


@dataclass(frozen=True)
class Written:
    """A text that the model wrote after a prompt."""

    prompt: Text
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Scored:
    """The values that a metric found."""

    values: np.ndarray
    """float64 [steerings, cases]."""
    answers: list[list[Written]] | None = None
    """[steerings][cases], if the metric had to have texts written."""


class Metric(Protocol):
    """A number for each case, which steering may change."""

    @property
    def unit(self) -> str:
        """The unit of a number, for labels."""

    @property
    def prompts(self) -> Sequence[Text]:
        """The prompt that the model is given in each case."""

    def __call__(self, bench: Bench, steerings: Sequence[Steering | None]) -> Scored:
        """Score all cases under all steerings, in one batch."""


@dataclass(frozen=True)
class Odds:
    """Log P(positive | prompt) less log P(negative | prompt), of pairs that share a prompt."""

    pairs: Pairs
    unit: str = "nats, positive against negative"

    def __post_init__(self) -> None:
        """Raise ValueError where a pair has no prompt."""
        if not self.pairs.comparable:
            raise ValueError(
                f"{self.pairs.source}: pairs with a prompt are needed to compare how likely their "
                "texts are; name a score in place of it"
            )

    @property
    def prompts(self) -> Sequence[Text]:
        """The pairs' prompts."""
        return [example.question for example in self.pairs.positive]

    def __call__(self, bench: Bench, steerings: Sequence[Steering | None]) -> Scored:
        """Score all pairs under all steerings; see `Metric`."""
        examples = [*self.pairs.positive, *self.pairs.negative]
        encoded = [encode(bench, replace(e, prompt=e.question)) for e in examples]
        nats = surprise(bench, [(e.ids, e.start) for e in encoded], steerings)
        if not np.isfinite(nats).all():
            number, case = np.argwhere(~np.isfinite(nats))[0].tolist()
            steered = steerings[number]
            under = f"layer {steered.layer}, scale {steered.scale:g}" if steered else "no steering"
            raise ValueError(f"{examples[case].where}: log P is not finite under {under}")
        half = len(self.pairs.positive)
        return Scored(nats[:, half:] - nats[:, :half])


@dataclass(frozen=True)
class Score:
    """A function's opinion of what the model writes after prompts."""

    function: Callable[[str, str], float]
    """Called with a prompt (of a chat its last message) and with what was written after it."""
    prompts: Sequence[Text]
    max_tokens: int = 64
    temperature: float = 1.0
    """Above 0 the seed is the index of the prompt: it draws alike under any steering."""
    unit: str = "score"

    def __post_init__(self) -> None:
        """Raise ValueError where there are no prompts."""
        if not self.prompts:
            raise ValueError("score: prompts are needed, after which the model writes")

    def __call__(self, bench: Bench, steerings: Sequence[Steering | None]) -> Scored:
        """Have all prompts continued under all steerings, and score that; see `Metric`."""
        answers = write(bench, self.prompts, steerings, self.max_tokens, self.temperature)
        values = [
            [float(self.function(last_words(a.prompt), a.text)) for a in row] for row in answers
        ]
        found = np.array(values, dtype=np.float64)
        if not np.isfinite(found).all():
            raise ValueError("score: the function returned a number that is not finite")
        return Scored(found, answers)


def write(
    bench: Bench,
    prompts: Sequence[Text],
    steerings: Sequence[Steering | None],
    max_tokens: int = 64,
    temperature: float = 1.0,
    **fields: Any,
) -> list[list[Written]]:
    """Have the model continue prompts under steerings, [steerings][prompts], in one batch.

    Args:
        temperature: 0 is greedy. Above it the seed is the index of the prompt.
        fields: further fields of the requests.
    """
    ids = [bench.encode(prompt, answer=True) for prompt in prompts]
    common = {"max_tokens": max_tokens, "temperature": temperature, **fields}
    asked = [
        {**common, **({"seed": i} if temperature else {}), **(s.fields() if s else {})}
        for s in steerings
        for i in range(len(prompts))
    ]
    replies = bench.ask(ids * len(steerings), asked)
    written = [
        Written(prompts[i % len(prompts)], reply.prompt_ids, reply.token_ids, reply.text)
        for i, reply in enumerate(replies)
    ]
    return [written[i : i + len(prompts)] for i in range(0, len(written), len(prompts))]


def score_function(name: str) -> Callable[[str, str], float]:
    """The function of a score that `module:function` names; see `named_function`."""
    return named_function(name, "score")


def named_function(name: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` names, for an option.

    Raises:
        ValueError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option}: {name!r} is no module:function: {error}") from None
    if not callable(found):
        raise ValueError(f"{option}: {name} is not callable")
    made: Callable[..., Any] = found
    return made
