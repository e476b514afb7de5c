# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in bfloat16, and compiled, beside transformers on the same folder.

tests/real/test_smollm2.py has all that is not of a mode, in float32 and eager, and
tests/serving/test_compiled.py compiles a tiny model, both in the tier full. How far bfloat16 rounds
depends on the kind of CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance.engine import shut_down
from tests.support.real import CHAT, Real, first_layers, model_folder
from tests.support.real_checks import (
    CHUNK,
    check_rows,
    check_scores_means_and_prefix_cache,
    check_writes,
    hooks,
    inline,
    start,
)
from vllm.config.points import STREAM_POINTS

pytestmark = pytest.mark.long

MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "compiled": {"dtype": "float32", "enforce_eager": False},
    "bfloat16-compiled": {"dtype": "bfloat16", "enforce_eager": False},
}
COMPILED_LAYERS = 5
"""All would compile for a minute or two. Massive activations are made in these."""


@pytest.fixture(scope="module", params=MODES)
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Real]:
    mode, folder = MODES[request.param], model_folder()
    if not mode.get("enforce_eager", True):
        folder = first_layers(folder, COMPILED_LAYERS, tmp_path_factory.mktemp("real") / "first")
    made = start(folder=folder, **mode)
    config = made.llm.llm_engine.vllm_config
    assert made.dtype == getattr(torch, mode["dtype"])
    assert bool(config.compilation_config.mode) == ("compiled" in request.param)
    yield made
    shut_down(made.llm)


def chat(real: Real) -> list[int]:
    ids = real.tokens(real.chat_text(CHAT))
    assert len(ids) > CHUNK, "nothing is cut"
    return ids


def test_every_point_of_every_layer_is_read(real: Real) -> None:
    prompts = [chat(real), real.tokens("The capital of France is")]
    answers = real.ask([(prompt, inline(hooks(*STREAM_POINTS))) for prompt in prompts])
    check_rows(real, answers, [None] * len(answers))
    assert {site[1] for site in answers[0].rows} == set(real.layers)


def test_every_point_of_every_layer_is_written(real: Real) -> None:
    check_writes(real, chat(real))


def test_scores_means_and_the_prefix_cache(real: Real) -> None:
    check_scores_means_and_prefix_cache(real, chat(real))
