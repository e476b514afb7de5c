# SPDX-License-Identifier: Apache-2.0
"""Learning on SmolLM2: what the examples make holds and is served; estimates beside a sweep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples import learned_steering, token_highlighter
from tests.support.real import model_folder
from vllm.pilot.learn import TorchModel
from vllm.pilot.learn.highlighting import AFFIRMATION, EMBEDDING, scaled
from vllm.pilot.learn.losses import completion_nats
from vllm.pilot.rows import Encoded

pytestmark = pytest.mark.long


def test_four_methods_are_learned_and_served(tmp_path: Path) -> None:
    model = str(model_folder())
    found = learned_steering.make(model, tmp_path)
    assert {method for method, made in found.items() if made.evidence.held} >= {
        "gradient",
        "bipo",
        "reft",
    }
    compared = learned_steering.serve(model, tmp_path)
    print(compared)
    scores = {result.way: result.score for result in compared.results}
    assert {"plain", "prompt", "caa", "feature", "gradient", "bipo", "reft"} <= set(scores)
    assert max(scores["gradient"], scores["reft"]) > scores["plain"]


def test_highlighted_tokens(tmp_path: Path) -> None:
    model = str(model_folder())
    found = token_highlighter.find(model, tmp_path)
    assert (tmp_path / "tokens.png").is_file()
    plain, removed = found.affirmation
    assert removed < plain - 0.3
    # As many tokens of the least influence do less.
    order = np.argsort(found.influence)[: len(found.chosen)]
    model_in_torch = TorchModel.load(model)
    answer = model_in_torch.encode(AFFIRMATION, special=False)
    whole = Encoded([*found.ids, *answer], len(found.ids))
    least = scaled([found.counted[at] for at in order], found.factor)
    with torch.no_grad():
        nats = float(completion_nats(model_in_torch, [whole], {EMBEDDING: least}))
    print(f"affirmation {plain:.2f}, removed {removed:.2f}, others removed {nats:.2f}")
    assert removed < nats < plain
    answers = token_highlighter.answer(model, found)
    assert answers["plain"] != answers["removed"]


def test_estimates_beside_the_sweep(tmp_path: Path) -> None:
    """One gradient and the exact patches, of a capital; integrated gradients are nearer."""
    from tests.conformance.engine import engine
    from vllm.pilot import patch_sweep
    from vllm.pilot.learn import attribute

    model = model_folder()
    clean, prompt = "The capital of France is", "The capital of Italy is"
    with engine(
        model,
        skip_tokenizer_init=False,
        enable_steering=True,
        steering_families=["replace"],
        capture_consumers=["inline"],
        kv_cache_memory_bytes=1 << 28,
        max_num_seqs=64,
    ) as llm:
        sweep = patch_sweep(llm, prompt, clean, answer=" Paris", other=" Rome")
    loaded = TorchModel.load(str(model))
    correlations = []
    for steps in (None, 8):
        found = attribute(loaded, prompt, clean, answer=" Paris", other=" Rome", steps=steps)
        assert found.corrupt == pytest.approx(sweep.corrupt, abs=1e-3)
        correlations.append(found.correlation(sweep))
        found.draw(tmp_path / f"beside-{steps}.png", sweep)
        print(f"steps {steps}: correlation {correlations[-1]:.3f} of {found.values.size} cells")
    assert correlations[0] > 0.9 and correlations[1] > 0.95
