# SPDX-License-Identifier: Apache-2.0
"""The attention tracker: does the model still look at its instruction?

Of a prompt injection the last token attends to less of the instruction and to more of the data, in
some heads: Hung et al. 2024, "Attention Tracker", arXiv 2411.00348.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.pilot.attention import Heads, Keys, attention_of, mass, peak
from vllm.pilot.picture import head_map, subplots
from vllm.v1.capture.figures import save_figure

if TYPE_CHECKING:
    from vllm.pilot.attention import Captured

EPSILON = 1e-8
"""Number that is added to the denominator of a score, as published."""


@dataclass(frozen=True)
class HeadScores:
    """A number for each head of a prompt."""

    heads: list[tuple[int, int]]
    """Pairs (layer, head), sorted."""
    values: np.ndarray
    """float64 [heads]; from 0 to 1, the attention of the instruction."""

    @property
    def score(self) -> float:
        """The mean over all of them: low of an injection."""
        return float(self.values.mean())

    def of(self, heads: Sequence[Sequence[int]]) -> float:
        """Return the mean over some heads, pairs [layer, head].

        Raises:
            ValueError: one of them was not captured, or there are none.
        """
        at = {pair: value for pair, value in zip(self.heads, self.values, strict=True)}
        chosen = [(int(layer), int(head)) for layer, head in heads]
        if missing := [pair for pair in chosen if pair not in at]:
            raise ValueError(f"heads: {missing[:8]} were not captured")
        if not chosen:
            raise ValueError("heads: there are none")
        return float(np.mean([at[pair] for pair in chosen]))

    def draw(self, target: str | Path, title: str = "", chosen: Sequence[Any] = ()) -> None:
        """Write heads x layers as a picture; PNG or SVG by the suffix.

        Args:
            chosen: heads that get a frame, pairs [layer, head].

        Raises:
            ImportError: matplotlib is not installed.
        """
        layers = sorted({layer for layer, _ in self.heads})
        made = np.full((len(layers), 1 + max(head for _, head in self.heads)), np.nan)
        for (layer, head), value in zip(self.heads, self.values, strict=True):
            made[layers.index(layer), head] = value
        figure, (axes,) = subplots(1, 3.2 + 0.4 * made.shape[1], 1.4 + 0.35 * len(layers))
        head_map(axes, made, layers, "attention on the instruction", chosen)
        axes.set_title(title, fontsize=10)
        save_figure(figure, target)


def tracker_capture(instruction: Any, data: Any, heads: Heads = "all") -> dict[str, Any]:
    """Return the field `capture` of a request for `attention_tracker`: a few bytes a head, and the
    prefix cache is kept.

    Args:
        instruction, data: positions, as in any capture: `{"text": ...}`, `{"role": "system"}`.
        heads: which heads.
    """
    asked = {
        "heads": heads,
        "queries": "last_prompt",
        "keys": {"instruction": instruction, "data": data},
        "give": ["mass", "peak"],
    }
    return {"inline": {"attention": asked}}


def attention_tracker(
    output: "Captured",
    instruction: Keys = "instruction",
    data: Keys = "data",
    *,
    reduce: str = "sum",
    normalize: bool = True,
    query: int = -1,
    consumer: str = "inline",
) -> HeadScores:
    """Score the attention on the instruction, head by head.

    With A the weights of one head's query over all keys, r the sum or the maximum, I and D the
    positions of instruction and data, it is

        r(A[I]) / (sum(A[I]) + sum(A[D]) + 1e-8),    not normalised r(A[I])

    in float64 on weights in float32. The score of a prompt is the mean over (important) heads:
    `HeadScores.score`, or `of` with some of them.

    Args:
        output: of a request with `tracker_capture`, or with `weights` where positions are given.
        instruction, data: ranges of the capture, or positions.
        reduce: "sum", or "max".
        query: the position of the token that attends, or negative: from the end of the captured.

    Raises:
        ValueError: something of this was not captured, or `reduce` is another word.
    """
    if reduce not in ("sum", "max"):
        raise ValueError(f"reduce: must be 'sum' or 'max', got {reduce!r}")
    found: dict[tuple[int, int], float] = {}
    for layer, rows in attention_of(output, consumer).items():
        values = (mass if reduce == "sum" else peak)(rows, instruction, query)
        if normalize:
            values = values / (mass(rows, instruction, query) + mass(rows, data, query) + EPSILON)
        assert layer is not None  # only sums have none
        found |= {(layer, head): value for head, value in zip(rows.heads, values, strict=True)}
    heads = sorted(found)
    return HeadScores(heads, np.array([found[pair] for pair in heads]))


def important_heads(
    normal: Sequence[HeadScores], attacked: Sequence[HeadScores], k: float = 4.0
) -> list[tuple[int, int]]:
    """Return the heads that tell plain prompts from injections, the best first.

    After the paper: a head is important where, of its scores over prompts, mean(normal) -
    k std(normal) is above mean(attacked) + k std(attacked); std is that of a population (n).

    Args:
        normal, attacked: scores of prompts of each kind, of the same heads.
        k: how far apart they must be; fewer heads with more.

    Raises:
        ValueError: a kind has none, or not the same heads.
    """
    if not normal or not attacked:
        raise ValueError("normal, attacked: scores of both kinds of prompts are needed")
    if any(one.heads != normal[0].heads for one in (*normal, *attacked)):
        raise ValueError("normal, attacked: must be scores of the same heads")
    high, low = (np.stack([one.values for one in kind]) for kind in (normal, attacked))
    gap = high.mean(0) - k * high.std(0) - low.mean(0) - k * low.std(0)
    return [normal[0].heads[i] for i in np.argsort(-gap, kind="stable") if gap[i] > 0]
