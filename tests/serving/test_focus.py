# SPDX-License-Identifier: Apache-2.0
"""Focus behind an engine: factors and shares, of some heads and of some rows, in chunks, beside
plain neighbours and with cached prefixes.

The reference is Hugging Face's attention with a bias in its mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests.conformance import models
from tests.conformance import reference as ref
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference, unread, with_heads
from tests.support.focus import ENGINE, Focusing, focused
from tests.support.serving import (
    Ask,
    capture,
    log_probs,
    prompt_of,
    row_tensors,
    same_completion,
    serve,
    worst_row,
)
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

NAMES = ["llama", "gemma2", "gpt_oss", "bloom"]
READ = capture("all", ("z", "post_block"))
TOLERANCE, LEAST_MOVE = 1e-3, 0.01


class Running(NamedTuple):
    llm: LLM
    reference: Reference
    every: dict[int, list[int]]
    """All heads of all layers."""


@pytest.fixture(scope="module", params=NAMES)
def running(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Running]:
    name = request.param
    path, row = tiny_models.path(name), tiny_models.row(name)
    llm = make_llm(
        path,
        **ENGINE,
        max_num_batched_tokens=24,
    )
    shape = llm.llm_engine.vllm_config.tap_shape
    assert shape is not None and not unread(shape)
    every = {n: list(range(layer.heads["z"][0])) for n, layer in with_heads(shape).items()}
    yield Running(llm, Reference(row, models.load(row, path)), every)
    shut_down(llm)


def entries(running: Running) -> list[list[Focusing]]:
    """What requests of 41 tokens ask for."""
    every, last = running.every, range(40, 1 << 20)
    return [
        [Focusing(every, range(20, 26), factor=8.0)],
        [Focusing(every, [3, 4, 30, 31], factor=0.001)],
        [Focusing({1: every[1]}, range(20, 26), factor=0.0), Focusing({1: [0]}, [2], factor=9.0)],
        [Focusing({0: [1], 2: [0]}, range(5, 9), factor=50.0)],
        [Focusing(every, range(20, 26), last, factor=20.0)],
        [Focusing(every, range(10, 20), share=0.5)],
        [Focusing(every, range(10, 20), share=0.4, ratio=True)],
    ]


def test_as_transformers(running: Running) -> None:
    """Every row and the answers' log-probabilities, beside a plain request that keeps its bits."""
    asked = entries(running)
    if "bloom" in str(type(running.reference.model)).lower():
        asked = asked[:5]
    prompts = [prompt_of(41, 300 + i) for i in range(len(asked) + 1)]
    plain = serve(running.llm, [Ask(p, READ) for p in prompts])
    asks = [
        Ask(prompt, {"steering": [e.request(45) for e in each], **READ})
        for prompt, each in zip(prompts, asked, strict=False)
    ]
    made = serve(running.llm, [*asks, Ask(prompts[-1], READ)])
    for prompt, each, output, before in zip(prompts, asked, made, plain, strict=False):
        rows, was = row_tensors(output.outputs[0]), row_tensors(before.outputs[0])
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        model, adapter = running.reference.model, running.reference.row.adapter
        blocks = list(model.get_submodule(adapter.blocks).children())
        with focused(model, blocks, each):
            want = ref.run(model, adapter, ids)
        for site in rows:
            exact = want.rows[site] if site in want.rows else want.heads.get(site)
            if exact is not None:
                assert worst_row(rows[site].flatten(1), exact.flatten(1)) < TOLERANCE, (each, site)
        prompt_rows = slice(0, len(prompt))
        last = max(site for site in rows if site[0] == "post_block")
        moved = worst_row(rows[last][prompt_rows], was[last][prompt_rows])
        assert moved > LEAST_MOVE, each
    assert same_completion(made[-1].outputs[0], plain[-1].outputs[0])


def only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("running", [name], indirect=True)


def focus(span: Any, **more: Any) -> dict[str, Any]:
    return {"steering": [{"op": "focus", "layers": "all", "span": span, **more}]}


@only("llama")
def test_captured_weights_are_those_that_were_used(running: Running) -> None:
    """All of them are transformers' with the bias, and not without; the span has its share."""
    read = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}
    asked = entries(running)[:7]
    prompts = [prompt_of(41, 340 + i) for i in range(len(asked))]
    asks = [
        Ask(p, {"steering": [e.request(45) for e in each], "capture": {"inline": read}})
        for p, each in zip(prompts, asked, strict=True)
    ]
    model, adapter = running.reference.model, running.reference.row.adapter
    blocks = list(model.get_submodule(adapter.blocks).children())
    for prompt, each, output in zip(prompts, asked, serve(running.llm, asks), strict=True):
        completion = output.outputs[0]
        ids = [*prompt, *completion.token_ids][:-1]
        with focused(model, blocks, each):
            want = ref.run(model, adapter, ids).heads
        plain = ref.run(model, adapter, ids).heads
        assert completion.capture_results is not None
        apart = 0.0
        for site, rows in completion.capture_results["inline"].payload.items():
            for t, weights in enumerate(rows.weights):
                assert (weights - want[site][t, :, : t + 1]).abs().max() < 1e-4
                apart = max(apart, float((weights - plain[site][t, :, : t + 1]).abs().max()))
                if each[0].share and not each[0].ratio and t >= 20:
                    mass = weights[:, 10:20].sum(-1)
                    assert mass.min() > each[0].share - 1e-4
        assert apart > 0.02


@only("llama")
def test_what_changes_nothing_keeps_its_bits(running: Running) -> None:
    """A factor of 1, and rows before the span; a query that sees nothing but the span."""
    prompt = prompt_of(41, 360)
    whole = focus({"start": 0, "stop": 30}, factor=0.0, positions={"stop": 30})
    asked = [{}, focus([3, 4], factor=1.0), focus([39], factor=9.0), whole, focus([0], factor=9.0)]
    rows = [
        row_tensors(output.outputs[0])
        for output in serve(running.llm, [Ask(prompt, {**fields, **READ}) for fields in asked])
    ]
    for site, plain in rows[0].items():
        assert torch.equal(rows[1][site], plain)
        assert torch.equal(rows[2][site][:39], plain[:39])
        assert torch.equal(rows[3][site][:30], plain[:30])
    assert not torch.equal(rows[2]["z", 0][39:41], rows[0]["z", 0][39:41])
    assert not torch.equal(rows[4]["z", 0][1:30], rows[0]["z", 0][1:30])


BLOCK, PROMPT = 32, 70
PLAIN: dict[str, Any] = {}
EARLY, LATE = focus([20, 21, 22], factor=8.0), focus([40, 41], factor=8.0)
TWO = [focus([[5, 6], [5, 6, 66], [5, 6, 67, 68], [5, 6, 40]][i], factor=8.0) for i in range(4)]


@only("llama")
@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        pytest.param(EARLY, EARLY, 64, id="the same is shared"),
        pytest.param(EARLY, PLAIN, 0, id="focused is not served to plain"),
        pytest.param(PLAIN, EARLY, 0, id="plain is not served to focused"),
        pytest.param(LATE, PLAIN, 32, id="before the span both are plain"),
        pytest.param(PLAIN, LATE, 32, id="and the other way round"),
        pytest.param(EARLY, focus([20, 21, 22], factor=9.0), 0, id="another factor"),
        pytest.param(EARLY, focus([20, 21, 22], share=0.5), 0, id="another rule"),
        pytest.param(EARLY, focus([20, 21], factor=8.0), 0, id="another span"),
        pytest.param(TWO[1], TWO[2], 64, id="spans that differ later share"),
        pytest.param(TWO[0], TWO[3], 32, id="until they differ"),
        pytest.param(
            PLAIN, focus([20], factor=8.0, positions="predicting"), 64, id="the prompt is plain"
        ),
        pytest.param(
            focus({"start": 20}, factor=8.0),
            focus({"start": 20}, factor=8.0) | {"max_tokens": 9},
            64,
            id="how far an open span may grow counts not",
        ),
    ],
)
def test_prefix_cache(
    running: Running, first: dict[str, Any], second: dict[str, Any], cached: int
) -> None:
    """What is found is what was computed with the same: the answer is that of an empty cache."""
    prompt = prompt_of(PROMPT, 370)
    assert running.llm.reset_prefix_cache()
    [alone] = serve(running.llm, [Ask(prompt, second)])
    assert running.llm.reset_prefix_cache()
    for fields in (first, first):
        [output] = serve(running.llm, [Ask(prompt, fields)])
    assert output.num_cached_tokens == 64
    [made] = serve(running.llm, [Ask(prompt, second)])
    assert made.num_cached_tokens == cached
    one, other = log_probs(made.outputs[0]), log_probs(alone.outputs[0])
    assert (one - other).abs().max() < 1e-3
    [other_way] = serve(running.llm, [Ask(prompt, first)])
    if first != second and "max_tokens" not in second:
        assert (log_probs(other_way.outputs[0])[0] - one[0]).abs().max() > 1e-3
