# SPDX-License-Identifier: Apache-2.0
"""`/inference/v1/generate`, tokens in and tokens out, as trainers of policies use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.models import HIDDEN
from tests.http.checks import LAYER, PROMPT, READ, STEER, VECTOR, Reference, check_rows
from tests.http.server import NAME, Server, serve
from tests.peers.packages import folder_of
from tests.support import trl_client
from vllm.entrypoints.serve.steering.client import Choice, SteeringClient, joined
from vllm.entrypoints.serve.steering.client.answers import read_choice

pytestmark = pytest.mark.full

PATH = "/inference/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def server(model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("generate-log") / "server.log"
    writer = f"--capture-consumers=filesystem:root={root}"
    with serve(model, log, "--enable-scale-out", writer) as started:
        yield started


def body(reference: Reference, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    ids = reference.tokenizer(PROMPT)["input_ids"]
    return {"token_ids": ids, "sampling_params": {**GREEDY, **(sampling or {})}, **fields}


def vectors() -> dict[str, Any]:
    return {"post_block": {str(LAYER): VECTOR.tolist()}}


def answered(server: Server, asked: dict[str, Any], stream: bool) -> tuple[Choice, list[int]]:
    """The answer's choice and its tokens."""
    answer = server.post(PATH, {**asked, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        [choice] = answer.json()["choices"]
        return read_choice(choice), choice["token_ids"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert sum("capture_results" in chunk for chunk in chunks) >= 2, "not all at the end"
    return joined([read_choice(chunk) for chunk in chunks]), [
        token for chunk in chunks for token in chunk["token_ids"]
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_it_captures_and_steers(server: Server, reference: Reference, stream: bool) -> None:
    plain, said = answered(server, body(reference, capture=READ), stream)
    steered, other = answered(
        server, body(reference, capture=READ, steering_vectors=vectors()), stream
    )
    read = check_rows(steered, reference, {LAYER: VECTOR})
    assert read[len(PROMPT) :] == other[:-1]
    check_rows(plain, reference, {})
    asked = {"prompt": body(reference)["token_ids"], "return_token_ids": True}
    for tokens, fields in ((said, {}), (other, {"steering_vectors": vectors()})):
        completion = server.complete(**asked, **fields)
        assert completion["choices"][0]["token_ids"] == tokens
    assert not np.array_equal(
        steered.rows["post_block", LAYER].values[0], plain.rows["post_block", LAYER].values[0]
    )


def test_modules_rules_files_and_several_answers(
    server: Server, client: SteeringClient, reference: Reference, root: Path
) -> None:
    client.register_module("rl", STEER)
    probe: dict[str, Any] = {"name": "r", "probe": [1.0] * HIDDEN, "point": "post_block"}
    probe |= {"layer": LAYER, "threshold": -1e9}
    asked = {
        "steering_modules": ["rl"],
        "rules": [probe],
        "capture": {**READ, "filesystem": {"hooks": {"post_block": [LAYER]}, "positions": "all"}},
    }
    answer = server.post(
        PATH, body(reference, {"n": 2, "temperature": 1.0, "seed": 1}, output_mode="text", **asked)
    )
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == 2
    for choice in choices:
        read = read_choice(choice)
        check_rows_of_two(read, reference)
        assert read.rules["r"]["fired_at"] == len(PROMPT)
        [path] = read.capture_results["filesystem"]["payload"]["paths"]
        assert (root / path).is_file()


def check_rows_of_two(choice: Choice, reference: Reference) -> None:
    assert choice.capture_status == {"inline": "ok", "filesystem": "ok"}
    read = choice.rows["post_block", LAYER].token_ids.tolist()
    rows = torch.from_numpy(choice.rows["post_block", LAYER].values.copy())
    want, plain = reference.rows(read, {LAYER: VECTOR}), reference.rows(read, {})
    assert torch.allclose(rows, want[LAYER], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(rows, plain[LAYER], rtol=1e-3, atol=1e-3)


def test_without_our_fields_the_answer_is_upstreams(server: Server, reference: Reference) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    text = server.post(PATH, body(reference)).text
    assert "capture" not in text and "rules" not in text
    declared = GenerateTokensResponse.model_validate_json(text).model_dump()
    assert json.dumps(declared, ensure_ascii=False, separators=(",", ":")) == text
    for line in server.post(PATH, body(reference, stream=True)).text.splitlines():
        assert "capture" not in line


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"capture": {"inline": {"hooks": {"nowhere": [1]}}}}, {}, "capture.inline.hooks"),
    ({"capture": {"inline": {"hooks": {"post_block": [99]}}}}, {}, "capture.inline.hooks"),
    ({"steering_modules": ["nobody"]}, {}, "steering_modules[0]"),
    ({"steering_vectors": {"post_block": {"0": [1.0]}}}, {}, "steering_vectors.post_block.0"),
    ({"captures": {}}, {}, "captures"),
    ({}, {"capture": {"nobody": {}}}, "capture"),
    ({"capture": READ}, {"capture": READ}, "sampling_params.capture"),
    ({}, {"captures": {}}, "sampling_params.captures"),
    ({}, {"extra_args": {"steer": 1}}, "sampling_params.extra_args"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("fields", "sampling", "named"), WRONG)
def test_what_is_wrong_is_refused_by_field(
    server: Server,
    reference: Reference,
    fields: dict[str, Any],
    sampling: dict[str, Any],
    named: str,
    stream: bool,
) -> None:
    answer = server.post(PATH, body(reference, sampling, stream=stream, **fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(named) and error["message"].startswith(named)


def test_fields_among_the_sampling_parameters(server: Server, reference: Reference) -> None:
    """As programs send them that know sampling parameters alone; others send nulls there."""
    asked = body(reference, {"capture": READ, "steering_vectors": vectors(), "steering": None})
    check_rows(answered(server, asked, False)[0], reference, {LAYER: VECTOR})
    asked = body(reference, {"capture": None, "steering": None}, capture=READ, model=NAME)
    check_rows(answered(server, asked, False)[0], reference, {})


@pytest.mark.long
def test_trl_as_it_was_published(
    server: Server, client: SteeringClient, reference: Reference
) -> None:
    """Its `generation_kwargs` go into bodies of completions, and into sampling parameters here."""
    client.register_module("trl", STEER)
    asked = [json.dumps(body(reference)["token_ids"]), json.dumps({"steering_modules": ["trl"]})]
    ran = subprocess.run(
        [sys.executable, trl_client.__file__, server.url, *asked],
        env={**os.environ, "PYTHONPATH": str(folder_of("trl")), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    plain, steered, tokens = json.loads(ran.stdout.splitlines()[-1])
    asked_again = {"prompt": body(reference)["token_ids"], "return_token_ids": True}
    want = [
        server.complete(**asked_again, **fields)["choices"][0]["token_ids"]
        for fields in ({}, {"steering_vectors": vectors()})
    ]
    assert [plain, steered] == want and plain != steered == tokens
