# SPDX-License-Identifier: Apache-2.0
"""What tests of the playground share: what they type, and what they read of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.browser import Page
from vllm.entrypoints.serve.steering.client import SteeringClient

MARKUP = "<img src=x onerror=document.title='run'>"
"""A token of the model's; and near a module's name."""
EXAMPLES = ["I love this", "What a day", "so kind", "warm and sunny"]
AGAINST = ["I hate this", "What a mess", "so cruel", "cold and wet."]
EXACT = 1e-6
ROUNDED = 1e-5
"""How far scores of rows of norm 60 or so are apart in float32, computed in two batches."""
PICTURES = Path(__file__).parents[2] / "build" / "playground"
"""Where what the page looks like is left, for eyes."""


def said(page: Page, panel: str) -> str:
    text = page.evaluate(f"document.querySelector('#{panel} .said')?.textContent ?? ''")
    return str(text)


def find(page: Page) -> None:
    page.fill("examples", "\n".join(EXAMPLES))
    page.fill("against", "\n\n".join(AGAINST))
    page.click("#find .run")
    assert page.evaluate("!!state.find"), said(page, "find")


def steer(page: Page, **term: Any) -> None:
    """Find, and steer with it, with fields of the term."""
    find(page)
    page.click("#use-found")
    changes = json.dumps({"layers": "1", **term})
    page.evaluate(f"Object.assign(state.terms.at(-1), {changes}); showTerms()")


def client_steering(page: Page) -> dict[str, Any]:
    """The fields that the page sends."""
    fields: dict[str, Any] = page.evaluate("steeringFields()")
    return fields


def near(page_numbers: Any, ours: Any) -> None:
    """Equal to 1e-6 of the largest; and not all alike, which much would be equal to."""
    mine, theirs = np.asarray(page_numbers, dtype=np.float64), np.asarray(ours, dtype=np.float64)
    assert mine.shape == theirs.shape and mine.size > 1
    bound = EXACT * max(1.0, float(abs(theirs).max()))
    assert float(abs(mine - theirs).max()) <= bound
    assert float(np.ptp(theirs)) > 100 * bound


def rows(client: SteeringClient, texts: list[str]) -> np.ndarray:
    """[texts, layers, hidden] of the last token."""
    read = {"inline": {"hooks": {"post_block": "all"}, "positions": "last_prompt"}}
    answer = client.complete(texts, max_tokens=1, temperature=0, capture=read)
    return np.stack(
        [np.stack([c.rows["post_block", layer].values[0] for layer in range(4)])
         for c in answer.choices]
    )  # fmt: skip
