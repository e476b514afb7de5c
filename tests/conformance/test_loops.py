# SPDX-License-Identifier: Apache-2.0
"""Layers that run several times for a token: a layer's number counts executions.

The references number what runs by counting it, and know nothing of cycles and loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import GENERATED, complete
from tests.conformance.engine import Runner, engine, make_llm, shut_down
from tests.conformance.test_conformance import Pair, failures
from tests.conformance.zoo.looped import DEPTH
from vllm.config.points import CAPTURE_POINTS, STREAM_POINTS

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

EXECUTIONS = {"hrm_text": 16, "loopcoder": 6}
TWICE = {"hrm_text": (3, 11), "loopcoder": (1, 5)}
"""Two executions of one layer, the second of the last cycle."""


# 16 layers under Triton's interpreter take minutes.
_IN_V2 = {"hrm_text": pytest.mark.v2("long"), "loopcoder": pytest.mark.v2("full")}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=_IN_V2[n]) for n in sorted(EXECUTIONS)]
)
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Pair]:
    row = tiny_models.row(request.param)
    path = tiny_models.path(row.name)
    options = {"capture_consumers": ["inline"], "capture_points": list(CAPTURE_POINTS)}
    llm = make_llm(path, enable_steering=True, **options)
    shown = [check.TwoWay(prompt) for prompt in prompts("v1")] if row.two_way else []
    yield Pair(llm, check.Reference(row, models.load(row, path), shown))
    shut_down(llm)


def prompts(runner: Runner) -> list[list[int]]:
    """Longer than a sliding window, and shorter; what is slow in V2 is Triton's interpreter."""
    return check.prompts(lengths=(17, 5))[: 1 if runner == "v2" else None]


def test_read(pair: Pair, runner: Runner) -> None:
    """Each execution has its rows at each point."""
    results = check.read_errors(pair.llm, pair.reference, prompts(runner))
    assert len(results) == 3 * EXECUTIONS[pair.reference.row.name]
    assert not failures(results, check.READ_TOLERANCE)


def test_write_acts_in_one_execution(pair: Pair, runner: Runner) -> None:
    """A vector at one execution of a layer acts then, and not when the layer runs again."""
    [prompt, *_], name = prompts(runner), pair.reference.row.name
    plain = pair.reference.run(prompt)
    for point in STREAM_POINTS:
        sites = [(point, layer) for layer in TWICE[name]]
        size = plain.rows[sites[0]].norm(dim=1).mean()
        vector = torch.randn(models.HIDDEN, generator=torch.Generator().manual_seed(3))
        vector *= size / vector.norm()
        cases = [(prompt, {"steering_vectors": {point: {n: vector}}}) for n in TWICE[name]]
        for site, done in zip(sites, complete(pair.llm, cases), strict=True):
            delta = vector.expand(len(done.token_ids), -1)
            assert done.log_probs is not None
            for steered in sites:
                run = pair.reference.run(done.token_ids, {steered: delta})
                error = check.worst_row(done.log_probs, run.logits.log_softmax(-1))
                if steered == site:
                    assert error <= check.WRITE_TOLERANCE
                else:
                    assert error >= check.LEAST_MOVE


def test_what_loops_lack_is_refused(pair: Pair) -> None:
    """Heads, for which no number of an execution would do, and layers past the last execution."""
    last = EXECUTIONS[pair.reference.row.name] - 1
    for hooks, says in (
        ({"z": [0]}, "this model has no point 'z'; it has embed, pre_attn, attn_out, post_attn"),
        ({"post_block": [last + 1]}, f"out of range, the model has 0-{last}"),
    ):
        request = {"capture": {"inline": {"hooks": hooks, "positions": "last_prompt"}}}
        with pytest.raises(ValueError, match=says):
            complete(pair.llm, [([1, 2, 3], request)], log_probs=False)


@pytest.mark.parametrize("name", sorted(EXECUTIONS))
def test_what_is_bound_is_each_execution_once(name: str, tiny_models: TinyModels) -> None:
    from vllm.v1.interventions.worker.layers import executions, find_layers

    def found(model: Any) -> list[tuple[int, int]]:
        layers = find_layers(model)
        return [(n, executions(layers[n])[n]) for n in sorted(layers)]

    with engine(tiny_models.path(name)) as llm:
        [numbered] = llm.apply_model(found)
    assert numbered == [(n, n // DEPTH) for n in range(EXECUTIONS[name])]


def test_prompts_that_see_both_ways_are_not_split(tiny_models: TinyModels) -> None:
    """Where the rows of a prompt have no room in a step, it waits; what never fits is refused."""
    row = tiny_models.row("hrm_text")
    path = tiny_models.path(row.name)
    both = [check.TwoWay(prompt) for prompt in check.prompts(lengths=(17, 11))]
    reference = check.Reference(row, models.load(row, path), both)
    site, room = ("post_block", 15), 17 + GENERATED
    buffer = {"capture_buffer_bytes": room * 4 * models.HIDDEN}
    capture = {"hooks": {"post_block": [15]}, "positions": "all"}
    with engine(path, capture_consumers=["inline"], **buffer) as llm:
        cases: list[Any] = [(prompt, {}) for prompt in both]
        for done in complete(llm, cases, log_probs=False, capture=capture):
            want = reference.run(done.token_ids).rows[site]
            assert check.worst_row(done.rows[site], want) <= check.READ_TOLERANCE
            causal = check.ref.run(reference.model, row.adapter, done.token_ids).rows[site]
            assert check.worst_row(done.rows[site], causal) >= check.LEAST_MOVE
        two = {**capture, "hooks": {"post_block": [14, 15]}}
        with pytest.raises(ValueError, match=f"capture: {room - 1} positions at once need"):
            complete(llm, cases[:1], log_probs=False, capture=two)
