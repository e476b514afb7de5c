# SPDX-License-Identifier: Apache-2.0
"""The panel Features: activations, and an answer with a feature set, are the Python client's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.browser import Page
from tests.support.playground import EXACT, MARKUP, PICTURES, said
from vllm.entrypoints.serve.steering.client import SteeringClient

pytestmark = pytest.mark.long

PROMPT = "Today I went"
COMMON: dict[str, Any] = {"temperature": 0, "seed": 0}
SLIDER = "document.querySelector('#sae-one input')"


def read(page: Page) -> dict[str, Any]:
    """What the panel has of a prompt and six tokens of its answer."""
    page.fill("look-prompt", PROMPT)
    page.fill("look-tokens", "6")
    page.fill("max-tokens", "8")
    page.click("#sae .run")
    assert page.evaluate("!!state.sae"), said(page, "sae")
    made: dict[str, Any] = page.evaluate("({...state.sae, asked: null})")
    return made


def let_go(page: Page, value: str) -> None:
    """Move the slider to a value, an expression, and let it go."""
    page.evaluate(f"(() => {{ const s = {SLIDER}; s.value = {value}; for (const kind of"
                  " ['input', 'change']) s.dispatchEvent(new Event(kind)); })()")  # fmt: skip
    page.settle()


def label(page: Page, text: str) -> str:
    """Give the panel a file of labels, and return what it says."""
    page.evaluate(
        f"(() => {{ const all = new DataTransfer(), text = {json.dumps(text)};"
        "all.items.add(new File([text], 'labels.json')); $('sae-labels').files = all.files;"
        " $('sae-labels').dispatchEvent(new Event('change')); })()"
    )
    page.settle()
    return said(page, "sae")


def test_activations_are_the_clients(page: Page, client: SteeringClient) -> None:
    shown = read(page)
    asked = {"features": {"name": "made", "top": 32}, "positions": "all"}
    answer = client.complete(PROMPT, max_tokens=6, capture={"inline": asked}, **COMMON)
    made = answer.choices[0].features["inline"]["post_block", 1]
    assert len(shown["tops"]) == len(shown["tokens"]) == len(made.given["top_ids"]) > len(PROMPT)
    assert shown["active"] == made.given["active"].tolist()
    for top, ids, values in zip(
        shown["tops"], made.given["top_ids"], made.given["top_values"], strict=True
    ):
        there = ids >= 0
        assert [number for number, _ in top] == ids[there].tolist() and len(top) > 1
        np.testing.assert_allclose([value for _, value in top], values[there], rtol=EXACT)
    assert shown["at"] == len(PROMPT) - 1
    first = "Number(document.querySelector('#sae-top button').textContent)"
    assert page.evaluate(first) == shown["tops"][shown["at"]][0][0]
    page.evaluate("document.querySelectorAll('#sae-line .token')[2].click()")
    assert page.evaluate(first) == shown["tops"][2][0][0]
    assert len({top[0][0] for top in shown["tops"]}) > 1


@pytest.mark.parametrize("phase", ["answer", "all"])
def test_an_answer_with_a_feature_set(page: Page, client: SteeringClient, phase: str) -> None:
    shown = read(page)
    number, most = shown["tops"][shown["at"]][0]
    page.click("#sae-top button")
    assert page.evaluate("state.sae.chosen") == number
    assert page.evaluate(f"document.activeElement === {SLIDER}")
    if phase == "all":
        page.evaluate("(() => { const s = document.querySelector('#sae-one select');"
                      " s.value = 'all'; s.dispatchEvent(new Event('change')); })()")  # fmt: skip
        page.settle()
    let_go(page, f"{SLIDER}.max")
    value = page.evaluate(f"Number({SLIDER}.value)")
    assert value >= 4 * most * (1 - EXACT)
    op = {"op": "feature", "features": "made", "id": number, "value": value}
    op["positions"] = {"answer": "all_generated", "all": "all"}[phase]
    texts = page.evaluate(
        "['plain', 'steered'].map((kind) => state.sae.answers[kind].pieces)"
        ".map((pieces) => pieces.map((piece) => piece.text).join(''))"
    )
    want = [
        client.complete(PROMPT, max_tokens=8, **COMMON, **fields).text
        for fields in ({}, {"steering": [op]})
    ]
    assert texts == want and want[0] != want[1]
    assert "null" not in page.evaluate("$('sae').textContent")
    marked = page.evaluate("document.querySelectorAll('#sae-answers mark').length")
    assert marked == 2


def test_labels_are_somebodys_text(page: Page) -> None:
    shown = read(page)
    number = shown["tops"][shown["at"]][0][0]
    assert "1 labels" in label(page, json.dumps({str(number): MARKUP, "x": "y", "7": 3}))
    assert page.evaluate("document.querySelector('#sae-top').textContent").count(MARKUP) == 1
    page.click("#sae-top button")
    assert MARKUP in page.evaluate("$('sae-one').textContent")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.title.includes('run')") is False
    assert "is no JSON" in label(page, "{")
    for none in ("{}", "[]", "null", '{"__proto__": "x"}', '{"1e3": "x"}'):
        assert "has no labels" in label(page, none), none
    assert MARKUP in page.evaluate("$('sae-one').textContent"), "a bad file changes nothing"
    assert "more than 8 MiB" in label(page, " " * ((8 << 20) + 1))


def test_the_panel_in_pictures(page: Page) -> None:
    shown = read(page)
    numbers = [number for number, _ in shown["tops"][shown["at"]][:3]]
    texts = ("words of cooking", "a name that is long enough to be broken into lines", "dates")
    label(page, json.dumps(dict(zip(map(str, numbers), texts, strict=True))))
    page.click("#sae-top button")
    let_go(page, f"{SLIDER}.max")
    for width in (390, 1280):
        for dark in (False, True):
            page.view(width, dark=dark)
            page.wait(f"innerWidth === {width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.picture(PICTURES / f"features-{width}-{'dark' if dark else 'light'}.png", "#sae")
