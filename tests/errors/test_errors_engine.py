# SPDX-License-Identifier: Apache-2.0
"""Errors through a real engine: raised where `generate` is called, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.conformance.engine import engine
from tests.conformance.models import HIDDEN, LAYERS, VOCAB
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROMPT = TokensPrompt(prompt_token_ids=[i % VOCAB for i in range(3, 12)])
VECTOR = np.linspace(-1, 1, HIDDEN)
HOOKS = {"post_block": [0]}


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    """A parallel architecture: it has no `post_attn`."""
    options = {"enable_steering": True, "max_steering_configs": 1, "capture_consumers": ["inline"]}
    with engine(tiny_models.path("gptj"), capture_inline_max_bytes=4096, **options) as llm:
        yield llm


def generate(llm: LLM, *asks: dict[str, Any]) -> list[list[int]]:
    params = [
        SamplingParams(**{"max_tokens": 4, "temperature": 0, "detokenize": False, **ask})
        for ask in asks
    ]
    outputs = llm.generate([PROMPT] * len(asks), params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


ERRORS = [
    ({"steering_vectors": {"mlp": {0: VECTOR}}}, "steering_vectors.mlp: unknown point 'mlp'"),
    (
        {"steering_vectors": {"post_attn": {0: VECTOR}}},
        "steering_vectors.post_attn: this model has no point 'post_attn'; it has "
        "pre_attn, post_block",
    ),
    (
        {"prefill_steering_vectors": {"pre_attn": {LAYERS: VECTOR}}},
        f"prefill_steering_vectors.pre_attn.{LAYERS}: layer {LAYERS} is out of range, the model "
        f"has 0-{LAYERS - 1}",
    ),
    (
        {"steering_vectors": {"pre_attn": {0: VECTOR[1:]}}},
        f"steering_vectors.pre_attn.0: has shape [{HIDDEN - 1}], the model needs [{HIDDEN}]",
    ),
    (
        {"capture": {"inline": {"hooks": HOOKS, "positions": [9 + 4 - 1]}}},
        "capture.inline.positions[0]: position 12 is out of reach: the prompt has 9 tokens and "
        "the last row is at 11",
    ),
    (
        {"capture": {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}},
        f"capture.inline: up to {12 * LAYERS} rows are {12 * LAYERS * HIDDEN * 4} bytes",
    ),
    (
        {
            "prefill_steering_vectors": {"pre_attn": {0: VECTOR}},
            "decode_steering_vectors": {"pre_attn": {1: VECTOR}},
        },
        "prefill_steering_vectors + decode_steering_vectors: the request needs 2 slots, the "
        "engine has max_steering_configs=1",
    ),
]


@pytest.mark.parametrize(("ask", "message"), ERRORS, ids=[m.split(":")[0] for _, m in ERRORS])
def test_error(llm: LLM, ask: dict[str, Any], message: str) -> None:
    plain = generate(llm, {})
    with pytest.raises(ValueError) as caught:
        generate(llm, {}, ask, {})
    assert str(caught.value).startswith(message)
    # The request before the refused one does not come out of a later call.
    assert not llm.llm_engine.has_unfinished_requests()
    assert generate(llm, {}) == plain


def test_the_same_fields_in_order_are_served(llm: LLM) -> None:
    plain, steered = generate(
        llm, {}, {"steering_vectors": {"pre_attn": {0: {"vector": VECTOR, "scale": 50.0}}}}
    )
    assert plain != steered
    assert generate(llm, {"capture": {"inline": {"hooks": HOOKS, "positions": [11]}}}) == [plain]


def test_not_enabled(tiny_models: TinyModels) -> None:
    with engine(tiny_models.path("gptj")) as llm:
        with pytest.raises(ValueError, match=r"^decode_steering_vectors: steering is not enabled"):
            generate(llm, {"decode_steering_vectors": {"pre_attn": {0: VECTOR}}})
        with pytest.raises(ValueError, match=r"^capture: capture is not enabled"):
            generate(llm, {"capture": {"inline": {"hooks": HOOKS}}})
        assert len(generate(llm, {})) == 1
