# SPDX-License-Identifier: Apache-2.0
"""Plans without an engine: a model's shape made up, a real config, and the real `resolve`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.capture import CaptureConfig
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.multimodal.inputs import PlaceholderRange
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.resolve import resolve, without_plan_fields
from vllm.v1.interventions.plan import (
    UNSTEERED,
    Plan,
    Segment,
    Site,
    SteeringPlan,
    VectorSet,
    VectorSum,
)
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.steering.modules import Module

HIDDEN = 4
PARALLEL = ("pre_attn", "post_block")
_WHOLE, _PARALLEL = LayerShape(STREAM_POINTS), LayerShape(PARALLEL)

SHAPE = TapShape(
    hidden_size=HIDDEN,
    dtype="float32",
    layers={0: _WHOLE, 1: _WHOLE, 2: _PARALLEL, 3: _WHOLE},
    token_ids=100,
)
"""Four layers, of which layer 2 is a parallel block."""

BF16 = TapShape(hidden_size=HIDDEN, dtype="bfloat16", layers=SHAPE.layers)
PARALLEL_ONLY = TapShape(hidden_size=HIDDEN, dtype="float32", layers={0: _PARALLEL, 1: _PARALLEL})
GAPS = TapShape(hidden_size=HIDDEN, dtype="float32", layers={0: _WHOLE, 2: _WHOLE, 5: _PARALLEL})
"""A model some of whose layers have no tap at all."""

_HEADED = LayerShape(STREAM_POINTS, {"q": (4, 2), "k": (2, 2), "v": (2, 3), "z": (4, 3)})
HEADS = TapShape(
    hidden_size=HIDDEN,
    token_ids=100,
    dtype="float32",
    layers={
        0: _HEADED,
        1: _HEADED,
        2: _PARALLEL,
        3: LayerShape(STREAM_POINTS, {"q": (4, 4), "z": (4, 4)}),
    },
)
"""Layer 2 has no attention, layer 3 uses the keys of layer 1 and has wider heads."""

LANES = TapShape(
    hidden_size=HIDDEN,
    token_ids=100,
    dtype="float32",
    layers={0: _PARALLEL, 1: LayerShape(PARALLEL, final=True)},
    lanes=3,
)
"""A stream of three lanes."""


def with_layers(shape: TapShape, numbers: Iterable[int], **fields: Any) -> TapShape:
    """A model some of whose layers offer something else."""
    changed = {n: msgspec.structs.replace(shape.layers[n], **fields) for n in numbers}
    return msgspec.structs.replace(shape, layers={**shape.layers, **changed})


VECTOR = [1.0, -2.0, 0.5, 3.0]


NOBODY = OutputProcessor(None, log_stats=False)
"""The requests of a frontend that has none."""


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
    captures.setdefault("capture_consumers", ["inline"] if capture else [])
    config.capture_config = CaptureConfig(**captures)
    config.tap_shape = shape
    return config


def plan_of(
    *,
    config: VllmConfig | None = None,
    prompt: int = 5,
    max_tokens: int = 4,
    resumable: bool = False,
    tokenizer: TokenizerLike | None = None,
    modules: dict[str, Module] | None = None,
    catalog: ModuleCatalog | None = None,
    num_prompts: int = 1,
    images: Sequence[tuple[int, int]] = (),
    embedded: Sequence[int] = (),
    **fields: Any,
) -> Plan | None:
    """`resolve` as the input processor calls it.

    Args:
        prompt: tokens of the prompt.
        modules: the registered ones.
        catalog: that of requests before; else this one is the first.
        num_prompts: in the same body.
        images: where each begins, and how many tokens it has.
        embedded: the positions that are given as embeddings.
        fields: of `SamplingParams`.
    """
    params = SamplingParams(max_tokens=max_tokens, **fields)
    given = {
        "prompt_token_ids": list(range(100, 100 + prompt)),
        "mm_placeholders": {"image": [PlaceholderRange(*place) for place in images]},
    }
    if embedded:
        given["is_token_ids"] = [i not in embedded for i in range(prompt)]
        given["prompt_embeds"] = torch.zeros(prompt, HIDDEN)
    config = config or config_of()
    catalog = catalog or ModuleCatalog(config)
    for name, module in (modules or {}).items():
        catalog.state.modules[name] = module
    return resolve(
        params, without_plan_fields(params), given, resumable, config, tokenizer, catalog,
        num_prompts,
    )  # fmt: skip


def sees_both_ways(config: VllmConfig) -> VllmConfig:
    """The config of a model whose image tokens see each other both ways."""
    model = SimpleNamespace(is_multimodal_model=True, is_mm_prefix_lm=True)
    config.model_config = model  # type: ignore[assignment]
    return config


def steering_of(**asked: Any) -> SteeringPlan:
    """The steering of `plan_of`."""
    plan = plan_of(**asked)
    assert plan is not None
    assert plan.steering is not None
    return plan.steering


def segment_at(plan: SteeringPlan, position: int) -> Segment:
    """What acts there."""
    return [s for s in plan.segments if s.first <= position][-1]


def sum_at(plan: SteeringPlan, position: int) -> dict[Site, np.ndarray]:
    """site -> float64 [HIDDEN]: what is added there, from the vector sets as they travel."""
    digest = segment_at(plan, position).vector_sum
    if digest == UNSTEERED:
        return {}
    [vector_sum] = [c for c in plan.sums if c.digest == digest]
    sets = {p.digest: p for p in plan.sets}
    total: dict[Site, np.ndarray] = {}
    for name, scale in vector_sum.sets:
        vector_set = sets[name]
        for site, row in zip(vector_set.sites, vector_set.rows, strict=True):
            total[site] = total.get(site, np.zeros(HIDDEN)) + scale * row
    return total


def vector_set(name: str, num_bytes: int = 4 * HIDDEN) -> VectorSet:
    """A vector set told apart by its digest."""
    return VectorSet(
        digest=name, sites=[("pre_attn", 0)], data=bytes(num_bytes), largest=0.0, widths=(HIDDEN,)
    )


def asking(*sums: VectorSum, size: int = 4 * HIDDEN, inherit: bool = True) -> SteeringPlan:
    """A plan that only names what it holds, a segment each.

    Args:
        size: bytes of each vector set.
    """
    names = dict.fromkeys(name for c in sums for name, _ in c.sets)
    return SteeringPlan(
        segments=[Segment(i, c.digest, UNSTEERED) for i, c in enumerate(sums)],
        inherit=inherit,
        sums=list(sums),
        sets=[vector_set(name, size) for name in names],
    )


def vector_sum(name: str, *sets: str) -> VectorSum:
    """A sum told apart by its digest, of a vector set of the same name or of those given."""
    return VectorSum(digest=name, sets=[(p, 1.0) for p in sets or (name,)])


def array(*values: float) -> np.ndarray:
    """float64."""
    return np.array(values, dtype=np.float64)
