# SPDX-License-Identifier: Apache-2.0
"""Where attention is read or focused wrongly, the tests of it fail, or the start-up proof does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings

from tests.conformance.engine import make_llm, shut_down
from tests.interventions.frontend import test_focus_keys as keys
from tests.mutations.attention import KEYS, PROVED, RANKS, SERVED, of_rank
from tests.mutations.rules import Mistake
from tests.mutations.test_rule_mutations import fails
from tests.serving.test_focus_scheduling import asked, check_focused, start
from tests.support.focus import Focusing
from tests.support.serving import Ask, Judge, prompt_of, serve
from vllm import LLM
from vllm.v1.interventions.frontend.request import segments
from vllm.v1.interventions.frontend.request import steering as steering_request
from vllm.v1.interventions.worker.check.taps import check_worker

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full


# The same pairs each time, and no smaller ones looked for when one fails.
_SAME: Any = keys.test_equal_keys_exactly_where_the_focus_is_equal
PAIRS = settings(
    max_examples=3000, phases=[Phase.generate], database=None, derandomize=True, deadline=None
)(given(keys.pairs())(_SAME.hypothesis.inner_test))


@pytest.mark.quick
@pytest.mark.parametrize("mistake", KEYS, ids=lambda mistake: mistake.name)
def test_wrong_keys_are_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vars(mistake.made())
    for module, name in (
        (steering_request, "FocusParser"),
        (segments, "FocusPrograms"),
        (steering_request, "SegmentBuilder"),
        (keys, "BlockIdentity"),
    ):
        if made.get(name) is not None and mistake.module.__name__ == made[name].__module__:
            monkeypatch.setattr(module, name, made[name])
    assert fails(PAIRS)


@pytest.fixture(scope="module", params=["gemma2", "bloom"])
def unread(
    request: pytest.FixtureRequest, tiny_models: TinyModels
) -> Iterator[tuple[str, Callable[[], set[int]]]]:
    """A model, and which of its layers the start-up proof refuses."""
    llm = make_llm(
        tiny_models.path(request.param),
        enable_steering=True,
        steering_families=["add", "focus"],
        capture_consumers=["inline"],
        capture_points=["q", "z"],
        **tiny_models.row(request.param).engine,
    )

    def refused() -> set[int]:
        shapes: list[Any] = llm.collective_rpc(check_worker)
        return {layer for layer, shape in shapes[0].layers.items() if shape.unread}

    yield request.param, refused
    shut_down(llm)


def test_the_proof_refuses(
    unread: tuple[str, Callable[[], set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, refused = unread
    assert refused() == set()
    for name, (of_model, change) in PROVED.items():
        if of_model == model:
            with monkeypatch.context() as patch:
                change(patch)
                assert refused() == {0, 1, 2, 3}, name
    assert refused() == set()


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    pair = start(tiny_models, max_num_batched_tokens=24, enable_prefix_caching=False)
    yield pair
    shut_down(pair[0])


def check(llm: LLM, judge: Judge) -> None:
    """What tests of focus do: requests of all kinds in one batch, then steered ones without, and
    weights.

    Raises:
        AssertionError: anything is not the model's.
    """
    pairs = asked(20, 8, 600)
    for some in (pairs, pairs[::-1], pairs[2:3], pairs[1:2]):
        outputs = serve(llm, [ask for ask, _ in some])
        for (ask, entries), output in zip(some, outputs, strict=True):
            check_focused(judge, ask, entries, output)
    weights = {"heads": "all", "queries": "all", "give": ["mass"], "keys": {"span": [3, 4]}}
    fields = {
        "steering": [Focusing({1: [2]}, [3, 4], share=0.7).request(21)],
        "capture": {"inline": {"attention": weights}},
    }
    [output] = serve(llm, [Ask(prompt_of(17, 610), fields)])
    mass = output.outputs[0].capture_results["inline"].payload["attn", 1].mass[5:, :, 0]
    assert mass[:, 2].min() > 0.7 - 1e-4 and mass[:, 1].mean() < 0.5


def test_right_ones_pass(pair: tuple[LLM, Judge]) -> None:
    check(*pair)


@pytest.mark.parametrize("name", SERVED)
def test_wrong_focus_is_noticed(
    name: str, pair: tuple[LLM, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        SERVED[name](patch)
        assert fails(lambda: check(*pair))


@pytest.mark.long
def test_wrong_ranks_are_noticed(tiny_models: TinyModels) -> None:
    """Each of two tensor-parallel workers makes the mistake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm, judge = start(tiny_models, max_num_batched_tokens=24, tensor_parallel_size=2)
        for name in (None, *RANKS, None):
            llm.collective_rpc(of_rank, args=(name,))
            assert fails(lambda: check(llm, judge)) == (name is not None), name
        shut_down(llm)
