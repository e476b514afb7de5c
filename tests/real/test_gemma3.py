# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M, weights that people have, beside transformers on the same folder.

It has what SmolLM2 has not: norms on both sides of each branch, norms of queries and keys, windows
of 512 tokens in five layers of six with a rotary of their own, and embeddings that are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.conformance.engine import shut_down
from tests.conformance.tiny import SANDWICH
from tests.support.real import Real, errors, model_folder, rows_of
from tests.support.real_checks import (
    BRANCHES,
    CHUNK,
    ENDS,
    EVERYTHING,
    check_log_probs,
    check_rows,
    check_writes,
    hooks,
    inline,
    start,
)
from vllm import SamplingParams
from vllm.config.points import HEAD_POINTS, STREAM_POINTS
from vllm.pilot.checkpoints import GEMMA3

pytestmark = pytest.mark.long

BOS = 2
LONG = 540
"""Tokens of a prompt that is longer than the window."""


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    """In float32, eager, with all points and families."""
    made = start(
        "float32",
        model_folder(GEMMA3),
        SANDWICH,
        **EVERYTHING,
        max_model_len=LONG + 20,
        kv_cache_memory_bytes=256 << 20,
    )
    yield made
    shut_down(made.llm)


@pytest.fixture(scope="module")
def long(real: Real) -> list[int]:
    """A prompt of English that is longer than the window and cut into chunks."""
    ids = real.tokens((ROOT / "LICENSE").read_text())[:LONG]
    model: Any = real.exact
    assert len(ids) > model.config.sliding_window > CHUNK
    return ids


def short(real: Real) -> list[int]:
    return real.tokens("The capital of France is")


def test_the_tokenizer_puts_the_beginning_first(real: Real) -> None:
    """In transformers, and once in the engine."""
    text = "The capital of France is"
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    [output] = real.llm.generate([text], greedy, use_tqdm=False)
    assert output.prompt_token_ids == real.tokens(text)
    assert [token == BOS for token in real.tokens(text)] == [True, *[False] * 5]


def test_every_point_of_every_layer_is_read(real: Real, long: list[int]) -> None:
    asked = inline(hooks(*STREAM_POINTS, *ENDS, *BRANCHES))
    answers = real.ask([(prompt, asked) for prompt in (long, short(real))])
    check_rows(real, answers, [None] * len(answers))
    assert {site[1] for site in answers[0].rows} == set(real.layers)


def test_heads_are_read(real: Real, long: list[int]) -> None:
    answers = real.ask([(prompt, inline(hooks(*HEAD_POINTS))) for prompt in (long, short(real))])
    check_rows(real, answers, [None] * len(answers))
    for site, rows in answers[0].rows.items():
        if site[0] in "qz":
            want = rows_of(real.run("exact", answers[0].ids))[site]
            assert errors(rows.roll(1, 1), want)[0] > 0.1, f"{site}: heads are alike"


def test_every_point_of_every_layer_is_written(real: Real) -> None:
    check_writes(real, short(real))


def test_single_sites_move_the_answer_as_in_transformers(real: Real) -> None:
    """A layer that sees all, and layers with windows."""
    prompt = real.tokens("def add(a, b):\n    return")
    plain = real.run("exact", prompt)
    generator = torch.Generator().manual_seed(8)
    for layer in (0, 11, real.layers[-1]):
        for point in STREAM_POINTS:
            rows = plain.rows[point, layer]
            vector = torch.randn(rows.shape[-1], generator=generator)
            vector = vector * float(rows.norm(dim=-1).median() / vector.norm())
            [answer] = real.ask([(prompt, {"steering_vectors": {point: {layer: vector}}})], 20)
            check_log_probs(answer, real, {(point, layer): vector.expand(len(answer.ids), -1)})


def test_the_prefix_cache(real: Real, long: list[int]) -> None:
    """Rows behind a prefix of which most blocks are out of the window."""
    real.ask([(long, {})])
    last = {"hooks": {"post_block": "all"}, "positions": "predicting"}
    [again] = real.ask([(long, inline(last))])
    assert again.output.num_cached_tokens > CHUNK, "no prefix was cached"
    exact, same = real.both(again.ids)
    at = slice(len(long) - 1, None)
    for layer in real.layers:
        site = "post_block", layer
        got, want = again.captured["inline"][site], exact.rows[site]
        assert got.positions.tolist() == list(range(len(long) - 1, len(again.ids)))
        most = real.allowed(errors(same.rows[site], want))[1]
        assert errors(got.values, want[at])[1] <= most
        assert errors(got.values.roll(1, 0), want[at])[1] > 10 * most
