# SPDX-License-Identifier: Apache-2.0
"""Errors name what people meant; the page shows each mistake with its error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.errors.mistakes import CALLS, MISTAKES, call_message, hooks, message, table
from tests.errors.page import PAGE
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.interventions.likely import likely

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("asked", "meant"), MISTAKES, ids=[str(asked) for asked, _ in MISTAKES])
def test_the_error_names_what_was_meant(asked: dict[str, Any], meant: str) -> None:
    assert meant in message(asked)


@pytest.mark.parametrize(("call", "meant"), CALLS, ids=[call for call, _ in CALLS])
def test_a_keyword_of_a_call_names_its_field(call: str, meant: str) -> None:
    assert meant in call_message(call)


def test_other_keywords_are_pythons_to_refuse() -> None:
    with pytest.raises(TypeError, match=r"^Unexpected keyword argument 'zebra'$"):
        SamplingParams(zebra=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zebra'$"):
        LLM.generate(object.__new__(LLM), "a", zebra=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("said", ["delta", "DELTA", RequestOutputKind.DELTA])
def test_deltas_are_one_word(said: Any) -> None:
    assert SamplingParams(output_kind=said).output_kind is RequestOutputKind.DELTA
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE


def test_the_page_has_them() -> None:
    assert table() in PAGE.read_text(), "run python -m tests.errors.mistakes"


@pytest.mark.parametrize("said", ["zebra", "", "x" * 10_000, 7, None, ["post_block"]])
def test_no_guess_without_likeness(said: Any) -> None:
    assert likely(said, ("post_block", "pre_attn")) == ""


@pytest.mark.parametrize(("said", "option"), [("bad", "BAD"), ("my_modul", "My-Module")])
def test_letters_and_hyphens_are_compared_alike(said: str, option: str) -> None:
    assert likely(said, ["other", option]) == f" (did you mean {option!r}?)"


@pytest.mark.parametrize("said", ["model.layers.5.post_attention_layernorm.output", "up_proj.out"])
def test_no_guess_at_an_end_of_another_module(said: str) -> None:
    """What a layer returns is `output`, too, after its own name."""
    assert "did you mean" not in message(hooks({said: [1]}))


def test_what_is_not_allowed_is_not_named() -> None:
    """Nor something that is only spelt alike."""
    assert likely("self_attn", ("pre_attn",), {"self_attn": "attn_out"}) == ""
    assert likely("resid_mid", ("post_block",), {"resid_mid": "post_attn"}) == ""
