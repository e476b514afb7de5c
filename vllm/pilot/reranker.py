# SPDX-License-Identifier: Apache-2.0
"""Documents ranked by the attention that a query's tokens pay them, in one prompt with all of them.

In-context re-ranking (Chen et al. 2024, arXiv 2410.02642) sums over all heads; CoRe (Tran et al.
2025, arXiv 2510.02219) over a few, its contrastive retrieval heads. What a prompt attends to
anyway is taken off: the same prompt is read once more with a query that asks nothing, "N/A".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.pilot.attention import Heads, attention_of, mean_weights, need_positions
from vllm.pilot.picture import named_bars, subplots
from vllm.v1.capture.figures import save_figure

if TYPE_CHECKING:
    from vllm.pilot.attention import Captured

SPREAD = 2.0
"""Tokens so many standard deviations below their document's mean are left out."""


@dataclass(frozen=True)
class Ranking:
    """Attention of a query's tokens to each document."""

    scores: np.ndarray
    """float64 [documents]."""
    order: list[int]
    """Numbers of the documents, the best first."""
    tokens: list[np.ndarray]
    """Attention to each document's tokens with the query, less that without, float64 [tokens]."""

    def draw(self, target: str | Path, names: Sequence[str], title: str = "") -> None:
        """Write the scores as bars; PNG or SVG by the suffix.

        Args:
            names: of the documents, in their order.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure, (axes,) = subplots(1, 6.5, 1.2 + 0.32 * len(names))
        named_bars(axes, names, self.scores, "attention of the query, calibrated", self.order[:1])
        axes.set_title(title, fontsize=10)
        save_figure(figure, target)


def rerank_capture(query: Any, heads: Heads = "all") -> dict[str, Any]:
    """Return the field `capture` of a request for `rerank`: one number for each token of the query
    and key.

    Args:
        query: the positions of the query's tokens, as in any capture: `{"text": ...}`.
        heads: which heads; "all" is in-context re-ranking.
    """
    asked = {"heads": heads, "queries": query, "give": ["weights"], "sum": "all"}
    return {"inline": {"attention": asked}}


def rerank(
    output: "Captured",
    blank: "Captured",
    documents: Sequence[Sequence[int]],
    blank_documents: Sequence[Sequence[int]] | None = None,
    *,
    consumer: str = "inline",
) -> Ranking:
    """Score documents by the attention of a query's tokens.

    With a[j] the weight of key j, summed over the captured heads and layers and mean over the
    query's tokens, b[j] that of the prompt without a query, and d the tokens of a document,

        c = a[d] - b[d],    score = sum of c where c >= mean(c) - 2 std(c)

    in float64 on weights in float32; std is that of a sample (n - 1), 0 of one token.

    Args:
        output: of the prompt with the query, asked with `rerank_capture`.
        blank: of the same prompt with "N/A" or the like in the query's place.
        documents: the positions of each document's tokens, before the query.
        blank_documents: those in the other prompt, where they differ.

    Raises:
        ValueError: a document is not before the query, or has not as many tokens in both.
    """
    others = documents if blank_documents is None else blank_documents
    return rank(
        received(output, documents, consumer=consumer),
        received(blank, others, consumer=consumer),
    )


def rank(with_query: Sequence[np.ndarray], without: Sequence[np.ndarray]) -> Ranking:
    """Rank documents by what their tokens receive, as `rerank` says.

    Args:
        with_query, without: for each document float64 [tokens], a[d] and b[d].

    Raises:
        ValueError: there is no document, one has not as many tokens in both, or a number is not
            finite.
    """
    if not with_query or [len(a) for a in with_query] != [len(b) for b in without]:
        raise ValueError("documents: must be some, of as many tokens in both prompts")
    tokens = [a - b for a, b in zip(with_query, without, strict=True)]
    if bad := [i for i, one in enumerate(tokens) if not np.isfinite(one).all()]:
        raise ValueError(f"documents[{bad[0]}]: what its tokens receive is not finite")
    scores = np.array([_kept(one).sum() for one in tokens])
    return Ranking(scores, np.argsort(-scores, kind="stable").tolist(), tokens)


def received(
    output: "Captured",
    documents: Sequence[Sequence[int]],
    queries: Sequence[int] | None = None,
    *,
    consumer: str = "inline",
) -> list[np.ndarray]:
    """Return the attention that each token of each document gets, float64 [tokens]: summed over
    the captured heads and layers, mean over queries.

    Args:
        queries: positions; all that were captured if None.

    Raises:
        ValueError: a document is not before the queries, or a query was not captured.
    """
    layers = list(attention_of(output, consumer).values())
    total = np.sum([mean_weights(rows, queries) for rows in layers], axis=0)
    before = min(queries or [int(rows.positions.min()) for rows in layers])
    return [
        total[need_positions(positions, before, f"documents[{i}]")]
        for i, positions in enumerate(documents)
    ]


def _kept(tokens: np.ndarray) -> np.ndarray:
    spread = tokens.std(ddof=1) if len(tokens) > 1 else 0.0
    return tokens[tokens >= tokens.mean() - SPREAD * spread]
