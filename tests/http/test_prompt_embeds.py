# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings to a real server: `prompt_embeds` of a completion."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.http.checks import LAYER, PROMPT, READ, STEER, answered
from tests.http.server import KEY, NAME, Server, greedy, serve
from vllm.entrypoints.serve.steering.client import Choice, SteeringClient, SteeringError
from vllm.v1.capture import NO_TOKEN

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def embedding_client(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SteeringClient]:
    log = tmp_path_factory.mktemp("embeds-log") / "server.log"
    with serve(model, log, "--enable-prompt-embeds") as server:
        assert isinstance(server, Server)
        with SteeringClient(server.url, steering_key=KEY, model=NAME) as client:
            yield client


def embeds(model: Path, token_ids: list[int]) -> str:
    """As upstream's server takes them."""
    (table,) = (t for n, t in load_file(model / "model.safetensors").items() if "embed_tokens" in n)
    file = io.BytesIO()
    torch.save(table[token_ids].float().clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def ask(client: SteeringClient, given: str, stream: bool, fields: dict[str, Any]) -> Choice:
    return answered(client, None, greedy(prompt_embeds=given, **fields), stream)


@pytest.mark.parametrize("stream", [False, True])
def test_embeddings(embedding_client: SteeringClient, model: Path, stream: bool) -> None:
    """Rows and text are those of the same prompt as text, steered and not."""
    for fields in ({"capture": READ}, {"capture": READ, "steering_vectors": STEER}):
        told = answered(embedding_client, PROMPT, greedy(**fields), stream)
        (rows,) = (rows for (_, layer), rows in told.rows.items() if layer == LAYER)
        prompt = rows.token_ids[: len(PROMPT)].tolist()  # a token for each character
        given = embeds(model, prompt)
        choice = ask(embedding_client, given, stream, fields)
        assert choice.text == told.text
        (own,) = (rows for (_, layer), rows in choice.rows.items() if layer == LAYER)
        assert own.positions.tolist() == rows.positions.tolist()
        in_prompt = own.positions < len(prompt)
        assert (own.token_ids[in_prompt] == NO_TOKEN).all()
        assert (own.token_ids[~in_prompt] == rows.token_ids[~in_prompt]).all()
        assert abs(own.values - rows.values).max() <= 1e-4 * abs(rows.values).max()
        other = ask(embedding_client, embeds(model, prompt[::-1]), stream, fields)
        (moved,) = (rows for (_, layer), rows in other.rows.items() if layer == LAYER)
        assert abs(moved.values - rows.values).max() > 0.1 * abs(rows.values).max()


def test_text_is_refused(embedding_client: SteeringClient, model: Path) -> None:
    asked = {"inline": {**READ["inline"], "positions": {"text": "went"}}}
    with pytest.raises(SteeringError, match="means tokens, and the prompt was given as embed"):
        ask(embedding_client, embeds(model, [1, 2, 3]), False, {"capture": asked})
