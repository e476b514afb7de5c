# SPDX-License-Identifier: Apache-2.0
"""Steering of requests that share a batch, a table and an engine with others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import LEAST_MOVE, WRITE_TOLERANCE, Reference
from tests.support import serving
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.config.points import STREAM_POINTS
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.quick, pytest.mark.v2]

LONG, SHORT, MIDDLE = prompt_of(41, 1), prompt_of(5, 2), prompt_of(17, 3)


def start(tiny_models: TinyModels, name: str) -> tuple[LLM, Judge]:
    path = tiny_models.path(name)
    row = tiny_models.row(name)
    llm = make_llm(
        path, enable_steering=True, capture_consumers=["inline"], enable_prefix_caching=False
    )
    return llm, Judge(Reference(row, models.load(row, path)))


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels) -> Iterator[tuple[LLM, Judge]]:
    llm, judge = start(tiny_models, "llama")
    yield llm, judge
    shut_down(llm)


@pytest.fixture(scope="module")
def other(tiny_models: TinyModels, pair: tuple[LLM, Judge]) -> Iterator[tuple[LLM, Judge]]:
    """A second engine beside the first; upstream lets none work after another was shut down."""
    llm, judge = start(tiny_models, "gpt2")
    yield llm, judge
    shut_down(llm)


@pytest.fixture
def llm(pair: tuple[LLM, Judge]) -> LLM:
    return pair[0]


@pytest.fixture
def judge(pair: tuple[LLM, Judge]) -> Judge:
    return pair[1]


def mixed_batch() -> list[Ask]:
    """Every kind of request at once, several of them sharing contents."""
    v, w = vector(1), vector(2)
    return [
        Ask(LONG),
        Ask(LONG, {"steering_vectors": {"pre_attn": {0: v}}}),
        Ask(SHORT, {"prefill_steering_vectors": {"post_attn": {1: v}}, **capture("predicting")}),
        Ask(MIDDLE, {"decode_steering_vectors": {"post_block": {3: w}}, **capture("all")}),
        Ask(MIDDLE, capture("all")),
        Ask(SHORT),
        Ask(
            LONG,
            {
                "steering_vectors": {
                    "post_block": {1: {"vector": v, "scale": 0.5}, 2: w},
                    "pre_attn": {2: w},
                },
                "prefill_steering_vectors": {"post_block": {1: w}},
                "decode_steering_vectors": {"post_attn": {0: v}, "post_block": {1: -w}},
                **capture([3, -2, "all_generated"], ("post_block",), [1, 3]),
            },
        ),
        Ask(MIDDLE, {"steering_vectors": {"pre_attn": {0: v}}}),
        Ask(SHORT, capture("last_prompt", ("pre_attn",), [2])),
    ]


def test_mixed_batch(llm: LLM, judge: Judge) -> None:
    asks = mixed_batch()
    with serving.watching(llm) as steps:
        outputs = serve(llm, asks)
    assert len(steps.outputs[0].num_scheduled_tokens) == len(asks), "not one batch"
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)


def test_neighbours_leave_plain_requests_bit_identical(llm: LLM) -> None:
    """Same batch, neighbours unsteered and steered."""
    v = vector(3)
    plain = [Ask(LONG, capture("all")), Ask(SHORT), Ask(MIDDLE, capture("predicting"))]
    neighbours = [Ask(MIDDLE, capture("all")), Ask(SHORT), Ask(LONG)]
    fields: list[dict[str, Any]] = [
        {"steering_vectors": {"pre_attn": {0: v}, "post_block": {3: v}}},
        {"prefill_steering_vectors": {"post_attn": {1: v}}},
        {"decode_steering_vectors": {"post_block": {2: v}}},
    ]
    steered = [
        Ask(ask.prompt, {**ask.fields, **extra})
        for ask, extra in zip(neighbours, fields, strict=True)
    ]
    # Interleaved, so that a slot that leaks to the next token shows.
    alone = serve(llm, [a for both in zip(neighbours, plain, strict=True) for a in both])
    among = serve(llm, [a for both in zip(steered, plain, strict=True) for a in both])
    for index in (1, 3, 5):
        assert serving.same_completion(alone[index].outputs[0], among[index].outputs[0])
    for index in (0, 2, 4):
        moved = serving.relative(
            serving.log_probs(among[index].outputs[0]), serving.log_probs(alone[index].outputs[0])
        )
        assert moved >= LEAST_MOVE


def test_zero_sum_is_bit_identical_to_nothing(llm: LLM) -> None:
    """v and -v over tiers, scale 0 and a zero vector run through a slot and change nothing."""
    v = vector(4)
    zeros: list[dict[str, Any]] = [
        {
            "steering_vectors": {"post_block": {1: v}},
            "prefill_steering_vectors": {"post_block": {1: -v}},
            "decode_steering_vectors": {"post_block": {1: -v}},
        },
        {"steering_vectors": {"pre_attn": {0: {"vector": v, "scale": 0.0}}}},
        {"steering_vectors": {"post_attn": {2: torch.zeros(models.HIDDEN)}}},
    ]
    rows = capture("all")
    plain = serve(llm, [Ask(MIDDLE, rows)] * len(zeros))
    with serving.watching(llm) as steps:
        zeroed = serve(llm, [Ask(MIDDLE, {**rows, **extra}) for extra in zeros])
    admitted = steps.outputs[0].interventions.admitted.values()
    assert len({tuple(r.table_rows) for r in admitted}) == len(zeros)
    assert all(r.table_rows.all() for r in admitted), "not through a slot"
    for one, other in zip(plain, zeroed, strict=True):
        assert serving.same_completion(one.outputs[0], other.outputs[0])
    half = {**zeros[0], "decode_steering_vectors": {"post_block": {1: -0.9 * v}}}
    (twin, *_) = serve(llm, [Ask(MIDDLE, {**rows, **half})] * len(zeros))
    assert not serving.same_completion(twin.outputs[0], plain[0].outputs[0])


@pytest.mark.parametrize("point", STREAM_POINTS)
def test_phases(llm: LLM, judge: Judge, point: str) -> None:
    """Each tier acts on its positions: the reference with that mask agrees, with another not."""
    tiers = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
    asks = [Ask(MIDDLE, {tier: {point: {1: vector(5)}}, **capture("all")}) for tier in tiers]
    for tier, ask, output in zip(tiers, asks, serve(llm, asks), strict=True):
        judge.check(ask, output)
        for wrong in set(tiers) - {tier}:
            other = Ask(MIDDLE, {wrong: ask.fields[tier]})
            error, _ = judge.log_prob_errors(other, output.outputs[0])
            assert error >= 20 * WRITE_TOLERANCE, f"{tier} cannot be told from {wrong}"


def test_params_are_reusable(llm: LLM, judge: Judge) -> None:
    """One SamplingParams for several prompts and calls: not changed, and steering each time."""
    v = vector(6)
    ask = Ask(SHORT, {"steering_vectors": {"post_block": {1: {"vector": v}}}, **capture("all")})
    params = ask.params()
    params.output_kind = RequestOutputKind.FINAL_ONLY  # upstream's LLM.generate sets this one
    before, entry = pickle.dumps(params), params.steering_vectors["post_block"][1]
    for _ in range(2):
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=p) for p in (SHORT, LONG)], params, use_tqdm=False
        )
        for prompt, output in zip((SHORT, LONG), outputs, strict=True):
            judge.check(Ask(prompt, ask.fields), output)
    assert pickle.dumps(params) == before
    assert params.steering_vectors["post_block"][1] is entry
    assert entry["vector"] is v
    twin = ask.params()
    twin.steering_vectors = None
    assert pickle.dumps(twin) != before


def test_two_engines_in_one_process(pair: tuple[LLM, Judge], other: tuple[LLM, Judge]) -> None:
    """Both alive, used in turns, of different architectures: no state is shared."""
    asks = mixed_batch()
    for llm, judge in (other, pair, other, pair):
        for ask, output in zip(asks, serve(llm, asks), strict=True):
            judge.check(ask, output)
