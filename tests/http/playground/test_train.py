# SPDX-License-Identifier: Apache-2.0
"""The panel that trains: its progress, its report, and the vector on a slider."""

from __future__ import annotations

import pytest

from tests.http.server import KEY
from tests.support.browser import Page
from tests.support.playground import PICTURES, said

pytestmark = pytest.mark.long

LINES = "\n".join(f"{a}{b} | eee | ooo" for a in "abcdefghijklmnopqrst" for b in "abcdefghijkl")
"""Enough that its passes are seen."""


def begin(page: Page, passes: int) -> None:
    page.fill("steering-key", KEY)
    page.fill("train-pairs", LINES)
    page.fill("train-layers", "1")
    page.fill("train-epochs", str(passes))
    page.evaluate("document.querySelector('#train .run').click()")


def test_a_training_from_its_pairs_to_a_slider(page: Page) -> None:
    begin(page, 8)
    page.wait("$('training').checkVisibility()")
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push("
        "[$('train-said').textContent, $('train-progress').value])).observe($('train-said'),"
        "{ childList: true }); 0"
    )
    page.settle()
    passes = [value for text, value in page.evaluate("told") if text.startswith("pass ")]
    assert passes and passes == sorted(passes) and page.evaluate("$('train-progress').max") == 8
    assert said(page, "train") == "trained is on a slider"
    assert page.evaluate("$('training').checkVisibility()") is False
    assert page.evaluate("[state.directions.trained.acts, state.directions.trained.point]") == [
        "1", "post_block",
    ]  # fmt: skip
    # The report: the margin beside those of random vectors.
    assert page.evaluate("document.querySelectorAll('#train-strip circle').length") == 9
    assert "held-out pairs" in page.evaluate("$('train-numbers').textContent")
    assert "trained" in page.evaluate("$('sliders').textContent")
    page.fill("prompts", "af")
    page.evaluate("newTerm('direction', 'trained').number = 4; showTerms()")
    page.click("#compare .run")
    plain, steered = (
        page.evaluate(f"textOf(state.compare[0].{kind})") for kind in ("plain", "steered")
    )
    assert steered.count("e") > plain.count("e")
    page.picture(PICTURES / "trained.png", "#train")


def test_a_training_is_cancelled(page: Page) -> None:
    begin(page, 100)
    page.wait("$('training').checkVisibility()")
    page.evaluate("$('train-cancel').click()")
    page.settle()
    assert said(page, "train") == "cancelled"
    assert "trained" not in page.evaluate("Object.keys(state.directions)")


def test_what_is_wrong_is_said(page: Page) -> None:
    page.fill("train-pairs", "one | two")
    page.click("#train .run")
    assert "pair 1: must be prompt | wanted | other" in said(page, "train")
    page.fill("train-pairs", LINES)
    page.click("#train .run")
    assert "needs a key" in said(page, "train") and "HTTP 403" in said(page, "train")
    page.fill("steering-key", KEY)
    page.fill("train-epochs", "1000")
    page.click("#train .run")
    assert "epochs" in said(page, "train") and "HTTP 400" in said(page, "train")
