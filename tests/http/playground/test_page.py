# SPDX-License-Identifier: Apache-2.0
"""The playground as a page: markup, links, copies, keyboard, sizes, and what a server refuses."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.models import HIDDEN
from tests.http.server import OPTIONS, Server, serve
from tests.support.browser import SECONDS, Page
from tests.support.playground import AGAINST, EXAMPLES, MARKUP, PICTURES, find, near, said, steer
from vllm.entrypoints.serve.steering.client import SteeringClient

pytestmark = pytest.mark.long


def test_markup_stays_text(page: Page, client: SteeringClient) -> None:
    name = "b.i"  # names of modules are words; those of directions are anybody's
    client.register_module(name, {"post_block": {1: np.ones(HIDDEN, np.float32)}})
    page.fill("direction-name", MARKUP)
    find(page)
    page.click("#use-found")
    page.fill("look-prompt", f"a {MARKUP} b")
    page.fill("look-tokens", "3")
    page.click("#look .run")
    page.click("#attention .run")
    page.fill("prompts", f"{MARKUP} a")
    page.click("#compare .run")
    assert MARKUP in page.evaluate("state.look.tokens")
    assert page.evaluate("document.querySelector('#look-line').textContent").count(MARKUP) == 1
    assert MARKUP in page.evaluate("document.querySelector('#terms').textContent")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert "run" not in page.evaluate("document.title").split(" · ")
    client.unregister_module(name)


def test_the_policy_stops_what_is_not_ours(page: Page) -> None:
    stopped = page.evaluate(
        "fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'stopped').then(async (what) => {"
        "const image = new Image(); image.src = 'http://127.0.0.1:1/x.png';"
        "const script = document.createElement('script'); script.textContent = 'window.ran = 1';"
        "document.body.append(image, script); await new Promise((r) => setTimeout(r, 300));"
        "return what + (window.ran ?? ''); })"
    )
    assert stopped == "stopped"
    assert len(page.problems) >= 3, "the browser said which rules"
    page.problems.clear()
    page.requests[:] = [url for url in page.requests if "127.0.0.1:1/" not in url]


def test_copies_run_and_say_the_same(page: Page, tmp_path: Path) -> None:
    steer(page, number=2.5, positions=[0, 2])
    page.evaluate("addTerm('direction', 'happy')")
    page.evaluate("Object.assign(state.terms[1], {op: 'ablate', layers: '2-3', phase: 'answer'})")
    page.fill("prompts", "Ada's \\ day")
    page.fill("temperature", "1")
    page.fill("seed", "7")
    page.click("#compare .run")
    wanted = page.evaluate("state.compare[0].steered.pieces.map(p => p.text).join('')")
    plain = page.evaluate("state.compare[0].plain.pieces.map(p => p.text).join('')")
    assert wanted and wanted != plain
    texts = {}
    for i, kind in enumerate(("curl", "Python", "openai")):
        page.click(f"#copies button:nth-child({i + 1})")
        texts[kind] = page.evaluate("$('copied').textContent")
    curl = subprocess.run(["bash", "-c", texts["curl"]], capture_output=True, check=True)
    assert json.loads(curl.stdout)["choices"][0]["text"] == wanted
    for kind in ("Python", "openai"):
        told: list[str] = []
        exec(texts[kind], {"print": told.append})
        assert told == [wanted], kind


def test_a_link_restores_the_state_and_asks_nothing(
    page: Page, tab: Callable[[], Page], server: Server
) -> None:
    steer(page, number=-1.5)
    page.click("#add-rule")
    page.fill("steering-key", "a-secret")
    page.fill("prompts", "One\nTwo ü")
    page.fill("chat", True)
    page.evaluate("state.directions.wide = {point: 'post_block', layer: 1,"
                  "vectors: {1: new Float32Array(2000).fill(1)}}")  # fmt: skip
    page.evaluate("share()")
    link = page.evaluate("location.href")
    code = link.partition("#")[2]
    said_ = json.loads(base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)))
    assert "a-secret" not in json.dumps(said_) and list(said_["directions"]) == ["happy"]
    assert "wide" in page.evaluate("$('link-said').textContent")
    other = tab()
    other.open(link)
    vector = "[...state.directions.happy.vectors[state.directions.happy.layer]]"
    near(other.evaluate(vector), page.evaluate(vector))
    for what in ("state.terms", "state.rules", "$('prompts').value", "$('chat').checked"):
        assert other.evaluate(what) == page.evaluate(what), what
    assert not [url for url in other.requests if "completions" in url or "sweep" in url]
    for bad in ("#AAAA", "#", "#find", "#eyJ2IjoyfQ", "#" + "A" * 70_000):
        other.open(server.url + "/playground" + bad)
        assert other.evaluate("state.terms.length") == 0 and not other.problems
    hostile = {
        "v": 1,
        "fields": {"prompts": MARKUP, "api-key": "stolen", "__proto__": "x", "find-point": "no"},
        "terms": [{"name": 3, "op": "__proto__", "number": "1e9"}, None, {"source": "module"}],
        "rules": {"not": "a list"},
        "directions": {"d": {"point": "post_block", "layer": 1, "data": "????"}, "e": None},
    }
    text = base64.urlsafe_b64encode(json.dumps(hostile).encode()).decode().rstrip("=")
    other.open(f"{server.url}/playground#{text}")
    assert other.evaluate("$('prompts').value") == MARKUP
    assert other.evaluate("$('api-key').value") == "" and not other.problems
    assert other.evaluate("document.querySelectorAll('img').length") == 0


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const back = rgb(getComputedStyle(node).backgroundColor);
      if (back.length < 4 || back[3] > 0) return back;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (['SCRIPT', 'STYLE', 'OPTION'].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const front = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(front)), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.tagName + '.' + node.className,
      walk.currentNode.data.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()"""


def test_two_widths_light_and_dark(page: Page) -> None:
    steer(page, number=2.0)
    page.click("#add-rule")
    for panel in ("compare", "look", "attention", "sae"):
        page.click(f"#{panel} .run")
    page.fill("message", "Hello")
    page.click("#talk .run")
    page.evaluate("detail(2)")
    page.click("#sae-top button")
    page.evaluate("working($('attention'), () => pattern(1, 2))")
    page.click("#copies button")
    page.evaluate("document.querySelector('details').open = true")
    for width in (390, 1280):
        for dark in (False, True):
            page.view(width, dark=dark)
            page.wait(f"innerWidth === {width}")
            # Both are told to the page before a frame; what they had drawn is there after it.
            page.evaluate(
                "new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
            )
            page.wait("Math.abs(document.querySelector('#look-map canvas').clientWidth -"
                      "$('look-map').clientWidth) < 2")  # fmt: skip
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            found = page.evaluate(CONTRAST)
            assert len(found) > 80
            assert found[0][0] >= 4.5, (width, dark, found[:5])
            page.picture(PICTURES / f"{width}-{'dark' if dark else 'light'}.png")
    page.evaluate("document.body.style.color = '#999'")  # the measure sees what is too faint
    assert page.evaluate(CONTRAST)[0][0] < 4.5


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(200):
        if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            return
        page.press("Tab")
    raise AssertionError(f"the keyboard does not come to {selector}")


def test_the_whole_tour_by_keyboard(page: Page) -> None:
    tab_to(page, "#examples")
    page.evaluate("document.activeElement.select()")
    page.write("\n".join(EXAMPLES))
    tab_to(page, "#against")
    page.evaluate("document.activeElement.select()")
    page.write("\n".join(AGAINST))
    tab_to(page, "#find .run")
    page.press("Enter")
    page.wait("state.find && !document.querySelector('[aria-busy]')")
    tab_to(page, "#find-bars [role=slider]")
    page.press("ArrowLeft", 4)
    assert page.evaluate("state.directions.happy.layer") == 0
    page.press("ArrowRight", 2)
    assert page.evaluate("state.directions.happy.layer") == 2
    tab_to(page, "#use-found")
    page.press("Enter")
    assert page.evaluate("document.activeElement.type") == "range"
    page.press("ArrowRight", 10)
    assert page.evaluate("state.terms[0].number") == pytest.approx(1.5)
    tab_to(page, "#terms button")
    page.press("Enter")
    page.wait("document.activeElement.matches('#terms .tokens')")
    page.press("ArrowRight", 2)
    page.press("Enter")
    page.press("ArrowRight")
    page.press(" ")
    assert page.evaluate("state.terms[0].positions") == [2, 3]
    tab_to(page, "#compare .run")
    page.press("Enter")
    page.wait("state.compare.length && !document.querySelector('[aria-busy]')")
    tab_to(page, "#look .run")
    page.press("Enter")
    page.wait("state.look && !document.querySelector('[aria-busy]')")
    tab_to(page, "#look-line .tokens")
    page.press("Home")
    page.press("ArrowRight")
    page.press("Enter")
    page.wait("state.look.details[1] && !document.querySelector('[aria-busy]')")
    tab_to(page, "#look-map canvas")
    before = page.evaluate("document.querySelector('#look-map .reading').textContent")
    page.press("ArrowLeft")
    assert page.evaluate("document.querySelector('#look-map .reading').textContent") != before
    tab_to(page, "#attention .run")
    page.press("Enter")
    page.wait("state.heads && !document.querySelector('[aria-busy]')")
    tab_to(page, "#head-map canvas")
    layer = page.evaluate("state.heads.pattern.layer")
    page.press("ArrowDown" if layer else "ArrowUp")
    page.press("Enter")
    page.wait(f"state.heads.pattern.layer === {layer - 1 if layer else 1}")
    page.settle()
    tab_to(page, "#ablate")
    page.press("Enter")
    page.wait("state.heads.answers?.steered.done && !document.querySelector('[aria-busy]')")
    tab_to(page, "#sae .run")
    page.press("Enter")
    page.wait("state.sae && !document.querySelector('[aria-busy]')")
    tab_to(page, "#sae-line .tokens")
    page.press("ArrowRight")
    page.press("Enter")
    tab_to(page, "#sae-top button")
    page.press("Enter")
    page.wait("document.activeElement.type === 'range'")
    page.press("ArrowRight")
    page.wait("state.sae.answers?.steered.done && !document.querySelector('[aria-busy]')")
    for name, text in (
        ("prompt", "Rome is"),
        ("clean", "Nice is"),
        ("answer", "a"),
        ("other", "Z"),
    ):
        tab_to(page, f"#trace-{name}")
        page.evaluate("document.activeElement.select()")
        page.write(text)
    tab_to(page, "#trace .run")
    page.press("Enter")
    page.wait("state.trace?.rate && !document.querySelector('[aria-busy]')")


@contextmanager
def cut(server: Server, after: int, die: threading.Event) -> Iterator[str]:
    """A server before the server, whose streams stop after so many bytes and break off when it
    dies."""

    class Through(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(None)

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass(self, body: bytes | None) -> None:
            kind = {"Content-Type": "application/json"}
            asked = urllib.request.Request(server.url + self.path, data=body, headers=kind)
            try:
                answer = urllib.request.urlopen(asked, timeout=300)
            except urllib.error.HTTPError as error:
                answer = error
            data = answer.read()
            self.send_response(answer.status)
            for name in ("Content-Type", "Content-Security-Policy"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            streamed = answer.headers["Content-Type"].startswith("text/event-stream")
            self.wfile.write(data[:after] if streamed else data)
            if streamed:
                self.close_connection = True
                self.wfile.flush()
                die.wait(SECONDS)
                self.connection.close()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    through = ThreadingHTTPServer(("127.0.0.1", 0), Through)
    threading.Thread(target=through.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{through.server_address[1]}"
    finally:
        through.shutdown()
        through.server_close()


def test_a_server_that_dies_within_an_answer(tab: Callable[[], Page], server: Server) -> None:
    page, die = tab(), threading.Event()
    with cut(server, 2500, die) as url:
        page.open(f"{url}/playground")
        page.evaluate("document.querySelector('#compare .run').click()")
        page.wait("state.compare[0]?.plain.pieces.length")
        die.set()
        page.settle()
        assert "broke off" in said(page, "compare")
        assert page.evaluate("state.compare[0].plain.pieces.length") > 0, "what came stays"
        assert page.evaluate("document.querySelectorAll('#answers .error').length") == 4
        page.fill("trace-prompt", "Rome is")
        page.fill("trace-clean", "Nice is")
        page.fill("trace-answer", "a")
        page.fill("trace-other", "Z")
        page.click("#trace .run")
        assert "broke off" in said(page, "trace")
        page.picture(PICTURES / "dies.png", "#compare")
    page.click("#compare .run")
    assert "does not answer" in said(page, "compare")
    assert page.evaluate("document.querySelector('#compare .run').disabled") is False


def test_a_400_shows_its_field(page: Page) -> None:
    steer(page, number=1e60)
    page.click("#compare .run")
    assert "steering_vectors.post_block.1.scale: must be finite" in said(page, "compare")
    assert "HTTP 400" in said(page, "compare")
    page.picture(PICTURES / "400.png", "#compare")
    page.evaluate("Object.assign(state.terms[0], {number: 1, layers: '9'})")
    page.click("#compare .run")
    assert "layers are 0-3" in said(page, "compare")


def test_what_is_off_says_its_flag(
    tab: Callable[[], Page], model: Path, tmp_path: Path, client: SteeringClient
) -> None:
    without = ("--enable-steering", "--steering-families", "--capture-consumers=inline")
    base, skip = [], False
    for option in OPTIONS:
        skip = option == "--steering-families" or (skip and not option.startswith("--"))
        if not skip and option not in without:
            base.append(option)
    page = tab()
    capture = ("--playground", "--capture-consumers=inline")
    with serve(model, tmp_path / "log", *capture, base=tuple(base)) as server:
        page.open(f"{server.url}/playground")
        features = page.evaluate("$('features').textContent")
        for flag in ("--enable-steering", "--capture-points", "--capture-lens logit"):
            assert flag in features
        for panel, flag in (
            ("steer", "--enable-steering"),
            ("train", "--steering-train"),
            ("attention", "--capture-points"),
            ("trace", "--steering-families"),
        ):
            assert flag in page.evaluate(f"document.querySelector('#{panel} .off').textContent")
        assert page.evaluate("document.querySelector('#attention .run').disabled") is True
        assert page.evaluate("document.querySelector('#find .off')") is None
        assert "--features NAME=PATH@POINT.LAYER" in features
        for hidden in ("#sae", "a[href='#sae']"):
            assert page.evaluate(f"document.querySelector({json.dumps(hidden)}).hidden") is True
        page.picture(PICTURES / "off.png")
        find(page)
        assert page.problems == []
