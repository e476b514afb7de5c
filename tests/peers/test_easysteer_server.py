# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --compat easysteer` with the real openai client: specifications of EasySteer against
requests of ours, row by row, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest
import torch

from tests.conformance.runner import LEAST_MOVE
from tests.http.server import KEY, NAME, Server
from tests.support.serving import relative, vector
from vllm.entrypoints.serve.steering.client import SteeringClient, pack, read_rows

pytestmark = pytest.mark.full

PROMPT = "Today I went"
LENGTH = len(PROMPT)
LAYER, GENERATED = 1, 4
V, W, ROW = (vector(seed).tolist() for seed in (31, 32, 33))
CAPTURE = {"inline": {"hooks": {"post_block": "all"}, "positions": "all"}}
Fields = Mapping[str, Any]


def at(*layers: int, **entry: Any) -> dict[str, Any]:
    return {"post_block": {layer: {"vector": V, **entry} for layer in layers}}


def op(name: str, **fields: Any) -> dict[str, Any]:
    return {"op": name, "point": "post_block", "layers": [LAYER], **fields}


def one(**fields: Any) -> dict[str, Any]:
    return {"vectors": [{"data": V, "layers": [LAYER], **fields}]}


def where(**apply: Any) -> dict[str, Any]:
    return one(apply=apply)


def several(conflict: str, *vectors: dict[str, Any]) -> dict[str, Any]:
    given = [{"data": V, "layers": [LAYER], **each} for each in vectors]
    return {"vectors": given, "conflict": conflict}


FIRST, SECOND = (
    {"start": start, "stop": stop, "of": "generated"} for start, stop in ((0, 1), (1, 2))
)
MEANS: dict[str, tuple[dict[str, Any], Fields]] = {
    "direct": (one(scale=0.5, layers=[1, 2]), {"steering_vectors": at(1, 2, scale=0.5)}),
    "a vector a layer": (
        {"vectors": [{"data": {"1": V, "2": W}}]},
        {"steering_vectors": {"post_block": {1: V, 2: W}}},
    ),
    "packed": (one(data=pack(V)), {"steering_vectors": at(LAYER)}),
    "normalize": (
        one(normalize=True, scale=0.8),
        {"steering": [op("add", vector=V, scale=0.8), op("normalize")]},
    ),
    "erase": (one(algorithm="erase"), {"steering": [op("ablate", direction=V)]}),
    "replace": (
        one(algorithm="replace", data=ROW, apply={"prompt": "none"}),
        {"steering": [op("replace", values=ROW, positions="all_generated")]},
    ),
    "prompt alone": (where(generation="none"), {"prefill_steering_vectors": at(LAYER)}),
    "generation alone": (where(prompt="none"), {"decode_steering_vectors": at(LAYER)}),
    "prompt_positions, prompt_window": (
        where(prompt_positions=[2, -1], prompt_window=[4, 6], generation="none"),
        {"steering_vectors": at(LAYER, positions=[2, 4, 5, LENGTH - 1])},
    ),
    "prompt_tokens": (
        where(prompt_tokens=[0], generation="none"),  # "a"
        {"steering_vectors": at(LAYER, positions=[PROMPT.index("a")])},
    ),
    "generation_window": (
        where(generation_window=[0, 1], prompt="none"),
        {"steering_vectors": at(LAYER, positions=FIRST)},
    ),
    "generation_positions": (
        where(generation_positions=[1]),
        {"steering_vectors": at(LAYER, positions=["all_prompt", SECOND])},
    ),
    "exclude_": (
        where(exclude_prompt_positions=[0, 2], exclude_generation_window=[1, 2]),
        {"steering_vectors": at(LAYER, positions=["all", {"except": [0, 2, LENGTH + 1]}])},
    ),
    "sequential": (
        several("sequential", {"algorithm": "erase", "data": W}, {}),
        {"steering": [op("ablate", direction=W), op("add", vector=V)]},
    ),
    "priority": (
        several("priority", {"apply": {"generation": "none"}}, {"scale": -0.5}),
        {"prefill_steering_vectors": at(LAYER), "decode_steering_vectors": at(LAYER, scale=-0.5)},
    ),
    "error": (
        several(
            "error",
            {"apply": {"generation": "none"}},
            {"apply": {"prompt": "none"}, "scale": -0.5},
        ),
        {"prefill_steering_vectors": at(LAYER), "decode_steering_vectors": at(LAYER, scale=-0.5)},
    ),
    "a module by name": (
        {"vectors": [{"source": "happy", "scale": 0.4}]},
        {"steering_vectors": at(LAYER, scale=0.4)},
    ),
}
"""A specification, and our request for the same."""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with SteeringClient(server.url, steering_key=KEY) as ours:
        ours.register_module("happy", at(LAYER))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made
        ours.unregister_module("happy")


def complete(client: openai.OpenAI, fields: Fields) -> tuple[str, torch.Tensor]:
    """The text, and [layers, n, hidden] of all layers."""
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=GENERATED, temperature=0,
        extra_body={"ignore_eos": True, "capture": CAPTURE, **fields},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.model_extra is not None
    rows = read_rows(choice.model_extra["capture_results"]["inline"]["payload"])
    return choice.text, torch.stack([torch.from_numpy(rows[s].values.copy()) for s in sorted(rows)])


@pytest.mark.parametrize("name", MEANS)
def test_a_specification_is_the_same_as_ours(client: openai.OpenAI, name: str) -> None:
    spec, ours = MEANS[name]
    text, rows = complete(client, {"steering": spec})
    same_text, same_rows = complete(client, ours)
    assert text == same_text
    assert rows.shape == (4, LENGTH + GENERATED - 1, len(V))
    assert relative(rows, same_rows) <= 1e-5
    _, plain = complete(client, {})
    moved = (rows - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert moved.max() >= LEAST_MOVE  # the twin


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    spec, ours = MEANS["normalize"]
    said: list[Any] = [{"role": "user", "content": PROMPT}]
    asked: dict[str, Any] = {
        "model": NAME, "messages": said, "max_tokens": GENERATED, "temperature": 0,
    }  # fmt: skip
    texts = []
    for fields in ({"steering": spec}, ours):
        body = {"ignore_eos": True, **fields}
        answer = client.chat.completions.create(**asked, extra_body=body)
        chunks = client.chat.completions.create(**asked, extra_body=body, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        texts += [answer.choices[0].message.content, streamed]
    assert len(set(texts)) == 1
    plain = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert plain.choices[0].message.content != texts[0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"steering": one(algorithm="loreft")}, "steering.vectors[0].algorithm", "there are"),
        ({"steering": one(params={"rank": 4})}, "steering.vectors[0].params", "nothing reads"),
        (
            {"steering": {"vectors": [{"source": "/models/happy.gguf"}]}},
            "steering.vectors[0].source",
            "no path",
        ),
        (
            {"steering": {"vectors": [{"source": "nobody"}]}},
            "steering_modules[0]",
            "unknown module",
        ),
        (
            {"steering": where(generation_tokens=[5])},
            "steering.vectors[0].apply.generation_tokens",
            "not known before",
        ),
        (
            {"steering": several("sequential", {"normalize": True}, {})},
            "steering.vectors",
            "mix vectors",
        ),
        ({"steering": several("sum", {}, {})}, "steering.conflict", "must be sequential"),
        (
            {"steering": several("error", {}, {})},
            "steering.conflict",
            "positions are known only with the prompt",
        ),
        ({"steering": one(data=V[:-1])}, "steering[0].vector", "the model needs 96"),
        ({"steering": one(layers=[99])}, "steering[0].layers", "out of range"),
        ({"steering": where(prompt_positions=[50])}, "steering[0].positions", "out of reach"),
        (
            {"steering": one(hidden=1)},
            "steering.vectors[0]",
            r"unknown keys \['hidden'\], allowed are",
        ),
        (
            {"steering": one(), "steering_vectors": at(LAYER)},
            "steering_vectors",
            "cannot be combined",
        ),
        ({"steer_vector_request": {"path": "x"}}, "steer_vector_request", "is for EasySteer"),
        ({"steer_vector": {"path": "x"}}, "steer_vector", "is for EasySteer"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_what_is_refused_is_refused_by_name(
    client: openai.OpenAI, fields: Fields, param: str, message: str
) -> None:
    """And streamed alike."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            client.completions.create(
                model=NAME, prompt=PROMPT, max_tokens=2, extra_body=dict(fields), stream=stream
            )
        assert raised.value.param is not None and raised.value.param.startswith(param)


def test_ours_are_understood_beside(client: openai.OpenAI) -> None:
    """A list is ours, with the door open too."""
    text, rows = complete(client, {"steering": [op("add", vector=V)]})
    assert complete(client, {"steering_vectors": at(LAYER)})[0] == text
    assert relative(rows, complete(client, {})[1]) >= LEAST_MOVE
