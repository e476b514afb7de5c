# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --compat easysteer`: its specifications in bodies."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.http.server import Server, greedy
from tests.peers.test_easysteer import broken
from tests.support.serving import relative, vector
from vllm.entrypoints.serve.steering.client import pack, read_rows

pytestmark = pytest.mark.full

PROMPT = "Today I went"
LAYER = 1
V = vector(31)
BODIES = 300
CAPTURE = {"inline": {"hooks": {"post_block": [LAYER]}, "positions": "all_prompt"}}


def rows(server: Server, **fields: Any) -> torch.Tensor:
    """[prompt, hidden] at LAYER."""
    [choice] = server.complete(PROMPT, capture=CAPTURE, **fields)["choices"]
    read = read_rows(choice["capture_results"]["inline"]["payload"])
    return torch.tensor(read["post_block", LAYER].values)


def given(**more: Any) -> dict[str, Any]:
    vectors = [{"data": pack(V.numpy()), "layers": [LAYER], "scale": 0.5, **more}]
    return {"steering": {"vectors": vectors}}


def test_what_is_asked_is_done(server: Server) -> None:
    plain = rows(server)
    moved = rows(server, **given()) - plain
    assert relative(moved, 0.5 * V.expand_as(moved)) < 1e-4
    listed = rows(server, **given(data=V.tolist())) - plain
    assert relative(listed, 0.5 * V.expand_as(moved)) < 1e-4
    kept = rows(server, **given(normalize=True))
    assert relative(kept.norm(dim=-1), plain.norm(dim=-1)) < 1e-4
    assert relative(kept, plain) > 1e-2
    first = rows(server, **given(apply={"prompt_positions": [0], "generation": "none"}))
    assert relative(first[0] - plain[0], 0.5 * V) < 1e-4
    assert relative((first - plain)[1:], 0.5 * V.expand_as(moved)[1:]) > 0.5  # the twin


def test_what_is_wrong_is_named(server: Server) -> None:
    rng = random.Random(2)
    before, refused = rows(server, **given()), 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(BODIES):
            body = greedy(prompt=PROMPT, steering=broken(rng, width=V.numel()))
            answer = client.post("/v1/completions", content=json.dumps(body).encode())
            if answer.status_code != 200:  # what it became may be right again
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"].startswith("steering"), answer.text
                assert len(answer.text) < 2000
                refused += 1
    assert refused > 0.8 * BODIES
    after = rows(server, **given())
    assert np.array_equal(after.numpy(), before.numpy())
