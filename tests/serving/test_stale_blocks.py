# SPDX-License-Identifier: Apache-2.0
"""Nothing that a steered request leaves in KV blocks is seen by the request that gets them next.

The model has layers with a sliding window and without. Blocks are 32 positions and prompts end
within a block, so that attention reads positions that nobody has written since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.support.serving import prompt_of
from vllm import LLM, SamplingParams
from vllm.config.points import STEERING_POINTS, STREAM_POINTS
from vllm.v1.interventions.scheduler.stale_blocks import StaleBlocks

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

HUGE = 1.6e38
"""Within half of float32 at each site, and beyond its end after a few of them."""


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    llm = make_llm(
        tiny_models.path("gemma3"),
        enable_steering=True,
        steering_families=["add", "scale", "replace"],
        steering_points=list(STEERING_POINTS),
        enable_prefix_caching=True,
        num_gpu_blocks_override=16,
    )
    yield llm
    shut_down(llm)


def logprobs(llm: LLM) -> list[list[float]]:
    """Logprobs of the tokens that plain requests generate, nothing of them cached."""
    prompts: list[Any] = [
        {"prompt_token_ids": prompt_of(20 + i, 100 + i), "cache_salt": f"plain {i}"}
        for i in range(6)
    ]
    assert llm.reset_prefix_cache()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, logprobs=0))
    found = []
    for output in outputs:
        rows = output.outputs[0].logprobs
        assert rows is not None
        found.append([next(iter(row.values())).logprob for row in rows])
    return found


def poison(llm: LLM, fields: dict[str, Any]) -> None:
    """Fill all blocks by steered requests, some of which are preempted."""
    prompts: list[Any] = [
        {"prompt_token_ids": prompt_of(40, 500 + i), "cache_salt": f"steered {i}"} for i in range(8)
    ]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, **fields))


def at_all_sites(llm: LLM, value: float) -> dict[str, Any]:
    return {
        point: dict.fromkeys(llm.steering.layers(), [value] * models.HIDDEN)
        for point in STREAM_POINTS
    }


WAYS: dict[str, Any] = {
    "vectors": lambda llm: {"steering_vectors": at_all_sites(llm, HUGE)},
    "generated": lambda llm: {"decode_steering_vectors": at_all_sites(llm, HUGE)},
    "heads": lambda llm: {
        "steering": [{"op": "scale", "point": "z", "layers": "all", "factor": 1e30}]
    },
    "replace": lambda llm: {
        "steering": [
            {
                "op": "replace",
                "point": "post_attn",
                "layers": "all",
                "positions": list(range(40)),
                "values": [[3e38] * models.HIDDEN] * 40,
            }
        ]
    },
}


def test_blocks_of_steered_requests_are_cleared(llm: LLM) -> None:
    right = logprobs(llm)
    assert all(math.isfinite(value) for row in right for value in row)
    for name, way in WAYS.items():
        poison(llm, way(llm))
        assert logprobs(llm) == right, name
    llm.steering.set(at_all_sites(llm, HUGE / 2))
    poison(llm, {})
    llm.steering.clear()
    assert logprobs(llm) == right, "global vectors"


def test_blocks_that_are_not_cleared_reach_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""
    right = logprobs(llm)
    monkeypatch.setattr(StaleBlocks, "pop", lambda *_: None)
    poison(llm, WAYS["vectors"](llm))
    assert any(math.isnan(value) for row in logprobs(llm) for value in row)
    monkeypatch.undo()
    assert logprobs(llm) != right, "these blocks were not known for stale"
