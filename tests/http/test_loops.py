# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` of a model that runs its layers several times for a token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.conformance import models
from tests.conformance.runner import LEAST_MOVE, READ_TOLERANCE, WRITE_TOLERANCE, Reference
from tests.http.checks import PROMPT
from tests.http.server import KEY, NAME, greedy, save_tokenizer, serve
from tests.support.serving import relative, vector
from vllm.entrypoints.serve.steering.client import SteeringClient, SteeringError

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long


def test_an_execution_is_a_layer(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Two layers, three times: six layers are served, and a vector acts in the one it names."""
    row = tiny_models.row("loopcoder")
    path = tiny_models.path(row.name)
    folder = tmp_path / "model"
    shutil.copytree(path, folder)
    save_tokenizer(folder)
    reference, added = Reference(row, models.load(row, path)), vector(1)
    read = {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}
    with (
        serve(folder, tmp_path / "server.log") as server,
        SteeringClient(server.url, steering_key=KEY, model=NAME) as client,
    ):
        assert client.layers()["num_layers"] == 6
        steer = {"post_block": {3: added.numpy()}}
        choice = client.complete(PROMPT, **greedy(capture=read, steering_vectors=steer)).choices[0]
        with pytest.raises(SteeringError, match="layer 6 is out of range, the model has 0-5"):
            client.complete(PROMPT, **greedy(steering_vectors={"post_block": {6: added.numpy()}}))
        client.set({"post_block": {1: added.numpy()}})
        shifted = client.complete(PROMPT, **greedy(capture=read)).choices[0]
    for done, steered in ((choice, 3), (shifted, 1)):
        token_ids = done.rows["post_block", 5].token_ids.tolist()
        delta = {("post_block", steered): added.expand(len(token_ids), -1)}
        want, plain = reference.run(token_ids, delta).rows, reference.run(token_ids).rows
        for site, rows in done.rows.items():
            values = torch.from_numpy(rows.values.copy())
            assert relative(values, want[site]) <= READ_TOLERANCE + WRITE_TOLERANCE
            if site[1] >= steered:
                assert relative(values, plain[site]) >= LEAST_MOVE
