# SPDX-License-Identifier: Apache-2.0
"""The answer that clients of upstream's `extract_hidden_states` get: its key, and that file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.models import HIDDEN, LAYERS
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE
from tests.http.checks import PROMPT, SAID, Reference
from tests.http.server import Server, greedy, serve
from tests.peers.packages import folder_of
from tests.support import draft_data
from tests.support.serving import relative
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

pytestmark = pytest.mark.full

KEY = "hidden_states_path"
IDS = [2, 3, LAYERS]
"""Layer ids as upstream counts them: N is what the N-th block gives."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def consumer_of(root: Path) -> str:
    """The option by which every request gets the rows of its prompt in a file."""
    consumer = {
        "name": "filesystem",
        "root": str(root),
        "layout": "ehs",
        KEY: True,
        "capture": {"hooks": {"post_block": [n - 1 for n in IDS]}, "positions": "all_prompt"},
    }
    return f"--capture-consumers={json.dumps(consumer)}"


@pytest.fixture(scope="module")
def extractor(
    model: Path, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("extractor-log") / "server.log"
    with serve(model, log, consumer_of(written)) as started:
        yield started


def states_of(reference: Reference, token_ids: list[int]) -> torch.Tensor:
    """[tokens, ids, hidden] of transformers."""
    rows = reference.rows(token_ids, {})
    return torch.stack([rows[n - 1] for n in IDS], dim=1)


def check(found: dict[str, torch.Tensor], reference: Reference, token_ids: list[int]) -> None:
    states = found["hidden_states"]
    assert states.dtype == torch.float32 and states.shape == (len(token_ids), len(IDS), HIDDEN)
    assert found["token_ids"].dtype == torch.int64 and found["token_ids"].tolist() == token_ids
    want = states_of(reference, token_ids)
    assert relative(states, want) <= READ_TOLERANCE
    assert relative(states, want.roll(1, dims=1)) >= LEAST_MOVE
    assert relative(states, states_of(reference, [token_ids[-1], *token_ids[1:]])) >= LEAST_MOVE


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/chat/completions", {"messages": SAID}),
    ],
    ids=["text", "token ids", "chat"],
)
def test_the_answer_names_the_file(
    extractor: Server, reference: Reference, written: Path, path: str, asked: dict[str, Any]
) -> None:
    answer = extractor.post(path, greedy(**asked, max_tokens=1, return_token_ids=True)).json()
    token_ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    named = answer["kv_transfer_params"][KEY]
    assert Path(named).is_relative_to(written) and os.path.isabs(named)
    check(load_hidden_states(named), reference, token_ids)
    cleanup_hidden_states(named)
    assert not Path(named).exists() and not Path(named + ".lock").exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"capture": {"filesystem": {"hooks": {"post_block": [1]}, "layout": "packed"}}},
        {"capture": {"inline": {"hooks": {"post_block": [1]}}}, "n": 2, "temperature": 1.0},
    ],
    ids=["another layout", "two answers"],
)
def test_no_path_where_there_is_no_such_file(extractor: Server, asked: dict[str, Any]) -> None:
    answer = extractor.complete(**asked)
    assert answer["kv_transfer_params"] is None
    assert extractor.complete()["kv_transfer_params"].keys() == {KEY}


@pytest.mark.long
@pytest.mark.parametrize("more", [(), (f"--capture-stop-after={LAYERS - 1}",)], ids=["", "no head"])
def test_speculators_as_it_was_published(
    model: Path, reference: Reference, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Its command and its data set, each of which checks tokens, shapes and numbers itself."""
    packages = folder_of("draft-data")
    settings = {**os.environ, "PYTHONPATH": str(packages), "CUDA_VISIBLE_DEVICES": ""}
    with serve(model, tmp_path / "log", consumer_of(tmp_path / "states"), *more) as server:
        ran = subprocess.run(
            [sys.executable, draft_data.__file__, f"{server.url}/v1", str(tmp_path)],
            env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert ran.returncode == 0 and "items 3" in ran.stdout, ran.stderr[-3000:]
    live = torch.load(tmp_path / "live.pt")
    for number, token_ids in enumerate(draft_data.PROMPTS):
        check(
            load_file(tmp_path / "hidden_states" / f"hs_{number}.safetensors"),
            reference,
            token_ids,
        )
        item, want = live[number], states_of(reference, token_ids)
        assert item["input_ids"].tolist() == token_ids
        assert item["hidden_states"].shape == (len(token_ids), (len(IDS) - 1) * HIDDEN)
        assert relative(item["hidden_states"].float(), want[:, :-1].flatten(1)) <= 0.01
        assert relative(item["verifier_last_hidden_states"].float(), want[:, -1]) <= 0.01
        assert relative(item["verifier_last_hidden_states"].float(), want[:, 0]) >= LEAST_MOVE
