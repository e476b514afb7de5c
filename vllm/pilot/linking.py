# SPDX-License-Identifier: Apache-2.0
"""AttnLink: which of a prompt's items does one head of the last token look at?

A head that was found to link, say, a question with the columns of a table's schema picks the
columns that an answer needs, before anything is generated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.pilot.attention import attention_of, need_positions, query_weights

if TYPE_CHECKING:
    from vllm.pilot.attention import Captured

EPSILON = 1e-8
"""Number added to each score before its logarithm is taken."""


@dataclass(frozen=True)
class Links:
    """Items by how much a head looks at them, the most first."""

    names: list[str]
    """The names of all items."""
    scores: np.ndarray
    """The mean weight of each item's tokens, float64 [items]."""
    chances: np.ndarray
    """Their share, float64 [items]: sums to 1."""
    chosen: list[str]
    """The names that were selected."""


def link_capture(head: Sequence[int], query: Any = "last_prompt") -> dict[str, Any]:
    """Return the field `capture` of a request for `link`.

    Args:
        head: [layer, head].
        query: the position of the token that looks, as in any capture.
    """
    asked = {"heads": [list(head)], "queries": query, "give": ["weights"]}
    return {"inline": {"attention": asked}}


def link(
    output: "Captured",
    items: Mapping[str, Sequence[int]],
    *,
    temperature: float = 1.0,
    top_p: float = 0.8,
    query: int = -1,
    consumer: str = "inline",
) -> Links:
    """Select items by one head's attention.

    With A the weights of the query, and i the tokens of an item,

        score = mean(A[i]),    chance = softmax over items of log(score + 1e-8) / temperature

    and selected are, from the greatest chance on, as few as together have `top_p`; one at least.

    Args:
        output: asked with `link_capture`: of one head.
        items: name -> the positions of its tokens.
        query: the position of the token that looks, or negative: from the end of the captured.

    Raises:
        ValueError: a position is behind the query, there are no items, there is not one head, or
            `temperature` or `top_p` is out of range.
    """
    if not temperature > 0 or not 0 < top_p <= 1:
        raise ValueError("temperature must be above 0, and top_p above 0 and at most 1")
    if not items:
        raise ValueError("items: there are none")
    captured = attention_of(output, consumer)
    weights = [query_weights(rows, query) for rows in captured.values()]
    if len(weights) != 1 or weights[0].ndim != 2 or len(weights[0]) != 1:
        raise ValueError("link: the capture must be of one head, without 'sum'")
    row = weights[0][0].astype(np.float64)
    scores = np.array(
        [row[need_positions(at, len(row), f"items.{name}")].mean() for name, at in items.items()]
    )
    logits = np.log(scores + EPSILON)
    with np.errstate(over="ignore"):  # so small a temperature leaves the greatest alone
        chances = np.exp((logits - logits.max()) / temperature)
    chances /= chances.sum()
    order = np.argsort(-chances, kind="stable")
    # Rounding must not ask for one item more than all.
    enough = int(np.searchsorted(np.cumsum(chances[order]), top_p * (1 - 1e-12))) + 1
    names = list(items)
    return Links(
        names=[names[i] for i in order],
        scores=scores[order],
        chances=chances[order],
        chosen=[names[i] for i in order[:enough]],
    )
