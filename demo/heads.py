# SPDX-License-Identifier: Apache-2.0
"""A head that looks for what followed last time: found on a list that is read twice, and shown on
an ordinary sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.pilot.attention import attention_of, query_weights
from vllm.pilot.bench import EngineBench

_ALL = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}


@dataclass(frozen=True)
class Head:
    """The head, and its attention in the sentence."""

    layer: int
    head: int
    tokens: list[str]
    weights: np.ndarray
    """float32 [queries, keys]."""
    followed: int
    """The key behind an earlier token that is the last one again."""
    score: float
    """In the list, the mean weight of the key behind the earlier same token."""
    others: float
    """The largest weight of that key in the sentence among heads of the first layer, which cannot
    know what a key follows."""

    @property
    def share(self) -> float:
        """The weight of that key for the sentence's last token."""
        return float(self.weights[-1, self.followed])


def find_head(bench: EngineBench, listed: str, sentence: str) -> Head:
    """Find the head on a list and read it in a sentence, whose last token was there before."""
    once = bench.encode(listed)
    ids = bench.encode(sentence)
    twice, shown = _weights(bench, [*once, *once]), _weights(bench, ids)
    scores = {
        (layer, head): float(
            np.mean([rows[head, t, t - len(once) + 1] for t in range(len(once), 2 * len(once) - 1)])
        )
        for layer, rows in twice.items()
        for head in range(len(rows))
    }
    layer, head = max(scores, key=lambda at: scores[at])
    followed = ids[:-1].index(ids[-1]) + 1
    return Head(
        layer,
        head,
        [bench.tokenizer.decode([token]) for token in ids],
        shown[layer][head],
        followed,
        scores[layer, head],
        float(shown[min(shown)][:, -1, followed].max()),
    )


def _weights(bench: EngineBench, ids: Sequence[int]) -> dict[int, np.ndarray]:
    """All weights, by layer: float32 [heads, queries, keys], 0 behind a query."""
    params = SamplingParams(max_tokens=1, temperature=0.0, capture={"inline": _ALL})
    prompt = TokensPrompt(prompt_token_ids=list(ids))
    [output] = bench.llm.generate([prompt], [params], use_tqdm=False)
    made = {}
    for layer, rows in attention_of(output).items():
        assert layer is not None
        queries = [query_weights(rows, t) for t in range(len(ids))]
        square = np.zeros((len(queries[0]), len(ids), len(ids)), np.float32)
        for t, row in enumerate(queries):
            square[:, t, : t + 1] = row
        made[layer] = square
    return made


def show(console: Console, found: Head) -> None:
    """Say where the last token of the sentence looks."""
    console.print(
        f"[bold]A head:[/] {found.head} of layer {found.layer} gives {found.score:.2f} of its "
        "attention to what followed last time, in a list that is read twice. In the sentence"
    )
    console.print(f"  [dim]{escape(''.join(found.tokens))}[/]")
    weights = found.weights[-1]
    for key in sorted(np.argsort(-weights)[:4].tolist()):
        bar = "█" * round(40 * float(weights[key]))
        console.print(f"  {weights[key]:5.2f} {bar} {escape(repr(found.tokens[key]))}")
    console.print(
        f"its last token looks back at {escape(repr(found.tokens[found.followed]))} with "
        f"{found.share:.2f}; heads of layer 0 with {found.others:.2f} at most."
    )
