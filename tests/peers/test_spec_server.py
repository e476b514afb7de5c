# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --compat hotwire interp-engine` with the real openai client: their requests against
requests of ours, row by row, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from tests.conformance.runner import LEAST_MOVE
from tests.http.server import KEY, NAME, Server
from tests.peers.test_easysteer_server import CAPTURE, LAYER, PROMPT, V, W, at, complete, op
from tests.support.serving import relative
from vllm.entrypoints.serve.steering.client import SteeringClient, pack, read_rows

pytestmark = pytest.mark.full

CAR = {"id": "car", "layer": LAYER, "scale": 0.7}


def hotwire(*specs: dict[str, Any]) -> dict[str, Any]:
    return {"vllm_xargs": {"hotwire": json.dumps([*specs] if len(specs) > 1 else specs[0])}}


def specs(method: str, vector: Any = V, **keys: Any) -> dict[str, Any]:
    op = {"method": method, "vector": vector, **keys}
    return {"steering": [{"point": "resid_post", "layers": {str(LAYER): [op]}}]}


MEANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hotwire": (hotwire(CAR), {"steering_vectors": at(LAYER, scale=0.7)}),
    "hotwire, decode_only": (
        hotwire({**CAR, "decode_only": True}),
        {"decode_steering_vectors": at(LAYER, scale=0.7)},
    ),
    "interp-engine": (
        specs("orthogonal", coeff=0.25),
        {"steering": [op("ablate", direction=V, strength=0.75)]},
    ),
    "interp-engine, packed": (
        specs("additive", pack(V), scale=9.0, normalize=True),
        {"steering_vectors": at(LAYER, scale=9.0 / float(torch.tensor(V).norm()))},
    ),
    "interp-engine, two packed": (
        specs("swap", pack(V), target=pack(W)),
        specs("swap", target=W),
    ),
}
"""A request, and one for the same."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    modules = {f"car.{LAYER}": at(LAYER), f"car.{LAYER}.decode": {"decode_vectors": at(LAYER)}}
    with SteeringClient(server.url, steering_key=KEY) as ours:
        for name, module in modules.items():
            ours.register_module(name, module)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made
        for name in modules:
            ours.unregister_module(name)


@pytest.mark.parametrize("name", MEANS)
def test_a_request_is_the_same_as_ours(client: openai.OpenAI, name: str) -> None:
    said, ours = MEANS[name]
    text, rows = complete(client, said)
    same_text, same_rows = complete(client, ours)
    assert text == same_text
    assert relative(rows, same_rows) <= 1e-5
    assert relative(rows, complete(client, {})[1]) >= LEAST_MOVE  # the twin


def test_addresses(client: openai.OpenAI) -> None:
    def rows(hooks: Any) -> dict[Any, Any]:
        answer = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=1, temperature=0,
            extra_body={"capture": {"inline": {**CAPTURE["inline"], "hooks": hooks}}},
        )  # fmt: skip
        extra = answer.choices[0].model_extra
        assert extra is not None
        return read_rows(extra["capture_results"]["inline"]["payload"])

    theirs = rows(["resid_pre.1", "z.2"])
    ours = rows({"pre_attn": [1], "z": [2]})
    assert theirs.keys() == ours.keys() == {("pre_attn", 1), ("z", 2)}
    assert all((theirs[site].values == ours[site].values).all() for site in ours)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (hotwire({**CAR, "id": "cat"}), "steering_modules[0]", "unknown module"),
        (hotwire({**CAR, "layer": 9}), "vllm_xargs.hotwire.layer", "has no layer 9"),
        (hotwire(CAR, CAR), "vllm_xargs.hotwire[1]", "hotwire keeps the last"),
        (
            {**hotwire(CAR), "steering_vectors": at(LAYER)},
            "steering_vectors",
            "cannot be combined",
        ),
        (specs("additive", scale="x"), "steering[0].layers.1[0].scale", "must be a number"),
        (specs("reft"), "steering[0].layers.1[0].method", "unknown method"),
        ({"capture": {"inline": {"hooks": ["mlp_act.1"]}}}, "capture.inline.hooks[0]", "not read"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_what_is_refused_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            client.completions.create(
                model=NAME, prompt=PROMPT, max_tokens=2, extra_body=dict(fields), stream=stream
            )
        assert raised.value.param is not None and raised.value.param.startswith(param)
