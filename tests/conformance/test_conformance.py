# SPDX-License-Identifier: Apache-2.0
"""Our points are the residual stream of Hugging Face, read and written, per architecture.

One engine serves all checks of an architecture. Here those of which each has an idiom of its own;
in the tier long a dozen, V2 (`--runner v2`) most of it, but for those whose measurement by `make
test-models` still holds: tests/conformance/selection.py. That does all that vLLM has, into
docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import complete
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.conformance.focus import focus_errors
from tests.conformance.selection import ALWAYS, CHOSEN, V2_MODELS, is_measured
from vllm import LLM
from vllm.config.points import CAPTURE_POINTS, HEAD_POINTS, STEERING_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPTS = check.prompts()
# Log-probabilities of a whole vocabulary are slow under Triton's interpreter.
LOGIT_PROMPTS = check.prompts(lengths=(17, 5))
WITHOUT_MLP_IN = ("exaone4", "gemma4")
"""Those whose class lacks the point: one MLP reads the stream itself, the other is several."""
QUICK = {"v1": ("cohere2", "exaone4", "gemma2", "gpt2", "llama"), "v2": ("gpt2", "llama")}
"""One of each way a block carries its stream, and two in V2."""


@dataclass(frozen=True)
class Pair:
    """One architecture in our engine and in transformers."""

    llm: LLM
    reference: check.Reference


def each_model() -> list[Any]:
    """The chosen rows of `models.MODELS`, marked with their tiers."""

    def tier(name: str, runner: Runner) -> str:
        return "quick" if name in QUICK[runner] else "full" if name in ALWAYS[runner] else "long"

    marks = {name: [getattr(pytest.mark, tier(name, "v1"))] for name in CHOSEN}
    for name in V2_MODELS:
        marks[name].append(pytest.mark.v2(tier(name, "v2")))
    return [pytest.param(name, marks=marks[name]) for name in CHOSEN]


@pytest.fixture(scope="module", params=each_model())
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels, runner: Runner) -> Iterator[Pair]:
    if request.param not in ALWAYS[runner] and is_measured(request.param, runner):
        pytest.skip("measured with these taps and this zoo: tests/conformance/results.jsonl")
    row = tiny_models.row(request.param)
    path = tiny_models.path(row.name)
    options = {"capture_consumers": ["inline"], "capture_points": list(CAPTURE_POINTS)}
    options |= {
        "steering_points": list(STEERING_POINTS),
        "steering_families": ["add", "scale", "focus"],
    }
    llm = make_llm(path, enable_steering=True, **options, **row.engine)
    yield Pair(llm, check.Reference(row, models.load(row, path)))
    shut_down(llm)


def failures(results: list[check.Measurement], tolerance: float) -> list[check.Measurement]:
    return [r for r in results if r.error > tolerance]


def test_runner_is_the_one_asked_for(pair: Pair, runner: Runner) -> None:
    assert pair.llm.llm_engine.vllm_config.use_v2_model_runner is (runner == "v2")


def test_plain(pair: Pair) -> None:
    """The engine without steering or capture agrees with transformers: the floor of the rest."""
    assert not failures(check.plain_errors(pair.llm, pair.reference, LOGIT_PROMPTS), 1e-4)


def test_read(pair: Pair) -> None:
    results = check.read_errors(pair.llm, pair.reference, PROMPTS)
    assert len(results) == len(pair.reference.row.points) * models.LAYERS
    assert not failures(results, check.READ_TOLERANCE)


def test_heads(pair: Pair) -> None:
    """Every head at q, k, v and z and the weights of its attention, and none would pass for its
    neighbour."""
    shape = pair.llm.llm_engine.vllm_config.tap_shape
    assert shape is not None
    points = {n: tuple(layer.heads) for n, layer in check.with_heads(shape).items()}
    assert points
    errors = check.head_errors(pair.llm, pair.reference, PROMPTS, points, check.unread(shape))
    # GPT-J's attention in transformers is one method, so nothing of it can be seen.
    assert set(errors) == (set() if pair.reference.row.name == "gptj" else {*HEAD_POINTS, "attn"})
    for heads in errors.values():
        assert heads.read <= check.READ_TOLERANCE and heads.apart >= check.LEAST_MOVE
    if errors:
        layers = sorted(points)
        error, moved = check.head_write_errors(pair.llm, pair.reference, LOGIT_PROMPTS[1], layers)
        assert error <= check.WRITE_TOLERANCE and moved >= check.LEAST_MOVE


def test_focus(pair: Pair) -> None:
    """Weights of keys all over the sequence raised at every head, and taken away at half of them;
    each moves log-probabilities by 20 times what they may be off."""
    shape = pair.llm.llm_engine.vllm_config.tap_shape
    assert shape is not None and not check.unread(shape)
    heads = {n: layer.heads["z"][0] for n, layer in check.with_heads(shape).items()}
    errors = focus_errors(pair.llm, pair.reference, LOGIT_PROMPTS, heads)
    assert errors is not None
    assert errors.write <= check.WRITE_TOLERANCE and errors.moved >= check.LEAST_BRANCH_MOVE


def test_ends_and_branches(pair: Pair) -> None:
    """embed and final, by hooks and by what transformers says itself, the branches, and what the
    MLP reads, which is written, too."""
    shape = pair.llm.llm_engine.vllm_config.tap_shape
    assert shape is not None and shape.layers[models.LAYERS - 1].final
    offered = check.offered_others(shape)
    assert ("attn_out" in offered) == ("post_attn" in pair.reference.row.points)
    errors = check.other_errors(pair.llm, pair.reference, PROMPTS, offered)
    assert set(errors) == set(offered)
    for each in errors.values():
        assert each.read <= check.READ_TOLERANCE and each.apart >= check.LEAST_MOVE
    if reading := [n for n, layer in shape.layers.items() if layer.inputs]:
        error, moved = check.input_write_errors(pair.llm, pair.reference, LOGIT_PROMPTS[1], reading)
        assert error <= check.WRITE_TOLERANCE and moved >= check.LEAST_BRANCH_MOVE
    others = pair.reference.run(PROMPTS[0]).others
    with torch.inference_mode():
        said = pair.reference.model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert torch.equal(others["embed", 0], said.hidden_states[0][0])
    # MiniCPM divides what its last norm makes; the head reads the quotient.
    config: Any = pair.reference.model.config
    minicpm = config.model_type == "minicpm3"
    divisor = config.hidden_size / config.dim_model_base if minicpm else 1.0
    assert (divisor != 1.0) == minicpm
    normed = said.hidden_states[-1][0]
    assert torch.allclose(others["final", models.LAYERS - 1], normed / divisor, rtol=1e-6)


def test_write(pair: Pair) -> None:
    results = check.write_errors(pair.llm, pair.reference, LOGIT_PROMPTS)
    assert not failures(results, check.WRITE_TOLERANCE)
    weak = [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]
    assert not weak, "these vectors moved too little for their check to mean anything"


def test_read_while_writing(pair: Pair) -> None:
    """Rows are what the rest of the model reads: after the steering of their own point."""
    results = check.steered_read_errors(pair.llm, pair.reference, PROMPTS)
    assert results and not failures(results, check.READ_TOLERANCE)


def test_point_the_model_lacks_is_refused(pair: Pair) -> None:
    """Parallel blocks have no post_attn, some have no mlp_in, and no block has an input_norm; the
    error lists the points there are."""
    points = pair.reference.row.points
    shape = pair.llm.llm_engine.vllm_config.tap_shape
    assert shape is not None
    there = {*points, *shape.layers[0].inputs}
    assert ("mlp_in" in there) == (pair.reference.row.name not in WITHOUT_MLP_IN)
    for lacking in sorted({"post_attn", "mlp_in", "input_norm"} - there):
        requests: tuple[dict[str, Any], ...] = (
            {"steering_vectors": {lacking: {1: torch.ones(models.HIDDEN)}}},
            {"capture": {"inline": {"hooks": {lacking: [1]}, "positions": "last_prompt"}}},
            {"capture": {"inline": {"hooks": {lacking: "all"}, "positions": "last_prompt"}}},
        )
        for request in requests:
            with pytest.raises(ValueError, match=lacking) as error:
                complete(pair.llm, [(PROMPTS[-1], request)], log_probs=False)
            assert all(point in str(error.value) for point in points)
