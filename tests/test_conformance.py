# SPDX-License-Identifier: Apache-2.0
"""Our points are the residual stream of Hugging Face, read and written, per architecture.

Runs under both model runners (`--runner v2`). One engine serves all checks of an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import Runner, make_llm, shut_down
from vllm import LLM

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.v2

PROMPTS = check.prompts()


@dataclass(frozen=True)
class Pair:
    """One architecture in our engine and in transformers."""

    llm: LLM
    reference: check.Reference


@pytest.fixture(scope="module", params=sorted(models.MODELS))
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Pair]:
    row = tiny_models.row(request.param)
    path = tiny_models.path(row.name)
    llm = make_llm(path, enable_steering=True, capture_consumers=["inline"])
    yield Pair(llm, check.Reference(row, models.load(row, path)))
    shut_down(llm)


def failures(results: list[check.Measurement], tolerance: float) -> list[check.Measurement]:
    return [r for r in results if r.error > tolerance]


def test_runner_is_the_one_asked_for(pair: Pair, runner: Runner) -> None:
    assert pair.llm.llm_engine.vllm_config.use_v2_model_runner is (runner == "v2")


def test_plain(pair: Pair) -> None:
    """The engine without steering or capture agrees with transformers: the floor of the rest."""
    assert not failures(check.plain_errors(pair.llm, pair.reference, PROMPTS), 1e-4)


def test_read(pair: Pair) -> None:
    results = check.read_errors(pair.llm, pair.reference, PROMPTS)
    assert len(results) == len(pair.reference.row.points) * models.LAYERS
    assert not failures(results, check.READ_TOLERANCE)


def test_write(pair: Pair) -> None:
    results = check.write_errors(pair.llm, pair.reference, PROMPTS)
    assert not failures(results, check.WRITE_TOLERANCE)
    weak = [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]
    assert not weak, "these vectors moved too little for their check to mean anything"


def test_read_while_writing(pair: Pair) -> None:
    """Rows are what the rest of the model reads: after the steering of their own point."""
    results = check.write_errors(pair.llm, pair.reference, PROMPTS, capture=True)
    assert not failures(results, check.WRITE_TOLERANCE)
    rows = [r for r in results if r.check == "steered read"]
    assert rows and not failures(rows, check.READ_TOLERANCE)


def test_point_the_model_lacks_is_refused(pair: Pair) -> None:
    """Parallel blocks have no post_attn; the error lists the points there are."""
    points = pair.reference.row.points
    if "post_attn" in points:
        pytest.skip("this architecture has all points")
    vector = torch.ones(models.HIDDEN)
    requests: tuple[dict[str, Any], ...] = (
        {"steering_vectors": {"post_attn": {1: vector}}},
        {"capture": {"inline": {"hooks": {"post_attn": [1]}, "positions": "last_prompt"}}},
        {"capture": {"inline": {"hooks": {"post_attn": "all"}, "positions": "last_prompt"}}},
    )
    for request in requests:
        with pytest.raises(ValueError, match="post_attn") as error:
            check.complete(pair.llm, [(PROMPTS[-1], request)], log_probs=False)
        assert all(point in str(error.value) for point in points)
