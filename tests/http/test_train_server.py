# SPDX-License-Identifier: Apache-2.0
"""Training over a running server finds the same bytes as over an engine of this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import engine
from tests.http.server import NAME
from vllm.pilot import EngineBench, Odds, Pairs, ServerBench, save_trained, train

if TYPE_CHECKING:
    from tests.http.server import Server

pytestmark = pytest.mark.full


def test_a_server_and_an_engine_are_alike(server: Server, model: Path, tmp_path: Path) -> None:
    words = ("one", "two", "six", "ten", "red", "sea")
    pairs = Pairs.of([f"good {word}" for word in words], [f"a bad {word}" for word in words])
    asked = Pairs.of([" yes"], [" no"], "Well")
    settings: dict[str, Any] = {"scales": (8.0,), "candidates": 1, "randoms": 1, "max_nats": 100.0}
    metrics = (Odds(asked), Odds(asked))
    options: dict[str, Any] = {
        "enable_steering": True,
        "capture_consumers": ["inline"],
        "max_logprobs": -1,
    }
    over_http = train(ServerBench(server.url, model=NAME), pairs, metrics=metrics, **settings)
    with engine(model, skip_tokenizer_init=False, **options) as llm:
        here = train(EngineBench(llm), pairs, metrics=metrics, **settings)
    assert torch.equal(over_http.directions.vectors, here.directions.vectors)
    assert over_http.choice.layer == here.choice.layer
    assert over_http.evidence.effect == pytest.approx(here.evidence.effect, abs=1e-4)
    assert here.evidence.effect[0] != pytest.approx(here.evidence.effect[2], abs=1e-3)
    assert over_http.evidence.changed_by_zero == here.evidence.changed_by_zero == 0
    saved = [save_trained(t, tmp_path / name) for t, name in ((over_http, "a"), (here, "b"))]
    assert all((folder / "report.html").is_file() for folder in saved)
