# SPDX-License-Identifier: Apache-2.0
"""The last layer that `vllm capture run` needs: the engine ends there if nothing is generated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.config.points import FINAL, HEAD_POINTS
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.sites import need_layers


def with_stop(
    engine_args: EngineArgs, hooks: Mapping[str, Any], more: Mapping[str, Any], max_tokens: int
) -> EngineArgs:
    """Return the engine's arguments, which load no layer behind the last that is captured, if that
    changes no row: nothing is generated, and nothing is read of the head.

    Raises:
        ValueError: hooks name a layer that the model has not.
    """
    needs_head = FINAL in hooks or not {"lens", "attention"}.isdisjoint(more)
    chosen = engine_args.capture_stop_after is not None
    if max_tokens != 1 or needs_head or chosen or engine_args.enable_steering:
        return engine_args
    depth = engine_args.create_model_config().get_total_num_hidden_layers()
    ended = replace(engine_args, capture_stop_after=last_layer(hooks, depth))
    try:
        ended.create_engine_config()
    except ValueError as error:
        if "capture_stop_after" not in str(error):
            raise
        return engine_args
    return ended


def last_layer(hooks: Mapping[str, Any], depth: int) -> int:
    """Return the highest layer that hooks name.

    Args:
        depth: number of layers of the whole model.

    Raises:
        ValueError: they name none, or one that the model has not.
    """
    last = 0
    for point, layers in hooks.items():
        of_point = LayerShape((point,))
        shape = TapShape(0, "float32", dict.fromkeys(range(depth), of_point))
        if point in HEAD_POINTS and isinstance(layers, Mapping):
            layers = list(layers)
        last = max([last, *need_layers(layers, point, f"--hooks.{point}", shape)])
    return last
