# SPDX-License-Identifier: Apache-2.0
"""Training over a running server finds the same bytes as over an engine of this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance.engine import engine
from tests.http.server import NAME
from vllm.pilot import EngineBench, Odds, Pairs, ServerBench, Trained, save_trained, train

if TYPE_CHECKING:
    from tests.http.server import Server

pytestmark = pytest.mark.full

VECTORS = (".safetensors", ".gguf")


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
    nearly = here.directions.vectors * (1 + 1e-6)
    # Whether a direction of six pairs holds is not asked here, but vectors are written if it does.
    evidence = replace(here.evidence, strength=1e9, error=0.0)
    made = {
        name: saved(replace(trained, model=NAME, evidence=evidence), tmp_path / name / "happy")
        for name, trained in {
            "server": over_http,
            "engine": here,
            "twin": replace(here, directions=replace(here.directions, vectors=nearly)),
        }.items()
    }
    assert made["server"].keys() == {"happy.safetensors", "happy.gguf", "all_layers.safetensors"}
    assert made["server"] == made["engine"]
    assert all(made["twin"][name] != file for name, file in made["engine"].items())


def saved(trained: Trained, folder: Path) -> dict[str, bytes]:
    """The files of vectors."""
    save_trained(trained, folder)
    assert (folder / "report.html").is_file()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in VECTORS}
