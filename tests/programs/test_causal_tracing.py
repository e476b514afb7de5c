# SPDX-License-Identifier: Apache-2.0
"""The causal-tracing example, on a model made in a second: what must hold for any model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from demo.train import Recipe, cached_model
from examples.causal_tracing import Question, Traced, save, start, trace
from tests.conformance.engine import shut_down

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.full

TINY = Recipe(hidden=64, heads=2, layers=3, intermediate=64, passages=300, steps=4)
QUESTION = Question(
    "After supper, Lady Finch returned to the sunny garden.",
    "Lady Finch",
    ("Judge Barrow",),
    " She",
    " He",
)
EXACT = 1e-5
"""In nats. The effects are far larger, though the model knows nothing."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = cached_model(tmp_path_factory.mktemp("model"), TINY, Console(quiet=True))
    made = start(model, "float32")
    yield made
    shut_down(made)


@pytest.fixture(scope="module")
def traced(llm: LLM) -> Traced:
    return trace(llm, QUESTION)


def test_the_subject_is_what_was_swapped(traced: Traced) -> None:
    assert "".join(traced.tokens[p] for p in traced.subject).strip() == "Lady Finch"
    assert "".join(traced.tokens) == QUESTION.prompt


def test_a_cell_is_what_one_does_by_hand(llm: LLM, traced: Traced) -> None:
    """Rows captured of the clean run, put into the other: one at a time, and all of a layer."""
    from vllm import SamplingParams

    question = QUESTION
    ids = [
        llm.get_tokenizer().encode(text, add_special_tokens=False)[0]
        for text in (question.answer, question.other)
    ]
    swapped = question.prompt.replace(question.subject, question.swapped[0])

    def odds(prompt: str, **fields: Any) -> tuple[float, Any]:
        params = SamplingParams(max_tokens=1, logprob_token_ids=ids, **fields)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        logprobs: Any = output.outputs[0].logprobs
        answer, other = (logprobs[0][token].logprob for token in ids)
        results = output.outputs[0].capture_results
        return answer - other, results["inline"].payload if results else None

    whole = {"inline": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}}
    clean, rows = odds(question.prompt, capture=whole)
    assert clean == pytest.approx(traced.clean, abs=EXACT)
    put = {"op": "replace", "point": "post_block", "layers": 1}
    values = rows["post_block", 1].values
    for position in (traced.subject[-1], len(traced.tokens) - 1):
        one = {**put, "positions": [position], "values": values[position : position + 1]}
        by_hand = odds(swapped, steering=[one])[0]
        assert by_hand == pytest.approx(traced.restored[0, 1, position], abs=EXACT)
    every = {**put, "positions": "all_prompt", "values": values}
    assert odds(swapped, steering=[every])[0] == pytest.approx(clean, abs=EXACT)
    assert abs(traced.corrupted[0] - clean) > 100 * EXACT and traced.noise_floor < EXACT


def test_what_must_hold_of_any_heat_map(traced: Traced) -> None:
    recovered = traced.recovered
    layers, positions = recovered.shape
    assert (layers, positions) == (3, len(traced.tokens))
    assert float(abs(traced.corrupted - traced.clean).min()) > 100 * EXACT
    # The answer is computed from the last row alone, and rows before the subject were never lost.
    assert recovered[-1, -1] == pytest.approx(1.0, abs=1e-2)
    before = recovered[:, : traced.subject[0]]
    assert before.size and float(abs(before).max()) < 1e-2
    assert np.allclose(recovered[-1, :-1], 0.0, atol=0.05)
    # Between the two there is something to see.
    between = recovered[:-1, traced.subject[0] :]
    assert float(abs(between).max()) > 0.05


def test_a_subject_of_another_length_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"clean: has \d+ tokens and prompt \d+; with 'align'"):
        trace(llm, replace(QUESTION, swapped=("Mr Stone",)))


def test_it_is_drawn(traced: Traced, tmp_path: Path) -> None:
    save(tmp_path / "out", traced, QUESTION)
    assert (tmp_path / "out" / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "numbers.json").is_file()
