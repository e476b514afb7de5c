# SPDX-License-Identifier: Apache-2.0
"""The page's first view: a slider that answers when it is let go, at both widths; what to do when
something fails; and nothing that was typed is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.playground import register
from tests.http.server import Server
from tests.support.browser import Page
from tests.support.playground import AGAINST, EXAMPLES, PICTURES, said
from vllm.entrypoints.serve.steering.client import SteeringClient

pytestmark = pytest.mark.long

NAME = "ready"
TEXTS: dict[str, str | bool] = {
    "examples": "\n".join(EXAMPLES),
    "against": "\n".join(AGAINST),
    "direction-name": NAME,
}
STRONG = 3.0


@pytest.fixture
def ready(client: SteeringClient) -> Iterator[str]:
    """A module that the demo registers when it starts."""
    made = register(client, TEXTS)
    yield made
    client.unregister_module(made)


@pytest.fixture
def opened(tab: Callable[[], Page], server: Server, ready: str) -> Iterator[Page]:
    page = tab()
    page.view(1280)
    page.open(f"{server.url}/playground")
    yield page
    assert page.problems == []


def let_go(page: Page, *values: float) -> None:
    """Move the first slider through values without waiting, then wait for the answers."""
    page.evaluate(
        "(() => { const one = document.querySelector('#sliders input');"
        f"for (const value of {json.dumps(values)}) {{ one.value = value;"
        "for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind)); } })()"
    )
    page.settle()


def answers(page: Page) -> list[tuple[str, str]]:
    """(plain, steered) of each prompt, as the page shows them."""
    return [
        (plain, steered)
        for plain, steered in page.evaluate(
            "[...document.querySelectorAll('#answers .pair')].map((pair) =>"
            "[...pair.querySelectorAll('.answer')].map((one) => one.textContent.replace('∅', '')))"
        )
    ]


def asked_by_client(client: SteeringClient, prompt: str, **fields: Any) -> str:
    return str(client.complete(prompt, max_tokens=24, temperature=0, seed=0, **fields).text)


def test_a_slider_answers_when_it_is_let_go(opened: Page, client: SteeringClient) -> None:
    assert opened.evaluate("state.terms.length") == 0
    assert not [url for url in opened.requests if "completions" in url], "nothing was asked yet"
    let_go(opened, STRONG)
    prompts = opened.evaluate("lines($('prompts').value)")
    wanted = [
        (asked_by_client(client, p), asked_by_client(client, p, steering_modules=[(NAME, STRONG)]))
        for p in prompts
    ]
    assert answers(opened) == wanted
    assert all(plain != steered for plain, steered in wanted)
    assert opened.evaluate("document.querySelector('#terms input[type=range]').value") == "3"
    let_go(opened, 0.0)
    assert answers(opened) == [(plain, plain) for plain, _ in wanted]
    opened.fill("prompts", prompts[0])
    let_go(opened, -STRONG)
    other = asked_by_client(client, prompts[0], steering_modules=[(NAME, -STRONG)])
    assert answers(opened) == [(wanted[0][0], other)] and other != wanted[0][1]
    assert opened.evaluate("state.terms.length") == 1


def test_the_last_of_several_wishes_is_answered(opened: Page, client: SteeringClient) -> None:
    let_go(opened, -STRONG, 1.0, STRONG)
    prompt = opened.evaluate("lines($('prompts').value)[0]")
    wanted = asked_by_client(client, prompt, steering_modules=[(NAME, STRONG)])
    assert answers(opened)[0][1] == wanted
    assert "differ" in said(opened, "compare")


def test_a_slider_by_keyboard(opened: Page, client: SteeringClient) -> None:
    """Each arrow is a wish; the focus stays."""
    opened.evaluate("document.querySelector('#sliders input').focus()")
    opened.press("ArrowRight", 12)
    opened.settle()
    assert opened.evaluate("document.activeElement.matches('#sliders input')") is True
    assert opened.evaluate("state.terms[0].number") == STRONG
    prompt = opened.evaluate("lines($('prompts').value)[0]")
    wanted = asked_by_client(client, prompt, steering_modules=[(NAME, STRONG)])
    assert answers(opened)[0][1] == wanted


HOLD = (
    "(() => { const real = window.fetch; window.held = []; window.fetch = (...asked) =>"
    "new Promise((done) => held.push(() => done(real(...asked)))); })()"
)
"""Requests wait until the test calls what is in `held`."""


def test_a_wish_that_ends_early_leaves_the_next_one_alone(opened: Page) -> None:
    opened.fill("prompts", "One")
    opened.evaluate(HOLD)
    for _ in range(2):
        opened.evaluate("void answer()")
    opened.wait("held.length === 2")
    opened.evaluate("held.splice(0).forEach((go) => go())")
    opened.wait("held.length === 2")  # the first one has ended, the second one runs
    assert opened.evaluate("$('stop').hidden") is False
    assert opened.evaluate("$('compare').getAttribute('aria-busy')") == "true"
    opened.evaluate("held.splice(0).forEach((go) => go())")
    opened.settle()
    assert opened.evaluate("$('stop').hidden") is True and "differ" in said(opened, "compare")


def test_scales_side_by_side(opened: Page, client: SteeringClient) -> None:
    let_go(opened, 1.0)
    opened.click("#scales")
    shown = opened.evaluate(
        "[...document.querySelectorAll('#answers .scales > div')].map((one) => [one.querySelector("
        "'small').textContent, one.querySelector('.answer').textContent.replace('∅', '')])"
    )
    prompt = opened.evaluate("lines($('prompts').value)[0]")
    wanted = [
        [f"{NAME} {k}", asked_by_client(client, prompt, steering_modules=[(NAME, float(k))])]
        for k in (-4, -2, 0, 2, 4)
    ]
    assert shown == wanted and len({text for _, text in wanted}) > 2
    assert wanted[2][1] == asked_by_client(client, prompt)
    assert opened.evaluate("state.terms.map((one) => one.number)") == [1.0]
    for width in (1280, 390):
        opened.view(width, 844)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_both_answers_are_asked_for_at_once(opened: Page) -> None:
    """No answer waits for another: all requests are sent before one is answered."""
    opened.evaluate(HOLD)
    opened.evaluate("document.querySelector('#compare .run').click()")
    opened.wait("held.length === 2 * lines($('prompts').value).length")
    opened.evaluate("held.forEach((go) => go())")
    opened.settle()
    assert all(plain == steered for plain, steered in answers(opened))


IN_VIEW = """((...names) => names.map((name) => {
  const box = document.querySelector(name).getBoundingClientRect();
  return box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
}))"""


def test_the_first_view_at_two_widths(opened: Page) -> None:
    let_go(opened, STRONG)
    seen = ("#prompts", "#sliders input", "#answers li:first-child .pair", "#look-prompt")
    asked = ", ".join(map(json.dumps, seen))
    for dark in (False, True):
        opened.view(1280, 720, dark=dark)
        opened.evaluate("scrollTo(0, 0)")
        assert opened.evaluate(f"{IN_VIEW}({asked})") == [True, True, True, False]
        opened.picture(PICTURES / f"first-1280-{'dark' if dark else 'light'}.png", "#compare")
        opened.view(390, 600, dark=dark)
        # Wherever the answers are on a phone, the slider is below them.
        for place in ("#prompts", "#answers li:last-child"):
            opened.evaluate(
                f"document.querySelector({json.dumps(place)}).scrollIntoView({{block: 'center'}})"
            )
            assert opened.evaluate(f"{IN_VIEW}('#sliders input', '#look-prompt')") == [True, False]
        assert opened.evaluate("document.documentElement.scrollWidth") <= 390
        opened.picture(PICTURES / f"first-390-{'dark' if dark else 'light'}.png", "#compare")
    opened.evaluate("$('sliders').style.position = 'static'")  # the measure sees what is away
    opened.evaluate("$('prompts').scrollIntoView({block: 'center'})")
    assert opened.evaluate(f"{IN_VIEW}('#sliders input')") == [False]


def test_the_inventory_is_behind_a_line(opened: Page) -> None:
    assert opened.evaluate("$('features').checkVisibility()") is False
    line = opened.evaluate("$('model-line').textContent")
    assert "layers 4" in line and "off: operations" in line
    opened.click("#inventory summary")
    assert opened.evaluate("$('features').checkVisibility()") is True


def test_find_puts_its_direction_on_a_slider(tab: Callable[[], Page], server: Server) -> None:
    page = tab()
    page.view(1280)
    page.open(f"{server.url}/playground")
    assert page.evaluate("document.querySelectorAll('#sliders input').length") == 0
    page.click("#sliders button")
    assert page.evaluate("document.querySelector('#sliders .slide').textContent") == "happy0"
    page.evaluate("state.directions.happy.layer = 1")
    let_go(page, 4.0)
    assert all(plain != steered for plain, steered in answers(page))
    assert page.problems == []


def test_nothing_typed_is_lost(opened: Page) -> None:
    opened.fill("api-key", "a-secret")
    opened.fill("temperature", "0.5")
    opened.evaluate(
        "$('prompts').value = 'Typed, and not sent';"
        "$('prompts').dispatchEvent(new Event('input', {bubbles: true}))"
    )
    let_go(opened, 2.0)
    opened.wait("history.state?.code === asLink().code")
    code = opened.evaluate("atob(history.state.code.replace(/-/g, '+').replace(/_/g, '/'))")
    assert "Typed, and not sent" in code and "a-secret" not in code
    opened.requests.clear()
    opened.evaluate("window.before = true")
    opened.call("Page.reload")
    opened.wait("!window.before && document.body?.dataset.ready === 'true'")
    assert opened.evaluate("$('prompts').value") == "Typed, and not sent"
    assert opened.evaluate("$('temperature').value") == "0.5"
    assert opened.evaluate("document.querySelector('#sliders input').value") == "2"
    assert not [url for url in opened.requests if "completions" in url]


def refuse(page: Page, answered: str) -> None:
    """Have the page's requests end with a promise, until `window.fetch` is `window.real` again."""
    page.evaluate(f"window.real = window.fetch; window.fetch = async () => {answered}; 0")


def test_a_failure_says_what_to_do_and_offers_it(opened: Page) -> None:
    opened.fill("prompts", "Kept")
    refuse(opened, "{ throw new TypeError('gone'); }")
    opened.click("#compare .run")
    assert "does not answer" in said(opened, "compare")
    assert "is kept" in said(opened, "compare")
    opened.picture(PICTURES / "gone.png", "#compare")
    opened.evaluate("window.fetch = window.real; 0")
    opened.click("#compare .said button")
    assert "answers differ" in said(opened, "compare") and answers(opened)[0][0]
    assert opened.evaluate("$('prompts').value") == "Kept"

    for message, box in (
        ("Unauthorized", "api-key"),
        ("steering: the steering key is needed", "steering-key"),
    ):
        error = json.dumps(json.dumps({"error": {"message": message, "param": None}}))
        refuse(opened, f"new Response({error}, {{status: 401}})")
        opened.click("#compare .run")
        opened.evaluate("document.querySelector('#compare .said button').click()")
        assert opened.evaluate("document.activeElement.id") == box
        assert opened.evaluate(f"$('{box}').checkVisibility()") is True
        opened.evaluate("window.fetch = window.real; 0")

    opened.fill("max-tokens", "100000")
    opened.click("#compare .run")
    assert "HTTP 400" in said(opened, "compare"), said(opened, "compare")
    opened.evaluate("document.querySelector('#compare .said button').click()")
    assert opened.evaluate("document.activeElement.id") == "max-tokens"
    assert opened.evaluate("$('max-tokens').checkVisibility()") is True
