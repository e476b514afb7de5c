# SPDX-License-Identifier: Apache-2.0
"""Vectors in files, ready settings, and chats whose turns branch."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests.conformance.models import HIDDEN
from tests.http.server import Server
from tests.support.browser import Page
from tests.support.playground import MARKUP, PICTURES, find, near, said
from vllm.entrypoints.serve.steering.client import SteeringClient
from vllm.v1.steering.files import export_gguf, save
from vllm.v1.steering.gguf import read_gguf

pytestmark = pytest.mark.long

LAYERS = (1, 2)


def made_vectors(seed: int = 0) -> dict[int, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {n: generator.standard_normal(HIDDEN).astype(np.float32) for n in LAYERS}


def choose_file(page: Page, path: Path, field: str = "vector-file") -> None:
    """Choose a file as a user does, and wait until it is read."""
    box = page.call("Runtime.evaluate", expression=f"$('{field}')")["result"]["objectId"]
    page.call("DOM.setFileInputFiles", files=[str(path)], objectId=box)
    page.settle()


def direction(page: Page, name: str) -> list[list[float]]:
    """The vectors of a direction, by layer."""
    vectors = f"state.directions[{json.dumps(name)}].vectors"
    found: list[list[float]] = page.evaluate(f"{json.dumps(LAYERS)}.map((n) => [...{vectors}[n]])")
    return found


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_is_opened_steers(
    page: Page, client: SteeringClient, tmp_path: Path, kind: str
) -> None:
    vectors, path = made_vectors(), tmp_path / f"opened.{kind}"
    (export_gguf if kind == "gguf" else save)(path, {"post_block": vectors}, "tiny")
    before = len(page.requests)
    choose_file(page, path)
    assert "opened is on a slider, at layers 1, 2" in said(page, "find")
    assert len(page.requests) == before, "it is read here"
    near(direction(page, "opened"), [vectors[n] for n in LAYERS])
    page.evaluate("newTerm('direction', 'opened').number = 2.5; showTerms()")
    page.fill("prompts", "Today I went")
    page.click("#compare .run")
    steered = page.evaluate("state.compare[0].steered.pieces.map((one) => one.text).join('')")
    at = {"post_block": {n: {"vector": v, "scale": 2.5} for n, v in vectors.items()}}
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "seed": 0}
    assert steered == client.complete("Today I went", **asked, steering_vectors=at).text
    one = {"post_block": {1: at["post_block"][1]}}
    assert steered != client.complete("Today I went", **asked, steering_vectors=one).text
    # All of it is too much for a link, whose directions have one layer.
    page.evaluate("share()")
    assert "opened" in page.evaluate("$('link-said').textContent")


def test_files_of_half_precision(page: Page, tmp_path: Path) -> None:
    values = {n: torch.from_numpy(v) for n, v in made_vectors().items()}
    for dtype in (torch.float16, torch.bfloat16):
        path = tmp_path / f"half-{dtype.itemsize}-{str(dtype)[6:]}.safetensors"
        rounded = {f"base.post_block.{n}": v.to(dtype) for n, v in values.items()}
        safetensors.torch.save_file(rounded, path)
        choose_file(page, path)
        got = np.array(direction(page, path.stem))
        assert np.array_equal(got, np.stack([v.double().numpy() for v in rounded.values()]))


def test_a_gguf_file_of_what_is_found(page: Page, tmp_path: Path) -> None:
    find(page)
    page.fill("all-layers", True)
    path = tmp_path / "found.gguf"
    path.write_bytes(base64.b64decode(page.evaluate("base64Of(foundFile('gguf'))")))
    vectors = page.evaluate("state.find.layers.map(l => [...state.directions.happy.vectors[l]])")
    tensors = read_gguf(path)
    near([tensors[f"direction.{layer}"] for layer in range(4)], vectors)
    choose_file(page, path)
    near(page.evaluate("state.find.layers.map(l => [...state.directions.found.vectors[l]])"),
         vectors)  # fmt: skip
    page.evaluate("state.find.point = 'pre_attn'; showFound()")
    assert page.evaluate("$('download-gguf').disabled") is True


def tensors(**named: Any) -> bytes:
    return safetensors.numpy.save({name.replace("__", "."): one for name, one in named.items()})


ROW = np.ones(HIDDEN, np.float32)
GGUF = b"GGUF" + struct.pack("<I", 3)
REFUSED = {
    "cut": (tensors(base__post_block__1=ROW)[:-8], "truncated"),
    "empty": (b"", "cannot be read"),
    "pickle": (b"\x80\x04\x95" + b"K\x01." * 40, "header has more than 1 MiB"),
    "long-header": (struct.pack("<Q", 1 << 60) + b"{}", "header has more than 1 MiB"),
    "no-json": (struct.pack("<Q", 4) + b"}{}{", "cannot be read"),
    "nothing": (struct.pack("<Q", 2) + b"{}", "1 to 4096 are read"),
    "narrow": (tensors(base__post_block__1=ROW[:-1]), f"vectors have {HIDDEN} numbers"),
    "late": (tensors(base__post_block__4=ROW), "layers 0-3"),
    "named": (tensors(weight=ROW), "is not named base.post_block.12"),
    "phase": (tensors(prefill__post_block__1=ROW), "--steering-modules NAME=PATH"),
    "place": (tensors(base__mlp_in__1=ROW), "this server steers at"),
    "places": (
        tensors(base__post_block__1=ROW, base__pre_attn__1=ROW), "one file, one point",
    ),
    "nan": (tensors(base__post_block__1=ROW * np.nan), "not finite"),
    "int": (tensors(base__post_block__1=ROW.astype(np.int64)), "convert it"),
    "ops": (
        safetensors.numpy.save({"op.0": ROW}, {"steering_format": "2", "ops": "[]"}),
        "--steering-modules NAME=PATH",
    ),
    "gguf-cut": (GGUF + struct.pack("<QQ", 1, 5) + b"\x01", "truncated"),
    "gguf-many": (GGUF + struct.pack("<QQ", 1 << 40, 0), "more than 4096 tensors"),
    "gguf-list": (
        GGUF + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 4, 1 << 60), "truncated",
    ),
    "gguf-text": (GGUF + struct.pack("<QQQ", 0, 1, 1 << 40), "text of more than 1 MiB"),
}  # fmt: skip


def test_files_that_are_refused(page: Page, tmp_path: Path) -> None:
    """By name and with the remedy; nothing of them is kept, and nothing is asked of the server."""
    before = len(page.requests)
    for name, (content, why) in REFUSED.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        choose_file(page, path)
        told = said(page, "find")
        assert told.startswith(f"{name}.safetensors: ") and why in told, (name, told)
    assert page.evaluate("Object.keys(state.directions)") == []
    assert len(page.requests) == before
    page.evaluate("working($('find'), async () => directionIn(new Uint8Array(4)))")
    wide = page.evaluate(
        "(async () => { Object.defineProperty($('vector-file'), 'files',"
        "{ value: [{ name: 'wide', size: MOST_FILE + 1 }] });"
        "try { await openFile(); } catch (error) { return error.message; } })()"
    )
    assert "64 MiB" in wide


def test_a_preset_answers_by_one_choice(page: Page, client: SteeringClient) -> None:
    page.fill("preset", "texts French")
    page.settle()
    assert page.evaluate("$('direction-name').value") == "French"
    (term,) = page.evaluate("state.terms")
    assert (term["name"], term["number"]) == ("French", 1.5)
    vector = page.evaluate("[...state.directions.French.vectors[state.directions.French.layer]]")
    layer = page.evaluate("state.directions.French.layer")
    steering = {"post_block": {layer: {"vector": np.float32(vector), "scale": 1.5}}}
    for pair in page.evaluate("state.compare"):
        asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "seed": 0}
        plain, steered = (
            "".join(piece["text"] for piece in pair[kind]["pieces"])
            for kind in ("plain", "steered")
        )
        assert plain == client.complete(pair["prompt"], **asked).text
        wanted = client.complete(pair["prompt"], **asked, steering_vectors=steering).text
        assert steered == wanted
    page.picture(PICTURES / "preset.png", "#compare")
    # Another choice takes the first one's place.
    client.register_module("ready", {"post_block": {1: np.float32(vector)}})
    try:
        page.evaluate("refresh()")
        page.fill("preset", "module ready")
        page.settle()
        acting = page.evaluate("state.terms.filter((one) => one.on).map((one) => one.name)")
        assert acting == ["ready"]
    finally:
        client.unregister_module("ready")


TURNS = "[...document.querySelectorAll('#turns > li > .prompt')].map((one) => one.textContent)"
LAST = "[...document.querySelectorAll('#turns > li:last-child .answer')]"
LAST += ".map((a) => a.textContent.replace('∅', ''))"


def send(page: Page, text: str) -> None:
    page.fill("message", text)
    page.click("#talk .run")


def asked_by_client(client: SteeringClient, *messages: str, **fields: Any) -> str:
    roles = [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate(messages)
    ]
    return str(client.complete(roles, max_tokens=8, temperature=0, seed=0, **fields).text)


def test_a_chat_branches_at_any_turn(page: Page, client: SteeringClient) -> None:
    page.fill("max-tokens", "8")
    send(page, "One")
    first = asked_by_client(client, "One")
    assert page.evaluate(LAST) == [first]
    send(page, "Two")
    second = asked_by_client(client, "One", first, "Two")
    assert page.evaluate(LAST) == [second] and second != asked_by_client(client, "Two")
    # The first turn, edited: a branch that knows nothing of the old one.
    page.click("#turns > li:first-child .row button")
    assert page.evaluate("$('message').value") == "One"
    send(page, "Three")
    assert page.evaluate(TURNS) == ["Three"]
    assert page.evaluate(LAST) == [asked_by_client(client, "Three")]
    page.click("#turns [aria-label='branch before']")
    assert page.evaluate(TURNS) == ["One", "Two"], "all of the old branch"
    page.click("#turns [aria-label='branch after']")
    assert page.evaluate(TURNS) == ["Three"]
    assert page.evaluate("document.querySelector('[aria-label=\"branch after\"]').disabled") is True


def test_a_chat_goes_on_from_the_steered_answer(page: Page, client: SteeringClient) -> None:
    page.fill("max-tokens", "8")
    find(page)
    page.evaluate("Object.assign(newTerm('direction', 'happy'), {number: 20, layers: '1'})")
    fields = page.evaluate("steeringFields()")
    send(page, "One")
    plain, steered = asked_by_client(client, "One"), asked_by_client(client, "One", **fields)
    assert page.evaluate(LAST) == [plain, steered] and plain != steered
    send(page, "Two")
    wanted = asked_by_client(client, "One", steered, "Two", **fields)
    assert page.evaluate(LAST)[1] == wanted
    # Asked again with nothing that steers, the turn has another branch.
    page.evaluate("state.terms = []; showTerms()")
    page.click("#turns > li:last-child .row button:nth-child(2)")
    assert page.evaluate(TURNS) == ["One", "Two"]
    assert page.evaluate(LAST) == [asked_by_client(client, "One", steered, "Two")]
    assert "2 of 2" in page.evaluate("document.querySelector('#turns > li:last-child').textContent")
    page.click("#turns [aria-label='branch before']")
    assert page.evaluate(LAST)[1] == wanted
    page.picture(PICTURES / "chat.png", "#talk")


CHAT = "state.chat.turns.map((one) => [one.parent, one.text, textOf(keptOf(one))])"


def test_a_chat_in_a_link(page: Page, tab: Callable[[], Page], server: Server) -> None:
    page.fill("max-tokens", "4")
    send(page, MARKUP)
    send(page, "Two")
    page.click("#turns > li:last-child .row button:nth-child(2)")
    page.evaluate("share()")
    assert "Left out" not in page.evaluate("$('link-said').textContent")
    other = tab()
    other.open(page.evaluate("location.href"))
    assert other.evaluate(CHAT) == page.evaluate(CHAT) and len(other.evaluate(CHAT)) == 3
    assert other.evaluate(TURNS) == [MARKUP, "Two"] and other.evaluate("state.chat.at") == 2
    assert other.evaluate("document.querySelectorAll('img').length") == 0
    assert not [url for url in other.requests if "completions" in url]
    page.evaluate("state.chat.turns[0].text = 'x'.repeat(17000); share()")
    assert "the chat" in page.evaluate("$('link-said').textContent")
    other.open(page.evaluate("location.href"))
    assert other.evaluate("state.chat.turns.length") == 0
    for hostile in (
        {"turns": [[0, "a", "b"]], "at": 0},
        {"turns": [[-1, "a", 3]], "at": 5},
        {"turns": "none", "at": "__proto__"},
        {"turns": [None], "at": -1},
    ):
        code = base64.urlsafe_b64encode(json.dumps({"v": 1, "chat": hostile}).encode()).decode()
        other.open(f"{server.url}/playground#{code.rstrip('=')}")
        assert other.evaluate("[state.chat.turns.length, state.chat.at]") == [0, -1]
        assert not other.problems
