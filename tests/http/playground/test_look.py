# SPDX-License-Identifier: Apache-2.0
"""What Look, Attention and Trace show by themselves: a token's values, the strongest head, which a
click ablates, and heads in place of positions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.support.browser import Page
from tests.support.playground import EXACT, PICTURES, find, near, said
from vllm.entrypoints.serve.steering.client import SteeringClient

pytestmark = pytest.mark.long

PROMPT = "Today I went"
HEADS_FLAG = "--steering-points"


def look(page: Page) -> dict[str, Any]:
    page.fill("look-prompt", PROMPT)
    page.fill("look-tokens", "6")
    page.click("#look .run")
    looked: dict[str, Any] = page.evaluate("({...state.look, asked: null, source: null})")
    return looked


def test_a_token_is_chosen_by_itself(page: Page) -> None:
    find(page)
    looked = look(page)
    row = looked["layers"].index(page.evaluate("state.directions.happy.layer"))
    sizes = np.abs(looked["scores"][row][: looked["prompt"]])
    assert looked["at"] == 1 + int(sizes[1:].argmax())
    assert list(looked["details"]) == [str(looked["at"])], "no other token was asked for"
    shown = page.evaluate(
        "[...document.querySelectorAll('#look-detail tbody tr')].map((row) =>"
        "[...row.children].map((one) => one.textContent))"
    )
    assert len(shown) == 4 and all(float(norm) > 0 for _, norm, *_ in shown)
    assert all(abs(float(cosine)) <= 1 for _, _, cosine, *_ in shown)
    asked = [url for url in page.requests if url.endswith("completions")]
    assert len(asked) == 3, "the texts of Find, the tokens, and one token's rows"


def test_the_first_token_is_off_the_scale(page: Page) -> None:
    assert page.evaluate("boundOfTokens([[900, -3, 2], [800, 1, null]])") == 3
    assert page.evaluate("boundOfTokens([[900], [800]])") == 900


def test_a_token_s_lens_is_there_when_it_is_passed_over(page: Page) -> None:
    looked = look(page)
    other = 2 if looked["at"] != 2 else 3
    word = "document.querySelector('#look-detail code').textContent"
    assert page.evaluate(word) == looked["tokens"][looked["at"]]
    page.evaluate(
        f"document.querySelectorAll('#look-line .token')[{other}].dispatchEvent("
        "new MouseEvent('mouseenter'))"
    )
    page.wait(f"{word} === {json.dumps(looked['tokens'][other])}")
    below = page.evaluate(
        "$('look-detail').getBoundingClientRect().top - "
        "$('look-line').getBoundingClientRect().bottom"
    )
    assert 0 <= below < 60, "it is read below the tokens"


def test_words_are_whole(page: Page) -> None:
    """Of labels; only what is longer than any word is cut."""
    long, longer = "internationalisation", "x" * 40
    assert page.evaluate(f"oneLine({json.dumps(long)})") == long
    assert page.evaluate(f"oneLine({json.dumps(longer)})") == "x" * 23 + "…"
    fits = (
        "(() => { const pen = document.createElement('canvas').getContext('2d');"
        f"const {{ left, foot }} = marginsOf(pen, ['a', {json.dumps(long)}], "
        f"['a', {json.dumps(long)}]); const wide = pen.measureText({json.dumps(long)}).width;"
        "return [left >= wide, foot >= wide * 0.86, left < wide + 20]; })()"
    )
    assert page.evaluate(fits) == [True, True, True]


def test_bars_stand_on_chance(page: Page) -> None:
    """The bars of 0.75 and of 0.25 are as high, above and below the line of 0.5."""
    drawn = page.evaluate(
        "(() => { $('found').hidden = false; const place = $('find-bars');"
        "const heights = (bars) => {"
        "layerBars(place, 'made', [0, 1, 2], bars, null, ['bars'], 0, () => {});"
        "const boxes = [...place.querySelectorAll('.bar')].map((one) => [Number("
        "one.getAttribute('y')), Number(one.getAttribute('height'))]);"
        "return [boxes, place.querySelectorAll('.legend').length]; };"
        "return [heights([0.75, 0.25, 0.5]), heights([0.75, 1, 0.5])]; })()"
    )
    (mixed, legends), (above, _) = drawn
    assert legends == 1
    assert mixed[0][1] == pytest.approx(mixed[1][1]) and mixed[0][1] > 20
    assert mixed[0][0] + mixed[0][1] == pytest.approx(mixed[1][0]), "both touch the line"
    assert mixed[2][1] == 0.5
    assert above[1][1] == pytest.approx(2 * above[0][1]) and above[1][0] == 8, "1 is the top"


def test_the_strongest_head_first(page: Page, client: SteeringClient) -> None:
    page.fill("look-prompt", PROMPT)
    page.click("#attention .run")
    heads = page.evaluate("({...state.heads})")
    keys = list(range(1, len(PROMPT) - 1))
    assert heads["keys"] == keys
    asked = {"attention": {"heads": "all", "keys": {"chosen": keys}, "give": ["peak", "mass"]}}
    answer = client.complete(PROMPT, max_tokens=1, capture={"inline": asked})
    made = answer.choices[0].attention["inline"]
    peaks = np.array([made[layer].given["peak"][0, :, 0] for layer in range(4)])
    near(heads["mass"], peaks)
    first = np.unravel_index(int(peaks.argmax()), peaks.shape)
    assert heads["top"][0] == [int(i) for i in first]
    strengths = [peaks[r, c] for r, c in heads["top"]]
    assert strengths == sorted(peaks.ravel(), reverse=True)[:6]
    assert [heads["pattern"]["layer"], heads["pattern"]["head"]] == heads["top"][0]
    pressed = "[...$('head-top').querySelectorAll('button')].map((b) => b.ariaPressed)"
    assert page.evaluate(pressed) == ["true"] + ["false"] * 5
    # Scaled to what is there: the legend ends at the largest.
    ends = page.evaluate("document.querySelector('#head-map .legend').textContent")
    assert f"{peaks.max():.3f}" in ends and "1.00" not in ends
    # A marked token alone: what its heads give it, added up.
    page.evaluate("document.querySelectorAll('#head-keys .token')[0].click()")
    page.settle()
    assert page.evaluate("state.heads.keys") == [0]
    one = {"attention": {"heads": "all", "keys": {"chosen": [0]}, "give": ["mass"]}}
    answer = client.complete(PROMPT, max_tokens=1, capture={"inline": one})
    made = answer.choices[0].attention["inline"]
    near(page.evaluate("state.heads.mass"), [made[i].given["mass"][0, :, 0] for i in range(4)])
    page.click("#head-top button:nth-child(2)")
    assert page.evaluate(pressed)[:3] == ["false", "true", "false"]


def test_a_head_is_ablated_by_a_click(page: Page, client: SteeringClient) -> None:
    page.fill("look-prompt", PROMPT)
    page.click("#attention .run")
    layer, head = page.evaluate("[state.heads.pattern.layer, state.heads.pattern.head]")
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "seed": 0}
    plain = client.complete(PROMPT, **asked).text
    without = {"op": "scale", "point": "z", "heads": {layer: [head]}, "factor": 0.0}
    wanted = client.complete(PROMPT, **asked, steering=[without]).text
    texts = (
        "[...document.querySelectorAll('#head-answers .answer')]"
        ".map((one) => one.textContent.replace('∅', ''))"
    )
    page.click("#ablate")
    assert page.evaluate(texts) == [plain, wanted]
    assert page.evaluate("$('ablate').textContent") == f"Put back head {head} of layer {layer}"
    assert f"{layer}.{head} head" in page.evaluate("$('terms').textContent")
    page.picture(PICTURES / "ablated.png", "#attention")
    # The terms act elsewhere, too: the answers of Steer are without the head.
    page.fill("prompts", PROMPT)
    page.click("#compare .run")
    steered = "state.compare[0].steered.pieces.map((one) => one.text).join('')"
    assert page.evaluate(steered) == wanted
    kept = page.evaluate("restore(readLink('#' + asLink().code)) && state.terms")
    assert [(one["source"], one["name"]) for one in kept] == [("head", f"{layer}.{head}")]
    page.click("#ablate")
    assert page.evaluate(texts) == [plain, plain] and "the same" in said(page, "attention")
    assert page.evaluate("state.terms") == []
    page.evaluate("state.shape.steering_points = ['post_block']; showAblate()")
    assert page.evaluate("$('ablate').disabled") is True
    assert HEADS_FLAG in page.evaluate("$('ablate-off').textContent")


def test_a_trace_of_heads(page: Page, client: SteeringClient) -> None:
    assert "z" in page.evaluate("[...$('trace-point').options].map((one) => one.value)")
    for name, text in (
        ("prompt", "Rome is"),
        ("clean", "Nice is"),
        ("answer", "a"),
        ("other", "Z"),
        ("point", "z"),
    ):
        page.fill(f"trace-{name}", text)
    page.click("#trace .run")
    fields: dict[str, Any] = {"clean": "Nice is", "answer": "a", "other": "Z", "points": ["z"]}
    ours = client.sweep("Rome is", metric="recovered", **fields)
    assert said(page, "trace").startswith(f"{ours['cells']} cells")
    grid = page.evaluate("state.trace.grid")
    assert np.array(grid).shape == (4, len(ours["heads"]))
    assert np.array(grid) == pytest.approx(np.array(ours["grid"][0]), abs=EXACT)
    page.fill("trace-point", "post_block")
    page.click("#trace .run")
    assert np.array(page.evaluate("state.trace.grid")).shape == (4, len("Rome is"))
