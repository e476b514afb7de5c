# SPDX-License-Identifier: Apache-2.0
"""The rows of a large step leave in parts, each when the forward has left its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.runner import Reference
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.worker.rows.arena import PARTS, CaptureArena
from vllm.v1.interventions.worker.rows.outbox import Outbox

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}
ROOM = 24
"""Positions of which a step has room for the rows of all sites."""
ASKS = [
    Ask(prompt_of(41, 100), capture("all")),
    Ask(prompt_of(30, 101), {**STEERED, **capture("all")}),
    Ask(prompt_of(22, 102), capture("all", ("pre_attn", "post_block"), [0, 2])),
    Ask(prompt_of(19, 103), {**STEERED, **capture("all", ("post_block",), [models.LAYERS - 1])}),
    Ask(prompt_of(23, 104), capture("all_prompt", (*STREAM_POINTS, "final"), "all")),
]
ALIKE = [Ask(prompt_of(12, 110 + i), capture("all", STREAM_POINTS, "all")) for i in range(4)]


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def engine(request: Any, tiny_models: TinyModels, runner: Runner) -> Iterator[tuple[LLM, Judge]]:
    if runner == "v2" and not request.param and not torch.cuda.is_available():
        pytest.skip("torch.compile does not know Triton's interpreter")
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    llm = make_llm(
        path,
        enable_steering=True,
        capture_consumers=["inline"],
        capture_points=[*STREAM_POINTS, "final"],
        capture_buffer_bytes=ROOM * (len(STREAM_POINTS) * models.LAYERS + 1) * models.HIDDEN * 4,
        enable_prefix_caching=False,
        enforce_eager=request.param,
    )
    try:
        yield llm, Judge(Reference(row, models.load(row, path)))
    finally:
        shut_down(llm)


class Sends:
    """How many parts left in the middle of a forward, and how many after it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.early = self.late = 0
        self.goes_on: list[bool] = []
        """Whether the forward does, of those in its middle."""
        self._told = False
        wrote, send = CaptureArena.wrote, Outbox.send

        def tell(arena: Any, dest: Any) -> None:
            self._told = True
            wrote(arena, dest)
            self._told = False

        def count(outbox: Any, step: Any, captured: Any, early: bool = False) -> None:
            self.early += self._told
            self.goes_on += [early] * self._told
            self.late += not self._told
            send(outbox, step, captured, early)

        patch.setattr(CaptureArena, "wrote", tell)
        patch.setattr(Outbox, "send", count)


@pytest.mark.parametrize("asks", [ASKS, ALIKE], ids=["mixed", "alike"])
def test_parts_leave_early(
    engine: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch, asks: list[Ask]
) -> None:
    llm, judge = engine
    sends = Sends(monkeypatch)
    for ask, output in zip(asks, serve(llm, asks), strict=True):
        judge.check(ask, output)
    assert sends.early >= PARTS and sends.late, "decoding leaves in one piece, after its forward"


@pytest.mark.parametrize(("layer", "goes_on"), [(0, True), (models.LAYERS - 1, False)])
def test_a_part_alone_leaves_early_too(
    engine: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch, layer: int, goes_on: bool
) -> None:
    """As the rows of a rank that has the first half of the layers."""
    llm, judge = engine
    sends = Sends(monkeypatch)
    ask = Ask(prompt_of(41, 120), capture("all_prompt", STREAM_POINTS, [layer]))
    [output] = serve(llm, [ask])
    judge.check(ask, output)
    assert sends.goes_on == [goes_on] and not sends.late


def test_a_part_that_left_too_early_lacks_rows(
    engine: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: a part is sent when the first of its sites is there."""
    llm, judge = engine

    def at_once(arena: Any, dest: Any) -> None:
        for part in arena._pending:
            if part.missing:
                part.missing.clear()
                arena._outbox.send(part.rows, part.captured)

    monkeypatch.setattr(CaptureArena, "wrote", at_once)
    outputs = serve(llm, ALIKE)
    with pytest.raises(AssertionError, match="rows off by"):
        for ask, output in zip(ALIKE, outputs, strict=True):
            judge.check(ask, output)


def test_parts_of_a_forward_that_says_nothing(
    engine: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that runs graphs: all leave after it, and are the same."""
    llm, judge = engine
    sends = Sends(monkeypatch)
    monkeypatch.setattr(CaptureArena, "wrote", lambda *_: None)
    for ask, output in zip(ASKS, serve(llm, ASKS), strict=True):
        judge.check(ask, output)
    assert not sends.early and sends.late > len(ASKS)
