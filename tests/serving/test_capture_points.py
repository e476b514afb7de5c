# SPDX-License-Identifier: Apache-2.0
"""An engine that steers at one point and captures at another: each tap does what its point is for,
and the start-up check, which reads where it can, is content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import engine
from tests.conformance.runner import Reference
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm.config.points import STREAM_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2("full")]

PROMPT = prompt_of(17, 140)
STEERED = {"steering_vectors": {"pre_attn": {1: vector(140)}}}


def kinds(model: Any) -> set[tuple[str, bool, bool]]:
    """(point, steers, captures) of all bound taps. Runs in the worker."""
    from vllm.model_executor.layers.residual_taps import BoundTaps

    taps = [m.taps for m in model.modules() if isinstance(vars(m).get("taps"), BoundTaps)]
    return {
        (
            point,
            vars(getattr(bound, point)).get("table") is not None,
            vars(getattr(bound, point)).get("dest") is not None,
        )
        for bound in taps
        for point in STREAM_POINTS
    }


def test_points_of_steering_and_of_capture(tiny_models: TinyModels) -> None:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    judge = Judge(Reference(row, models.load(row, path)))
    with engine(
        path,
        enable_steering=True,
        steering_points=["pre_attn"],
        capture_consumers=["inline"],
        capture_points=["post_block"],
    ) as llm:
        asks = [Ask(PROMPT, {**f, **capture("all", ["post_block"])}) for f in (STEERED, {})]
        outputs = serve(llm, asks)
        for ask, output in zip(asks, outputs, strict=True):
            judge.check(ask, output)
        rows = [output.outputs[0].capture_results["inline"].payload for output in outputs]
        assert not (rows[0]["post_block", 1].values == rows[1]["post_block", 1].values).all()
        with pytest.raises(
            ValueError, match=r"^capture\.inline\.hooks\.pre_attn: .*capture_points"
        ):
            serve(llm, [Ask(PROMPT, capture("all", ["pre_attn", "post_block"]))])
        assert set().union(*llm.apply_model(kinds)) == {
            ("pre_attn", True, False),
            ("post_attn", False, False),
            ("post_block", False, True),
        }


def test_weights_need_z(tiny_models: TinyModels) -> None:
    """They are proved by it, so an engine without it refuses them; the queries are captured."""
    asked = {"attention": {"heads": "all", "give": ["weights"]}}
    with engine(
        tiny_models.path("llama"), capture_consumers=["inline"], capture_points=["q"]
    ) as llm:
        with pytest.raises(ValueError, match="needs q and z among capture_points"):
            serve(llm, [Ask(PROMPT, {"capture": {"inline": asked}})])
        [output] = serve(llm, [Ask(PROMPT, capture("all", ["q"]))])
        assert len(output.outputs[0].capture_results["inline"].payload["q", 1]) > len(PROMPT)
