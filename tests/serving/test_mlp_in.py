# SPDX-License-Identifier: Apache-2.0
"""What the MLP reads, behind an engine: captured, steered and changed by operations, in chunks and
beside plain requests. The reference is Hugging Face, by a hook before its MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, Reference
from tests.support.serving import Ask, Judge, prompt_of, relative, serve, vector, worst_row
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

POINT, LAYER = "mlp_in", 1
POINTS = ["pre_attn", POINT]


@dataclass
class Running:
    """An engine with the point, and its judge."""

    llm: LLM
    judge: Judge


@pytest.fixture(scope="module", params=["gemma2", "gptj"])
def running(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Running]:
    """Of a block with a norm on each branch, and of one whose attention reads the same norm."""
    path, row = tiny_models.path(request.param), tiny_models.row(request.param)
    llm = make_llm(
        path,
        enable_steering=True,
        steering_points=POINTS,
        steering_families=["add", "ablate"],
        capture_consumers=["inline"],
        capture_points=POINTS,
        max_num_batched_tokens=24,
    )
    yield Running(llm, Judge(Reference(row, models.load(row, path))))
    shut_down(llm)


def reading(positions: Any = "all", layers: Any = "all") -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": {POINT: layers}, "positions": positions}}}


def rows_of(output: Any) -> dict[tuple[str, int], torch.Tensor]:
    return {site: rows.values for site, rows in output.capture_results["inline"].payload.items()}


def test_beside_others(running: Running) -> None:
    steered = {"steering_vectors": {POINT: {LAYER: vector(170)}}}
    decoded = {"decode_steering_vectors": {POINT: {0: vector(171), LAYER: vector(177)}}}
    asks = [
        Ask(prompt_of(41, 170), reading()),
        Ask(prompt_of(17, 171), steered | reading()),
        Ask(prompt_of(5, 172), decoded | reading("predicting", [0, LAYER])),
        Ask(prompt_of(5, 173)),
    ]
    outputs = serve(running.llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        running.judge.check(ask, output)
    rows = rows_of(outputs[0])
    assert len(rows) == models.LAYERS
    for (point, layer), values in rows.items():
        assert worst_row(values.roll(1, 0), values) > LEAST_MOVE
        assert relative(values, rows[point, (layer + 1) % models.LAYERS]) > LEAST_MOVE


def test_a_vector_changes_the_mlp_alone(running: Running) -> None:
    """In its layer neither what attention reads nor what skips around the MLP."""
    hooks = {"hooks": {POINT: [LAYER], "pre_attn": [LAYER, LAYER + 1]}, "positions": "all_prompt"}
    fields: dict[str, Any] = {"capture": {"inline": hooks}}
    steered = fields | {"steering_vectors": {POINT: {LAYER: vector(174)}}}
    prompt = prompt_of(9, 174)
    plain, moved = map(rows_of, serve(running.llm, [Ask(prompt, fields), Ask(prompt, steered)]))
    assert torch.allclose(plain["pre_attn", LAYER], moved["pre_attn", LAYER], rtol=1e-5, atol=1e-6)
    added = moved[POINT, LAYER] - plain[POINT, LAYER]
    assert worst_row(added, vector(174).expand_as(added)) <= READ_TOLERANCE
    assert relative(moved["pre_attn", LAYER + 1], plain["pre_attn", LAYER + 1]) > LEAST_MOVE


def test_an_operation_at_the_point(running: Running) -> None:
    direction = vector(175) / vector(175).norm()
    op = {"op": "ablate", "point": POINT, "layers": LAYER, "direction": direction}
    prompt = prompt_of(9, 175)
    asks = [
        Ask(prompt, reading("all_prompt")),
        Ask(prompt, reading("all_prompt") | {"steering": [op]}),
    ]
    plain, ablated = map(rows_of, serve(running.llm, asks))
    want = plain[POINT, LAYER] - (plain[POINT, LAYER] @ direction)[:, None] * direction
    assert worst_row(ablated[POINT, LAYER], want) <= READ_TOLERANCE
    assert relative(plain[POINT, LAYER], want) > LEAST_MOVE


def test_without_the_option_it_is_refused(tiny_models: TinyModels) -> None:
    """The class has the point; this engine does not, by default."""
    llm = make_llm(tiny_models.path("llama"), enable_steering=True, capture_consumers=["inline"])
    try:
        for option, fields in (
            ("capture_points", reading()),
            ("steering_points", {"steering_vectors": {POINT: {LAYER: vector(176)}}}),
        ):
            said = rf"{option}=\[.*\]; start it with 'mlp_in' among them"
            with pytest.raises(ValueError, match=said):
                serve(llm, [Ask(prompt_of(5, 176), fields)])
    finally:
        shut_down(llm)
