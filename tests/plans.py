# SPDX-License-Identifier: Apache-2.0
"""Plans without an engine: a model's shape made up, a real config, and the real `resolve`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.interventions import resolve, strip
from vllm.v1.interventions import Content, Plan, TapShape

HIDDEN = 4
POINTS = ("pre_attn", "post_attn", "post_block")
PARALLEL = ("pre_attn", "post_block")

SHAPE = TapShape(
    hidden_size=HIDDEN,
    dtype="float32",
    points={0: POINTS, 1: POINTS, 2: PARALLEL, 3: POINTS},
)
"""Four layers, of which layer 2 is a parallel block."""

BF16 = TapShape(hidden_size=HIDDEN, dtype="bfloat16", points=SHAPE.points)
PARALLEL_ONLY = TapShape(hidden_size=HIDDEN, dtype="float32", points={0: PARALLEL, 1: PARALLEL})
GAPS = TapShape(hidden_size=HIDDEN, dtype="float32", points={0: POINTS, 2: POINTS, 5: PARALLEL})
"""A model some of whose layers have no tap at all."""

VECTOR = [1.0, -2.0, 0.5, 3.0]


def config_of(
    shape: TapShape | None = SHAPE,
    *,
    steering: bool = True,
    capture: bool = True,
    speculative_tokens: int = 0,
    **options: Any,
) -> VllmConfig:
    """A config as the frontend has it once the engine is up.

    Args:
        speculative_tokens: 0 for no speculation.
        options: fields of `SteeringConfig` and `CaptureConfig`.
    """
    config = VllmConfig()
    steers = {k: v for k, v in options.items() if k in SteeringConfig.__dataclass_fields__}
    captures = {k: v for k, v in options.items() if k not in steers}
    config.steering_config = SteeringConfig(enable_steering=steering, **steers)
    config.capture_config = CaptureConfig(
        capture_consumers=["inline"] if capture else [], **captures
    )
    config.tap_shape = shape
    return config


def plan_of(
    *,
    config: VllmConfig | None = None,
    prompt: int | None = 5,
    max_tokens: int = 4,
    resumable: bool = False,
    tokenizer: TokenizerLike | None = None,
    **fields: Any,
) -> Plan | None:
    """`resolve` as the input processor calls it.

    Args:
        prompt: tokens of the prompt; None for one of embeddings.
        fields: of `SamplingParams`.
    """
    params = SamplingParams(max_tokens=max_tokens, **fields)
    token_ids = None if prompt is None else list(range(100, 100 + prompt))
    return resolve(params, strip(params), token_ids, resumable, config or config_of(), tokenizer)


def content(name: str, num_bytes: int = 16) -> Content:
    """A content told apart by its digest."""
    return Content(digest=name, sites=[("pre_attn", 0)], data=bytes(num_bytes))


def array(*values: float) -> np.ndarray:
    """float64."""
    return np.array(values, dtype=np.float64)
