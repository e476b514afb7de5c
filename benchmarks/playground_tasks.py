# SPDX-License-Identifier: Apache-2.0
"""How many actions and milliseconds five tasks take on the playground, from the page's opening.

    python -m benchmarks.playground_tasks URL    # what `make playground` prints

An action is a click, a slider that is let go, a choice, or a text that is put into a box. It drives
a real Chromium, and prints each round, then the medians, a line a task.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from tests.support.browser import Page, browser

HAPPY = ("I love this place. It is", "What a wonderful day! I feel")
SAD = ("I hate this place. It is", "What an awful day! I feel")
ANSWERED = (
    "state.compare.length && state.compare.every((one) => one.steered.done && one.plain.done)"
)
LENS = "[...document.querySelectorAll('#look-detail .token')].length"


class Hand:
    """Does what a user does, and counts it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.actions = 0

    def seen(self, selector: str) -> bool:
        """Whether an element is there to be clicked."""
        return bool(self.page.evaluate(f"!!document.querySelector({json.dumps(selector)})"
                                       "?.checkVisibility()"))  # fmt: skip

    def click(self, selector: str) -> None:
        self.actions += 1
        self.page.click(selector)

    def put(self, box: str, text: str) -> None:
        self.actions += 1
        self.page.fill(box, text)

    def slide(self, value: float) -> None:
        """Let the first slider go."""
        self.actions += 1
        self.page.evaluate(
            "(() => { const one = document.querySelector('#sliders input');"
            f"one.value = {value}; for (const kind of ['input', 'change'])"
            "one.dispatchEvent(new Event(kind)); })()"
        )


def steer(hand: Hand, tab: Callable[[], Page]) -> bool:
    hand.slide(2)
    hand.page.wait(ANSWERED)
    return True


def make_a_direction(hand: Hand, tab: Callable[[], Page]) -> bool:
    hand.put("examples", "\n".join(HAPPY))
    hand.put("against", "\n".join(SAD))
    hand.click("#find .run")
    hand.slide(2)
    hand.page.wait(ANSWERED)
    return True


def read_a_lens(hand: Hand, tab: Callable[[], Page]) -> bool:
    hand.click("#look .run")
    if not hand.page.evaluate(LENS):
        hand.click("#look-line .token:nth-child(3)")
    hand.page.wait(LENS)
    return True


def ablate_the_strongest_head(hand: Hand, tab: Callable[[], Page]) -> bool:
    hand.click("#read-heads")
    if not hand.seen("#ablate"):
        return False
    hand.click("#ablate")
    hand.page.wait("state.heads.answers.steered.done && state.heads.answers.plain.done")
    return True


def share_a_link(hand: Hand, tab: Callable[[], Page]) -> bool:
    hand.page.evaluate("newTerm(...parted(sourcesOf()[0].value)).number = 2; showTerms()")
    if not hand.seen("#share"):
        hand.click("header summary")
    hand.click("#share")
    hand.page.wait("$('link-said').textContent")
    other = tab()
    other.open(hand.page.evaluate("location.href"))
    other.wait("document.querySelector('#sliders input')?.value === '2'")
    return True


TASKS = {
    "steer with the ready direction": steer,
    "make a direction from two texts, and steer with it": make_a_direction,
    "read a token's lens": read_a_lens,
    "find the strongest head, and ablate it": ablate_the_strongest_head,
    "share a link, and open it": share_a_link,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("url", nargs="+", help="a playground's address, with its fragment")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    took: dict[tuple[str, str], list[float]] = {}
    actions: dict[tuple[str, str], int | None] = {}
    for _ in range(args.rounds):
        for name, task in TASKS.items():
            for url in args.url:  # in turn, so that a busy moment meets all of them
                with browser() as tab:
                    hand = Hand(tab())
                    hand.page.view(1280)
                    begun = time.monotonic()
                    hand.page.open(url)
                    done = task(hand, tab)
                    took.setdefault((name, url), []).append(time.monotonic() - begun)
                    actions[name, url] = hand.actions if done else None
                print(_line(name, url, actions[name, url], took[name, url][-1:]), flush=True)
    print("medians")
    for (name, url), seconds in took.items():
        print(_line(name, url, actions[name, url], seconds))


def _line(name: str, url: str, actions: int | None, seconds: list[float]) -> str:
    said = f"{actions} actions" if actions else "not possible"
    return f"{name}: {said}, {1000 * statistics.median(seconds):.0f} ms  {url.partition('#')[0]}"


if __name__ == "__main__":
    main()
