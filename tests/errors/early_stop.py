# SPDX-License-Identifier: Apache-2.0
"""What is refused of engines that end after a layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import nn

from tests.errors.case import Case, path
from tests.support.plans import SHAPE, config_of
from vllm.config.capture import CaptureConfig
from vllm.config.early_stop import refuse_stop
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.interventions.worker.layers import need_stopped

ENDED = config_of(
    msgspec.structs.replace(SHAPE, stop=3, depth=6), steering=False, capture_stop_after=3
)
"""Of a model of six layers, which ends after layer 3."""
HAS = "0-3; name such layers, or start it with a higher capture_stop_after"


def asking(hooks: Any = None, max_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    capture = {"inline": {"hooks": {"post_block": [1]} if hooks is None else hooks}}
    return {"config": ENDED, "capture": capture, "max_tokens": max_tokens, **fields}


def starting(stop: int = 1, **changed: Any) -> Callable[[], object]:
    """Start an engine of a model of six layers."""
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: 6,
        enable_sleep_mode=False,
        using_transformers_backend=lambda: False,
        architecture="M",
        architectures=["M"],
        registry=SimpleNamespace(is_pp_supported_model=lambda *_: changed.get("stages", True)),
    )
    config: Any = SimpleNamespace(
        capture_config=SimpleNamespace(capture_stop_after=stop),
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=changed.get("pipeline", 1)),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
    )
    return lambda: refuse_stop(config)


def ended(**changed: Any) -> Callable[[], object]:
    return lambda: CaptureConfig(capture_stop_after=1, **changed)


def whole_list() -> None:
    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    need_stopped(nn.ModuleDict({"layers": layers}), dict(enumerate(layers)), 0)


EARLY_STOP = [
    Case(path("capture", "3"), {"config": ENDED, "max_tokens": 1}),
    Case(path("max_tokens", "4", "1", layer="3"), asking(max_tokens=4)),
    Case(path("n", "2", "1", layer="3"), asking(n=2)),
    Case(path("logprobs", layer="3"), asking(logprobs=1)),
    Case(
        path("structured_outputs", layer="3"),
        asking(structured_outputs=StructuredOutputsParams(regex="a")),
    ),
    Case(
        path("capture.inline.hooks.post_block[0]", given="4", allowed=HAS),
        asking({"post_block": [4]}),
    ),
    Case(
        path("capture.inline.hooks.post_block", given="5", allowed=HAS),
        asking({"post_block": "all"}),
    ),
    Case({"given": "6", "allowed": "6"}, do=starting(6)),
    Case({"given": "pipeline parallelism"}, do=starting(pipeline=2)),
    Case({"given": "M, which vLLM does not split into pipeline stages"}, do=starting(stages=False)),
    Case({}, do=ended()),
    Case({"given": "capture_lens"}, do=ended(capture_consumers=["inline"], capture_lens=["logit"])),
    Case({"given": "ModuleDict", "layer": "0"}, do=whole_list),
]
