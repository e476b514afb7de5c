# SPDX-License-Identifier: Apache-2.0
"""What `llm.steering` says and checks before an engine is asked."""

from __future__ import annotations

import pytest

from tests.support.plans import PARALLEL, POINTS, SHAPE, config_of
from vllm.v1.interventions.frontend.global_steering import ChangeBuilder
from vllm.v1.interventions.frontend.module_catalog import ModuleCatalog

pytestmark = pytest.mark.quick


def builder(**options: object) -> ChangeBuilder:
    config = config_of(**options)  # type: ignore[arg-type]
    return ChangeBuilder(config, ModuleCatalog(config))


def test_layers_are_said_by_an_engine_that_only_captures() -> None:
    assert builder(steering=False).layers() == SHAPE.points
    two = builder(steering=False, capture_points=list(PARALLEL), steering_points=["post_attn"])
    assert two.layers() == dict.fromkeys(SHAPE.points, PARALLEL)
    steers = builder(steering_points=["post_attn"], capture_points=list(PARALLEL))
    assert steers.layers() == {n: ("post_attn",) if n != 2 else () for n in SHAPE.points}
    assert builder().layers()[0] == POINTS
    with pytest.raises(ValueError, match="steering is not enabled"):
        builder(shape=None, steering=False).layers()
