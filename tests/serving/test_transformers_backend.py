# SPDX-License-Identifier: Apache-2.0
"""Models on vLLM's Transformers backend: the points are what a layer takes and what it returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import complete
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.tiny import NO_HEAD_DIM, PARALLEL, WINDOW, TinyModel
from vllm import LLM
from vllm.v1.interventions.worker.layers import tapped

pytestmark = pytest.mark.full

PROMPTS = check.prompts(lengths=(17, 5))
# Architectures that only the backend has: it changes the classes of transformers for this process,
# so those of other tests are left alone.
ROWS = {
    "parallel": TinyModel(
        "phi",
        "PhiForCausalLM",
        lambda: transformers.PhiConfig(**{**NO_HEAD_DIM, "partial_rotary_factor": 0.5}),
        PARALLEL,
    ),
    "sandwich": TinyModel(
        "olmo2", "Olmo2ForCausalLM", lambda: transformers.Olmo2Config(**NO_HEAD_DIM), PARALLEL
    ),
    "experts": TinyModel(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        lambda: transformers.FlexOlmoConfig(**NO_HEAD_DIM, num_experts=4, num_experts_per_tok=2),
        PARALLEL,
    ),
    "compiled": TinyModel(
        "starcoder2",
        "Starcoder2ForCausalLM",
        lambda: transformers.Starcoder2Config(**NO_HEAD_DIM, sliding_window=WINDOW),
        PARALLEL,
    ),
}


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, check.Reference]]:
    row = ROWS[request.param]
    path = models.save(row, tmp_path_factory.mktemp("models"))
    reference = models.load(row, path)
    # The backend decorates the reference's class for torch.compile: not for this instance.
    reference.base_model.do_not_compile = True  # type: ignore[assignment]
    llm = make_llm(
        path,
        enforce_eager=request.param != "compiled",
        enable_steering=True,
        capture_consumers=["inline"],
    )
    yield llm, check.Reference(row, reference)
    shut_down(llm)


def test_backend_is_the_one_asked_for(pair: tuple[LLM, check.Reference]) -> None:
    names = pair[0].apply_model(lambda model: [type(m).__name__ for m in model.modules()])[0]
    assert any(name.startswith("Transformers") for name in names)
    assert sum(name.startswith("Tapped") for name in names) == models.LAYERS


def test_reads(pair: tuple[LLM, check.Reference]) -> None:
    results = check.read_errors(*pair, PROMPTS)
    assert {r.point for r in results} == {"pre_attn", "post_block"}
    assert len(results) == 2 * models.LAYERS
    assert not [r for r in results if r.error > check.READ_TOLERANCE]


def test_writes(pair: tuple[LLM, check.Reference]) -> None:
    results = check.write_errors(*pair, PROMPTS)
    assert results and not [r for r in results if r.error > check.WRITE_TOLERANCE]
    assert not [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]


def test_post_attn_is_refused(pair: tuple[LLM, check.Reference]) -> None:
    request = {"steering_vectors": {"post_attn": {1: torch.ones(models.HIDDEN)}}}
    with pytest.raises(ValueError, match="no point 'post_attn'; it has pre_attn, post_block"):
        complete(pair[0], [(PROMPTS[-1], request)], log_probs=False)


class Twice(nn.Module):
    """A layer that carries two streams."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_a_layer_with_several_streams_is_refused() -> None:
    layer = Twice()
    layer.__class__ = tapped(Twice)  # type: ignore[assignment]
    assert torch.equal(layer(hidden_states=torch.ones(1, 3, 4)), torch.ones(1, 3, 4))
    with pytest.raises(ValueError, match=r"carry \(2, 1, 3, 4\), not one stream"):
        layer(torch.ones(2, 1, 3, 4))
