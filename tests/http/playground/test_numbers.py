# SPDX-License-Identifier: Apache-2.0
"""The numbers of the playground are the Python client's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tests.http.server import KEY
from tests.support.browser import Page
from tests.support.playground import (
    AGAINST,
    EXACT,
    EXAMPLES,
    PICTURES,
    ROUNDED,
    client_steering,
    find,
    near,
    rows,
    said,
    steer,
)
from vllm.entrypoints.serve.steering.capture_results import pack
from vllm.entrypoints.serve.steering.client import Answer, SteeringClient
from vllm.pilot.directions import auroc, mean_difference

pytestmark = pytest.mark.long


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
        assert "dose" not in pair["plain"]
        read = {"hooks": {"post_block": "all"}, "positions": "all", "dose": True}
        answer = client.complete(
            pair["prompt"], **common, **client_steering(page), capture={"inline": read}
        )
        doses = {site: float(rows.values.max()) for site, rows in answer.rows.items()}
        point, layer = max(doses, key=lambda site: doses[site])
        number, at = pair["steered"]["dose"]
        assert at == f"{point} {layer}" and number == pytest.approx(doses[point, layer], rel=EXACT)
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
