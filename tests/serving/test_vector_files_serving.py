# SPDX-License-Identifier: Apache-2.0
"""A control vector that repeng wrote, in a real engine: it acts where repeng applies it.

An off-by-one in the layer would be silent: the text changes all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support import write_repeng
from tests.support.serving import Ask, Judge, capture, prompt_of, serve
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = prompt_of(17, 70)


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        steering_modules=[f"repeng={write_repeng.FILE}"],
        capture_consumers=["inline"],
    )
    yield llm, Judge(Reference(row, models.load(row, path)))
    shut_down(llm)


def vectors(shift: int, scale: float) -> dict[str, Any]:
    """repeng's directions as vectors at the outputs of blocks, `shift` layers off."""
    layers = {
        i + shift: {"vector": v, "scale": scale} for i, v in write_repeng.directions().items()
    }
    return {"steering_vectors": {"post_block": layers}}


@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_directions_act_on_the_output_of_their_block(pair: tuple[LLM, Judge], scale: float) -> None:
    llm, judge = pair
    (output,) = serve(llm, [Ask(PROMPT, {"steering_modules": [("repeng", scale)], **capture()})])
    judge.check(Ask(PROMPT, {**vectors(0, scale), **capture()}), output)
    with pytest.raises(AssertionError, match="off by"):
        judge.check(Ask(PROMPT, {**vectors(-1, scale), **capture()}), output)
