# SPDX-License-Identifier: Apache-2.0
"""`project` without an engine: what a request may say, and the streams that it gets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.plans import BF16, HIDDEN, SHAPE, config_of, plan_of
from tests.support.projections import SPECS, matrix, parse
from vllm.config.capture import PROJECTION_ROWS, CaptureConfig
from vllm.v1.capture import CapturedRows
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.registry import ConsumerSpec
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import check_global, parse_capture
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.makings import AsIs, Scores
from vllm.v1.interventions.shape import TapShape
from vllm.v1.steering.modules import parse_module

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("k", [1, HIDDEN])
def test_forms_mean_the_same(k: int) -> None:
    given_as = matrix(k, seed=1).half()
    forms = [
        given_as,
        given_as.double().numpy(),
        given_as.tolist(),
        list(given_as.float()),
    ]
    if k == 1:  # one row is a matrix
        at = np.array([0])
        captured = CapturedRows(at, at, given_as, at)
        forms += [given_as[0], given_as[0].tolist(), given_as[0].numpy(), captured]
    plans = [parse(inline={"project": form}) for form in forms]
    [digest] = plans[0].projections
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].projections[digest] == given_as.float().numpy().tobytes()
    [stream] = plans[0].streams
    assert (stream.width, stream.dtype, stream.making) == (k, "float32", Scores((digest,), k))
    other = parse(inline={"project": given_as * 2})
    assert list(other.projections) != [digest]


def test_one_stream_for_each_matrix() -> None:
    one, two = matrix(2, seed=1), matrix(3, seed=2)
    plan = parse(
        inline={"project": one, "hooks": {"post_block": [0, 2]}, "positions": "last_prompt"},
        one={"project": two, "hooks": {"pre_attn": [1]}, "positions": [0]},
        two={"project": one, "hooks": {"post_block": [2, 3]}, "positions": [1]},
    )
    assert [s.width for s in plan.streams] == [2, 3]
    assert [plan.consumers[name].streams for name in SPECS] == [(0,), (1,), (0,)]
    assert plan.streams[0].sites == tuple(("post_block", n) for n in (0, 2, 3))
    assert plan.streams[1].sites == (("pre_attn", 1),)
    assert plan.sites == [("post_block", 0), ("pre_attn", 1), ("post_block", 2), ("post_block", 3)]
    assert len(plan.projections) == 2
    raw = parse(inline={}, one={"project": one})
    assert [s.making == AsIs() for s in raw.streams] == [True, False]
    assert raw.streams[0].dtype == SHAPE.dtype


def test_a_matrix_for_each_layer() -> None:
    """In the order of the sites; the same for all is the one matrix."""
    one, two = matrix(2, seed=1), matrix(2, seed=2)
    hooks = {"pre_attn": [3], "post_block": [0, 1, 2]}
    by_layer = {"post_block": {"0-1": one, 2: two}, "pre_attn": {-1: two}}
    plan = parse(inline={"project": by_layer, "hooks": hooks}, two={"project": one})
    assert plan.streams[0].sites == (*(("post_block", n) for n in (0, 1, 2)), ("pre_attn", 3))
    digests = {plan.projections[d]: d for d in plan.projections}
    a, b = (digests[m.numpy().tobytes()] for m in (one, two))
    assert plan.streams[0].making == Scores((a, a, b, b), 2)
    assert plan.streams[1].making == Scores((a,), 2)
    same = {"post_block": {"0-2": one}, "pre_attn": {3: one.tolist()}}
    [stream] = parse(inline={"project": same, "hooks": hooks}).streams
    assert stream == parse(inline={"project": one, "hooks": hooks}).streams[0]
    other = {"post_block": {"0-1": two, 2: one}, "pre_attn": {-1: one}}
    both = parse(
        inline={"project": by_layer, "hooks": hooks}, one={"project": other, "hooks": hooks}
    )
    assert [s.making for s in both.streams] == [
        Scores((a, a, b, b), 2),
        Scores((b, b, a, a), 2),
    ]
    assert len(both.projections) == 2


def test_modules_by_name_are_their_directions() -> None:
    """Of their base vectors, at each site its own, of length 1; with the twin of another name."""
    vectors = {n: matrix(1, seed=n)[0] for n in range(4)}
    config = config_of()
    modules = {
        "up": {"vectors": {"post_block": {1: vectors[0], 2: 3 * vectors[1]}}},
        "down": {"vectors": {"post_block": {1: vectors[2], 2: vectors[3]}}, "decode_vectors": {}},
    }
    catalog = {
        name: parse_module(given, name, SHAPE, config.steering_config)
        for name, given in modules.items()
    }

    def projections(project: Any) -> list[np.ndarray]:
        asked = {"hooks": {"post_block": [1, 2]}, "positions": "all", "project": project}
        plan = plan_of(config=config, modules=catalog, capture={"inline": asked})
        assert plan is not None and plan.capture is not None
        [stream] = plan.capture.streams
        assert stream.width == 2 and isinstance(stream.making, Scores)
        raw = [plan.capture.projections[digest] for digest in stream.making.digests]
        return [np.frombuffer(data, np.float32).reshape(2, HIDDEN) for data in raw]

    found = projections({"modules": ["up", "down"]})
    for layer, made in zip((1, 2), found, strict=True):
        want = torch.stack([vectors[layer - 1], vectors[layer + 1]])
        want /= want.norm(dim=-1, keepdim=True)
        np.testing.assert_allclose(made, want.numpy(), rtol=1e-6)
    twin = projections({"modules": ("down", "up")})
    assert all(np.array_equal(a, b[::-1]) for a, b in zip(found, twin, strict=True))
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(found, twin, strict=True))


def test_scores_never_cost_more_than_rows() -> None:
    """Four bytes a score: half as many fit beside a bfloat16 row."""
    assert parse(BF16, inline={"project": matrix(2)}).streams[0].row_bytes == BF16.row_bytes
    with pytest.raises(ValueError, match=r"has 3 rows, allowed are 1-2"):
        parse(BF16, inline={"project": matrix(3)})
    wide = TapShape(hidden_size=PROJECTION_ROWS, dtype="float32", layers=SHAPE.layers)
    most = matrix(PROJECTION_ROWS, hidden=PROJECTION_ROWS)
    assert parse(wide, inline={"project": most}).streams[0].width == PROJECTION_ROWS
    with pytest.raises(ValueError, match=rf"^capture: its .* {PROJECTION_ROWS + 1} rows together"):
        parse(wide, inline={"project": most}, one={"project": most[:1]})


def test_error_names_the_field() -> None:
    with pytest.raises(ValueError, match=re.escape("capture.one.project[1][0]: must be a number")):
        parse(inline={}, one={"project": [[0.0] * HIDDEN, [None, 0.0, 0.0, 0.0]]})


def test_a_matrix_for_every_request_is_checked_at_start_up() -> None:
    asked = {"hooks": {"post_block": [1]}, "project": matrix(2)}

    def config_of(request: dict[str, Any]) -> CaptureConfig:
        spec = {"consumer": LoggingConsumer, "instance_name": "all", "capture": request}
        return CaptureConfig(capture_consumers=[spec])

    check_global(config_of(asked), SHAPE)
    wrong = config_of({**asked, "project": matrix(HIDDEN + 1)})
    with pytest.raises(ValueError, match=r"capture_consumers\.all\.capture\.project: has 5 rows"):
        check_global(wrong, SHAPE)
    plan = parse_capture(
        None,
        "capture",
        SHAPE,
        Prompt([1], 2, None, Work(1 << 23)),
        {"all": ConsumerSpec("all", capture=asked)},
    )
    assert plan is not None and plan.streams[0].width == 2
