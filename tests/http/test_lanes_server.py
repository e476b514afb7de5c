# SPDX-License-Identifier: Apache-2.0
"""A real server of a model whose stream has several lanes (Gemma 3n), by the OpenAI client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.zoo.sandwich import LANES
from tests.http.server import NAME, Server, save_tokenizer, serve
from tests.support.op_deltas import with_ops
from vllm.entrypoints.serve.steering.client import pack, read_rows

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.long

PROMPT = "Today I went"
SITE = ("post_block", 1)
LATER = ("post_block", 3)
EVERY = {"hooks": {"post_block": [1, 3]}, "positions": "all"}


@pytest.fixture(scope="module")
def lanes_server(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lanes")
    shutil.copytree(tiny_models.path("gemma3n"), folder / "model")
    save_tokenizer(folder / "model")
    with serve(folder / "model", folder / "server.log") as started:
        yield started


@pytest.fixture(scope="module")
def reference(tiny_models: TinyModels) -> check.Reference:
    row = tiny_models.row("gemma3n")
    return check.Reference(row, models.load(row, tiny_models.path("gemma3n")))


def made(seed: int, *shape: int) -> torch.Tensor:
    """float32 [*shape, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(*shape, models.HIDDEN, generator=generator)


def test_lanes_are_steered_and_read(lanes_server: Server, reference: check.Reference) -> None:
    """A vector in one lane, then an operation lane by lane; rows of all lanes, of one, and scores.

    The tokens that were fed come with the rows."""
    vector, direction, matrix = made(1), made(2, LANES), made(3, 2)
    clamp = {"op": "clamp", "point": SITE[0], "layers": SITE[1], "lo": 24.0, "hi": 24.0}
    fields = {
        "ignore_eos": True,
        "steering_vectors": {SITE[0]: {SITE[1]: {"vector": pack(vector.numpy()), "lane": 2}}},
        "steering": [{**clamp, "direction": pack(direction.numpy())}],
        "capture": {
            "inline": [EVERY, {**EVERY, "lane": 1}, {**EVERY, "project": pack(matrix.numpy())}],
        },
    }  # fmt: skip
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 4}
    with openai.OpenAI(base_url=f"{lanes_server.url}/v1", api_key="none", max_retries=0) as client:
        [choice] = client.completions.create(prompt=PROMPT, extra_body=fields, **asked).choices
    assert choice.model_extra is not None
    results = choice.model_extra["capture_results"]
    every, one, scores = (read_rows(results[f"inline[{i}]"]["payload"]) for i in range(3))
    read = every[SITE].token_ids.tolist()
    assert len(read) == len(PROMPT) + 3
    ops = [{**clamp, "direction": direction}]
    for lane, is_asked in ((2, True), (1, False)):
        delta = torch.zeros(LANES, models.HIDDEN)
        delta[lane] = vector
        added = {SITE: delta.flatten().expand(len(read), -1)}
        of_lane = reference.run(read, with_ops(reference, ops, added, read, len(PROMPT))).rows
        for site in (SITE, LATER):
            want = of_lane[site].unflatten(1, (LANES, -1))
            for rows, expected in ((every, want), (one, want[:, 1:2]), (scores, want @ matrix.T)):
                values = torch.from_numpy(rows[site].values.copy())
                assert values.shape == expected.shape
                error = check.worst_row(values.flatten(1), expected.flatten(1))
                if is_asked:
                    assert error < check.READ_TOLERANCE, site
                elif rows is every:
                    assert error > check.LEAST_MOVE, site
        chosen = rows[site].heads, one[site].heads
        assert chosen == (tuple(range(LANES)), (1,))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"capture": {"inline": {**EVERY, "lane": LANES}}}, "capture.inline.lane"),
        ({"capture": {"inline": {**EVERY, "lens": {"name": "logit"}}}}, "capture.inline.lens"),
        (
            {"capture": {"inline": {**EVERY, "project": {"modules": ["calm"]}}}},
            "capture.inline.project.modules",
        ),
        (
            {"steering_vectors": {"post_attn": {1: made(1).tolist()}}},
            "steering_vectors.post_attn",
        ),
        (
            {"steering_vectors": {"post_block": {1: made(1, LANES + 1).tolist()}}},
            "steering_vectors.post_block.1",
        ),
        (
            {
                "rules": [
                    {"name": "r", "point": "pre_attn", "layer": 0, "threshold": 0, "probe": []}
                ]
            },
            "rules[0]",
        ),
    ],
)
def test_what_is_refused_has_a_name(
    lanes_server: Server, fields: dict[str, Any], param: str
) -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, **fields}
    answer = lanes_server.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
