# SPDX-License-Identifier: Apache-2.0
"""Focus behind an engine: factors and shares, of some heads and of some rows, in chunks, beside
plain neighbours and with cached prefixes.

The reference is Hugging Face's attention with a bias in its mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.conformance import models
from tests.conformance import reference as ref
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support.focus import Focusing, focused
from tests.support.serving import (
    Ask,
    capture,
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
        enable_steering=True,
        steering_families=["add", "focus"],
        capture_consumers=["inline"],
        capture_points=["q", "z", "post_block"],
        max_num_batched_tokens=24,
    )
    shape = llm.llm_engine.vllm_config.tap_shape
    assert shape is not None and not shape.unread
    every = {layer: list(range(points["z"][0])) for layer, points in shape.heads.items()}
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
