# SPDX-License-Identifier: Apache-2.0
"""The playground in a real Chromium, against a real server: its numbers are the Python client's."""

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
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from tests.conformance.models import HIDDEN
from tests.http.server import KEY, NAME, OPTIONS, Server, save_model, serve
from tests.support.browser import SECONDS, Page, browser
from vllm.entrypoints.serve.steering.capture_results import pack
from vllm.entrypoints.serve.steering.client import Answer, SteeringClient
from vllm.pilot.directions import auroc, mean_difference

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

MARKUP = "<img src=x onerror=document.title='run'>"
"""A token of the model's; and near a module's name."""
EXAMPLES = ["I love this", "What a day", "so kind", "warm and sunny"]
AGAINST = ["I hate this", "What a mess", "so cruel", "cold and wet."]
PANELS = ("model", "find", "steer", "compare", "look", "attention", "trace")
EXACT = 1e-6
ROUNDED = 1e-5
"""How far scores of rows of norm 60 or so are apart in float32, computed in two batches."""
PICTURES = Path(__file__).parents[2] / "build" / "playground"
"""Where what the page looks like is left, for eyes."""


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tiny_models, tmp_path_factory.mktemp("playground") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([MARKUP])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (
        "--playground", "--capture-lens=logit",
        *("--capture-points", "pre_attn", "post_attn", "post_block", "q", "z"),
    )  # fmt: skip
    with serve(model, tmp_path_factory.mktemp("log") / "server.log", *options) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[SteeringClient]:
    with SteeringClient(server.url, steering_key=KEY, model=NAME) as made:
        yield made


@pytest.fixture(scope="module")
def tab() -> Iterator[Callable[[], Page]]:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with browser() as opened:
        yield opened


@pytest.fixture
def page(tab: Callable[[], Page], server: Server) -> Iterator[Page]:
    """The page, opened; nothing goes elsewhere and nothing is thrown."""
    made = tab()
    made.view(1280)
    made.open(f"{server.url}/playground")
    yield made
    assert made.requests and all(url.startswith((server.url, "blob:")) for url in made.requests)
    assert made.problems == []


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


def test_what_is_found(page: Page, client: SteeringClient) -> None:
    find(page)
    p, n = rows(client, EXAMPLES), rows(client, AGAINST)
    direction = mean_difference(p, n).numpy()
    vectors = page.evaluate("state.find.layers.map(l => [...state.directions.happy.vectors[l]])")
    near(vectors, direction)
    along = direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    scores = page.evaluate("state.find.layers.map(l => state.find.results[l].scores.examples)")
    near(scores, (p * along).sum(-1).T)
    shown = page.evaluate("state.find.layers.map(l => state.find.results[l].auroc)")
    both = [torch.from_numpy((one.astype(np.float64) * along).sum(-1)) for one in (p, n)]
    assert shown == pytest.approx(auroc(*both).tolist(), abs=EXACT)
    held = page.evaluate("state.find.layers.map(l => state.find.results[l].held)")
    left_out = []
    for layer in range(4):
        a, b = p[:, layer].astype(np.float64), n[:, layer].astype(np.float64)
        own = []
        for rows_, others, sign in ((a, b, 1), (b, a, -1)):
            means = [np.delete(rows_, i, 0).mean(0) - others.mean(0) for i in range(len(rows_))]
            own.append(
                [r @ m * sign / np.linalg.norm(m) for r, m in zip(rows_, means, strict=True)]
            )
        left_out.append(float(auroc(*(torch.tensor(one)[:, None] for one in own))[0]))
    assert held == pytest.approx(left_out, abs=EXACT)


def test_a_file_and_a_module_of_what_is_found(
    page: Page, client: SteeringClient, tmp_path: Path
) -> None:
    find(page)
    page.fill("all-layers", True)
    data = base64.b64decode(page.evaluate("base64Of(foundFile())"))
    tensors = safetensors.numpy.load(data)
    vectors = page.evaluate("state.find.layers.map(l => [...state.directions.happy.vectors[l]])")
    near([tensors[f"base.post_block.{layer}"] for layer in range(4)], vectors)
    path = tmp_path / "happy.safetensors"
    path.write_bytes(data)
    digest = client.register_module("file", path)
    # Without a key it is refused, and the page says why; the name is its text and not markup.
    page.evaluate(f"state.find.name = {json.dumps('happy')}")
    page.click("#save-module")
    assert "HTTP 403" in said(page, "find") and "needs a key" in said(page, "find")
    page.picture(PICTURES / "403.png", "#find")
    page.fill("steering-key", KEY)
    page.click("#save-module")
    assert "registered" in said(page, "find")
    assert client.modules()["happy"]["digest"] == digest
    assert page.evaluate("state.modules.happy.digest") == digest
    for name in ("file", "happy"):
        client.unregister_module(name)


def test_answers_are_the_client_s(page: Page, client: SteeringClient) -> None:
    steer(page, number=20.0)
    page.click("#add-rule")
    page.fill("prompts", "Today I went\nAda")
    page.fill("max-tokens", "12")
    page.click("#compare .run")
    pairs = page.evaluate("state.compare")
    common: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 0}
    rules = page.evaluate("rulesOf(state.rules, state.directions)")
    changed = 0
    for pair in pairs:
        texts, ids, answers = {}, {}, {}
        for kind, fields in (("plain", {}), ("steered", client_steering(page))):
            answer = client.complete(
                pair["prompt"], **common, **fields, **rules, return_token_ids=True
            )
            answers[kind], ids[kind] = answer, answer.raw["choices"][0]["token_ids"]
            texts[kind] = answer.text
            assert "".join(piece["text"] for piece in pair[kind]["pieces"]) == answer.text
            mine, theirs = pair[kind]["rules"]["happy"], answer.choices[0].rules["happy"]
            assert mine.keys() == theirs.keys()
            for what, number in theirs.items():  # null where no row was scored
                # The page asks for all at once: another batch, so rows are rounded otherwise.
                near = None if number is None else pytest.approx(number, rel=EXACT, abs=ROUNDED)
                assert mine[what] == near, what
        first = [i for i, (a, b) in enumerate(zip(*ids.values(), strict=True)) if a != b]
        assert pair["differs"] == (first[0] if first else -1)
        changed += bool(first)
    assert changed, "the direction is strong enough to be seen"
    marked = page.evaluate("document.querySelectorAll('#answers mark').length")
    assert marked == 2 * changed
    assert page.evaluate("document.querySelectorAll('#answers .lamp').length") == 4


def test_what_is_looked_at(page: Page, client: SteeringClient) -> None:
    steer(page, number=3.0)
    page.fill("look-prompt", "Today I went")
    page.fill("look-tokens", "6")
    page.fill("look-steered", True)
    page.click("#look .run")
    look = page.evaluate("({...state.look, asked: null, source: null})")
    vectors = page.evaluate("state.find.layers.map(l => [...state.directions.happy.vectors[l]])")
    along = np.array(vectors) / np.linalg.norm(vectors, axis=-1, keepdims=True)
    hooks = {"post_block": "all"}
    captures = [
        {"hooks": hooks, "positions": "all", "tokens": True},
        {"hooks": hooks, "positions": "all",
         "lens": {"name": "logit", "top_k": 5, "entropy": True}},
    ]  # fmt: skip
    answer: Answer = client.complete(
        "Today I went", max_tokens=6, temperature=0, seed=0, capture={"inline": captures},
        **client_steering(page),
    )  # fmt: skip
    got = answer.choices[0].captures["inline[0]"]
    values = np.stack([got["post_block", layer].values for layer in range(4)]).astype(np.float64)
    # The server projects in float32.
    scores = np.einsum("lnh,lh->ln", values, along)
    assert np.abs(np.array(look["scores"]) - scores).max() <= 1e-5 * np.abs(scores).max()
    asked = page.evaluate("state.look.asked.body.capture")
    same = client.complete(
        "Today I went", max_tokens=6, temperature=0, seed=0, capture=asked, **client_steering(page)
    ).choices[0]
    near(
        look["scores"], [same.captures["inline[0]"]["post_block", i].values[:, 0] for i in range(4)]
    )
    assert tuple(look["tokens"]) == got["post_block", 0].tokens
    for layer in range(4):
        lens = answer.choices[0].lenses["inline[1]"]["post_block", layer]
        mine = look["lens"][str(layer)]
        near([list(row.values()) for row in mine["logprobs"]], lens.given["top_logprobs"])
        assert [list(row.values()) for row in mine["ids"]] == lens.given["top_ids"].tolist()
        near(list(mine["entropy"].values()), lens.given["entropy"])
    for position in (3, 14):
        page.evaluate(f"detail({position})")
        details = page.evaluate(f"state.look.details[{position}]")
        norms = np.linalg.norm(values[:, position], axis=-1)
        near([details[str(layer)]["norm"] for layer in range(4)], norms)
        cosines = scores[:, position] / norms
        near([details[str(layer)]["cosine"] for layer in range(4)], cosines)
    assert page.evaluate("document.querySelectorAll('#look-detail tbody tr').length") == 4


def test_attention(page: Page, client: SteeringClient) -> None:
    page.fill("look-prompt", "Today I went")
    page.click("#attention .run")
    page.evaluate("working($('attention'), () => heads([0, 5]))")
    page.settle()
    asked = [
        {"attention": {"heads": "all", "keys": {"chosen": [0, 5]}, "give": ["mass"]}},
        {"attention": {"heads": {1: [2]}, "queries": "all_prompt", "give": ["weights"]}},
    ]
    answer = client.complete("Today I went", max_tokens=1, capture={"inline": asked})
    made = answer.choices[0].attention
    mass = [made["inline[0]"][layer].given["mass"][0, :, 0] for layer in range(4)]
    near(page.evaluate("state.heads.mass"), mass)
    page.evaluate("working($('attention'), () => pattern(1, 2))")
    page.settle()
    shown = page.evaluate("state.heads.pattern")
    assert (shown["layer"], shown["head"]) == (1, 2)
    weights = [row[0] for row in made["inline[1]"][1].weights]
    for mine, theirs in zip(shown["values"], weights, strict=True):
        assert mine[: len(theirs)] == pytest.approx(theirs.tolist(), abs=EXACT)
        assert mine[len(theirs) :] == [None] * (len(weights) - len(theirs))


def test_trace(page: Page, client: SteeringClient) -> None:
    page.fill("trace-prompt", "Rome is in the")
    page.fill("trace-clean", "Nice is in the")
    page.fill("trace-answer", "a")
    page.fill("trace-other", "Z")
    page.click("#trace .run")
    assert "56 cells" in said(page, "trace")
    fields: dict[str, Any] = {"clean": "Nice is in the", "answer": "a", "other": "Z"}
    ours = client.sweep("Rome is in the", metric="recovered", **fields)
    near(page.evaluate("state.trace.grid"), ours["grid"][0])
    near(page.evaluate("[state.trace.head.clean, state.trace.head.corrupt]"),
         [ours["clean"], ours["corrupt"]])  # fmt: skip
    page.fill("trace-answer", "two words")
    page.click("#trace .run")
    assert "answer" in said(page, "trace") and "HTTP 400" in said(page, "trace")


def test_arrays_of_all_dtypes(page: Page) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 40, generator=generator)
    values[0, :4] = torch.tensor([0.0, 6e-8, -65504.0, 1.0])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = values.to(dtype)
        packed = pack(rounded)
        got = page.evaluate(f"unpackRows({json.dumps(packed)}).map(row => [...row])")
        assert np.array_equal(np.array(got), rounded.double().numpy())
    whole = pack(torch.arange(6, dtype=torch.int32).reshape(2, 3))
    assert page.evaluate(f"[...unpack({json.dumps(whole)})]") == [0, 1, 2, 3, 4, 5]


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
    for panel in ("compare", "look", "attention"):
        page.click(f"#{panel} .run")
    page.evaluate("detail(2)")
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
    page.press("ArrowUp", 2)
    page.press("Enter")
    page.wait("state.heads.pattern && !document.querySelector('[aria-busy]')")
    assert page.evaluate("state.heads.pattern.layer") == 1
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
        features = page.evaluate("$('features').innerText")
        for flag in ("--enable-steering", "--capture-points", "--capture-lens logit"):
            assert flag in features
        for panel, flag in (
            ("steer", "--enable-steering"),
            ("attention", "--capture-points"),
            ("trace", "--steering-families"),
        ):
            assert flag in page.evaluate(f"document.querySelector('#{panel} .off').textContent")
        assert page.evaluate("document.querySelector('#attention .run').disabled") is True
        assert page.evaluate("document.querySelector('#find .off')") is None
        page.picture(PICTURES / "off.png")
        find(page)
        assert page.problems == []
