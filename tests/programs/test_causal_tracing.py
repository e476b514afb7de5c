# SPDX-License-Identifier: Apache-2.0
"""The causal-tracing example, on a model made in a second: what must hold for any model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from demo.train import Recipe, cached_model
from examples.causal_tracing import Question, Traced, Tracer, replace, save, start
from tests.conformance.engine import shut_down

pytestmark = pytest.mark.full

TINY = Recipe(hidden=64, heads=2, layers=3, intermediate=64, passages=300, steps=4)
EXACT = 1e-5
"""In nats. The effects are far larger, though the model knows nothing."""


@pytest.fixture(scope="module")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracer]:
    model = cached_model(tmp_path_factory.mktemp("model"), TINY, Console(quiet=True))
    llm = start(model, "float32")
    yield Tracer(llm, Question())
    shut_down(llm)


@pytest.fixture(scope="module")
def traced(tracer: Tracer) -> Traced:
    return tracer.trace()


def test_the_subject_is_found_by_its_text(tracer: Tracer) -> None:
    found = "".join(tracer.tokens[p] for p in tracer.subject)
    assert found.strip() == "Lady Finch"
    assert "".join(tracer.tokens) == Question().prompt


def test_restoring_brings_back_the_clean_answer(tracer: Tracer) -> None:
    """All rows behind any block, or the corrupted ones where they enter: nothing is left of the
    other one. Rows of the corrupted run put in where they were restore nothing."""
    wrong = tracer.corrupt("Judge Barrow")
    layers, positions = tracer.clean_rows.shape[:2]
    every = list(range(positions))
    wholly = [[wrong, tracer.restore(layer, every)] for layer in range(layers)]
    undone = [wrong, replace("pre_attn", 0, tracer.subject, tracer.subject_rows)]
    kept = [wrong, replace("pre_attn", 0, tracer.subject, wrong["values"])]
    faint = [wrong, {**tracer.restore(1, every), "alpha": 0.0}]
    clean, corrupted, again, null, *restored = tracer.odds(
        [[], [wrong], kept, faint, undone, *wholly]
    )
    assert all(abs(odds - clean) < EXACT for odds in restored)
    assert abs(again - corrupted) < EXACT and abs(null - corrupted) < EXACT
    assert abs(corrupted - clean) > 100 * EXACT


def test_what_must_hold_of_any_heat_map(traced: Traced) -> None:
    recovered = traced.recovered
    layers, positions = recovered.shape
    assert (layers, positions) == (3, len(traced.tokens))
    assert float((traced.corrupted - traced.clean).abs().min()) > 100 * EXACT
    # The answer is computed from the last row alone, and rows before the subject were never lost.
    assert recovered[-1, -1] == pytest.approx(1.0, abs=1e-2)
    before = recovered[:, : traced.subject[0]]
    assert before.numel() and float(before.abs().max()) < 1e-2
    assert torch.equal(recovered[-1, :-1].round(decimals=1), torch.zeros(positions - 1))
    # Between the two there is something to see.
    between = recovered[:-1, traced.subject[0] :]
    assert float(between.abs().max()) > 0.05


def test_a_subject_of_another_length_is_refused(tracer: Tracer) -> None:
    with pytest.raises(ValueError, match=r"'Mr Stone' has \d tokens, not 2"):
        tracer.corrupt("Mr Stone")


def test_it_is_drawn(traced: Traced, tmp_path: Path) -> None:
    save(tmp_path / "out", traced, Question())
    assert (tmp_path / "out" / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "numbers.json").is_file()
