# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: steering and capture in completions and chats, and the clients."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest

from tests.conformance.models import HIDDEN
from tests.http.server import KEY, NAME, SECRET, Server, greedy
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.serve.steering import client as client_module
from vllm.entrypoints.serve.steering.client import (
    AsyncSteeringClient,
    Choice,
    SteeringClient,
    SteeringError,
    joined,
    pack_layers,
    read_rows,
)

if TYPE_CHECKING:
    pass

from tests.http.checks import LAYER, PROMPT, READ, SAID, STEER, VECTOR, Reference, check_rows

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "given",
    [
        {"steering_vectors": {"post_block": {str(LAYER): VECTOR.tolist()}}},
        {"steering_vectors": {"post_block": {LAYER: VECTOR}}},
        {"steering_vectors": {"post_block": {LAYER: {"vector": 2 * VECTOR, "scale": 0.5}}}},
        {"steering_vectors": {"post_block": pack_layers({LAYER: VECTOR / 2}, {LAYER: 2.0})}},
        {"steering": [{"op": "add", "point": "post_block", "layers": [LAYER], "vector": VECTOR}]},
        {
            "prefill_steering_vectors": {"post_block": {LAYER: VECTOR}},
            "decode_steering_vectors": {"post_block": {LAYER: VECTOR}},
        },
    ],
    ids=["list", "packed", "scaled", "packed-point", "op", "phases"],
)
@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
def test_forms_of_a_vector_steer_the_same(
    client: SteeringClient, reference: Reference, prompt: Any, given: dict[str, Any]
) -> None:
    plain = client.complete(prompt, **greedy(capture=READ))
    steered = client.complete(prompt, **greedy(capture=READ, **given))
    read = check_rows(steered.choices[0], reference, {LAYER: VECTOR})
    assert len(read) > 14
    check_rows(plain.choices[0], reference, {})


def test_without_our_fields_the_answer_is_upstreams(server: Server) -> None:
    """No key more, and the same keys in the same order as a model of upstream dumps."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    for path, body, kind in (
        ("/v1/completions", greedy(prompt=PROMPT), CompletionResponse),
        ("/v1/chat/completions", greedy(messages=SAID), ChatCompletionResponse),
    ):
        text = server.post(path, body).text
        assert "capture" not in text
        declared = kind.model_validate_json(text).model_dump()
        assert json.dumps(declared, ensure_ascii=False, separators=(",", ":")) == text
        for line in server.post(path, {**body, "stream": True}).text.splitlines():
            assert "capture" not in line


@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
def test_a_stream_brings_the_rows_as_they_appear(
    client: SteeringClient, reference: Reference, prompt: Any
) -> None:
    # Many tokens: a server that falls behind merges chunks.
    asked = greedy(capture=READ, steering_vectors=STEER, max_tokens=60)
    chunks = list(client.stream(prompt, **asked))
    whole = client.complete(prompt, **asked).choices[0]
    check_rows(joined(chunks), reference, {LAYER: VECTOR})
    assert joined(chunks).text == whole.text
    for site, rows in whole.rows.items():
        np.testing.assert_array_equal(joined(chunks).rows[site].values, rows.values)
    with_rows = [chunk for chunk in chunks if chunk.rows]
    assert len(with_rows) >= 2, "not all at the end"
    assert [chunk.capture_status for chunk in with_rows[:-1]] == [{"inline": None}] * (
        len(with_rows) - 1
    )
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].capture_status == {"inline": "ok"}


def test_prompts_of_one_body_share_what_a_request_may_cost(server: Server) -> None:
    vectors = {point: {"all": VECTOR.tolist()} for point in STREAM_POINTS}
    body = {**greedy(max_tokens=1, steering_vectors=vectors), "temperature": 1.0, "n": 64}
    few = server.post("/v1/completions", {**body, "prompt": [[5, 6]] * 2})
    assert few.status_code == 200 and len(few.json()["choices"]) == 128
    many = server.post("/v1/completions", {**body, "prompt": [[5, 6]] * 1000})
    assert many.status_code == 400
    assert many.json()["error"]["param"] == "steering_vectors"
    assert "past max_request_work=8388608" in many.json()["error"]["message"]


def test_choices_have_their_own_rows(client: SteeringClient) -> None:
    """Several prompts, several samples, echo, logprobs and stop strings."""
    prompts = [PROMPT, "We saw"]
    sampled = greedy(n=2, temperature=1.0, seed=5, logprobs=1, echo=True, capture=READ)
    answer = client.complete(prompts, **sampled, return_token_ids=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, raw in zip(answer.choices, answer.raw["choices"], strict=True):
        tokens = [*raw["prompt_token_ids"], *raw["token_ids"]]
        assert choice.rows["post_block", LAYER].token_ids.tolist() == tokens[:-1]
        assert raw["logprobs"]["tokens"]
    streamed: dict[int, list[Choice]] = {}
    # Upstream alone sometimes fails to stream echoed prompts with log-probabilities (KeyError).
    for chunk in client.stream(prompts, **{**sampled, "logprobs": None, "echo": False}):
        streamed.setdefault(chunk.index, []).append(chunk)
    for choice in answer.choices:
        again = joined(streamed[choice.index])
        assert choice.text.endswith(again.text)
        for site, rows in choice.rows.items():
            np.testing.assert_array_equal(again.rows[site].token_ids, rows.token_ids)

    free = client.complete(PROMPT, **greedy(max_tokens=30, seed=1, temperature=1.0)).text
    stop = next(c for c in free[3:] if c not in free[:3])
    stopped = client.complete(
        PROMPT, **greedy(max_tokens=30, seed=1, temperature=1.0, stop=[stop], capture=READ)
    ).choices[0]
    assert stopped.finish_reason == "stop"
    assert free.startswith(stopped.text)
    assert stopped.text + stop in free
    assert stopped.capture_status["inline"] in ("ok", "partial_error")
    assert len(stopped.rows["post_block", LAYER].positions) < len(PROMPT) + 29


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"steering_vectors": {"mlp": {}}}, "steering_vectors.mlp"),
    ({"steering_vectors": {"post_block": {"99": [0.0]}}}, "steering_vectors.post_block.99"),
    ({"decode_steering_vectors": 3}, "decode_steering_vectors"),
    ({"steering_modules": ["nobody"]}, "steering_modules[0]"),
    ({"steering_modules": ["half \ud800"]}, "steering_modules[0]"),
    ({"capture": {"half \ud800": {}}}, "capture.half \\ud800"),
    ({"steering": [{"op": "twist"}]}, "steering[0].op"),
    ({"steering_inherit_global": 1}, "steering_inherit_global"),
    ({"capture": {"disk": {}}}, "capture.disk"),
    ({"capture": {"inline": {"hooks": {"post_block": [4]}}}}, "capture.inline.hooks.post_block[0]"),
    ({"steering_vectors": {"post_block": {"data": "x"}}}, "steering_vectors.post_block"),
    (
        {"steering_vectors": {"post_block": {**pack_layers({0: VECTOR}), "shape": [1, 7]}}},
        "steering_vectors.post_block.data",
    ),
    ({"capture": READ, "use_beam_search": True, "n": 2}, "capture"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), ERRORS, ids=[param for _, param in ERRORS])
def test_errors_are_400_with_the_path(
    server: Server, fields: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and "use_beam_search" in fields:
        return
    for path, said in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": SAID}),
    ):
        content = json.dumps(greedy(**said, **fields, stream=stream))
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(
            f"{server.url}/v1/{path}", content=content, headers=headers, timeout=300
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
        assert error["message"].startswith(f"{param}: ")
        assert error["type"] == "BadRequestError"


def test_other_endpoints_refuse_by_name(server: Server) -> None:
    for path, body in (
        ("/v1/responses", {"input": "x"}),
        ("/v1/chat/completions/batch", {"messages": [SAID]}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 1}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = server.post(path, {"model": NAME, **body, "capture": READ})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["message"].startswith("capture: this endpoint"), path


def test_openai_client(server: Server, reference: Reference) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        fields = {
            "ignore_eos": True,
            "capture": READ,
            "steering_vectors": {"post_block": pack_layers({LAYER: VECTOR})},
        }
        asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 4}
        answer = made.completions.create(prompt=PROMPT, extra_body=fields, **asked)
        chat = made.chat.completions.create(messages=SAID, extra_body=fields, **asked)  # type: ignore[arg-type]
        for choice in (answer.choices[0], chat.choices[0]):
            assert choice.model_extra is not None
            results = choice.model_extra["capture_results"]
            captures = {"inline": read_rows(results["inline"]["payload"])}
            made_of_it = Choice(captures=captures, capture_results=results)
            check_rows(made_of_it, reference, {LAYER: VECTOR})
        streamed = made.completions.create(prompt=PROMPT, extra_body=fields, stream=True, **asked)
        extras = [c.choices[0].model_extra for c in streamed]
        assert any("capture_results" in (extra or {}) for extra in extras)
        with pytest.raises(openai.BadRequestError) as raised:
            made.completions.create(prompt=PROMPT, extra_body={"capture": {"x": 1}}, **asked)
        assert raised.value.param == "capture.x"


def test_async_client(server: Server, reference: Reference) -> None:
    async def use() -> None:
        async with AsyncSteeringClient(server.url, steering_key=KEY, model=NAME) as made:
            await made.register_module("m", STEER)
            asked = greedy(capture=READ, steering_modules=["m"])
            answer, plain = await asyncio.gather(
                made.complete(PROMPT, **asked), made.complete(SAID, **greedy(capture=READ))
            )
            check_rows(answer.choices[0], reference, {LAYER: VECTOR})
            check_rows(plain.choices[0], reference, {})
            chunks = [chunk async for chunk in made.stream(PROMPT, **asked)]
            check_rows(joined(chunks), reference, {LAYER: VECTOR})
            await made.set(STEER)
            assert (await made.state())["tiers"].keys() == {"base"}
            assert (await made.layers())["hidden_size"] == HIDDEN
            assert (await made.modules()).keys() == {"m"}
            await made.clear()
            await made.unregister_module("m")
            with pytest.raises(SteeringError):
                async for _ in made.stream(PROMPT, **asked):
                    pass

    asyncio.run(use())


def test_the_client_stands_alone(server: Server, tmp_path: Path) -> None:
    """Copied to where there is neither vLLM nor torch."""
    shutil.copytree(Path(client_module.__file__).parent, tmp_path / "client")
    program = textwrap.dedent(f"""
        import sys
        for name in ("vllm", "torch", "transformers"):
            sys.modules[name] = None
        import numpy as np
        from client import SteeringClient, pack, unpack
        half = {{"dtype": "bfloat16", "shape": [2], "data": "gD/APw=="}}
        assert unpack(half).tolist() == [1.0, 1.5]
        assert unpack(pack(np.arange(3.0))).tolist() == [0, 1, 2]
        with SteeringClient({server.url!r}, model={NAME!r}) as client:
            vector = np.full({HIDDEN}, 2.0, np.float16)
            answer = client.complete({PROMPT!r}, max_tokens=3,
                steering_vectors={{"post_block": {{1: vector}}}},
                capture={{"inline": {{"hooks": {{"post_block": [1]}}, "positions": [0]}}}})
            print(answer.rows["post_block", 1].at(0).shape)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"({HIDDEN},)"


def test_the_log_has_digests_and_no_values(server: Server, client: SteeringClient) -> None:
    marked = VECTOR.copy()
    marked[0] = 3.0625  # exact in any dtype, and in no other vector
    client.complete(
        PROMPT, **greedy(capture=READ, steering_vectors={"post_block": {0: marked.tolist()}})
    )
    log = server.log.read_text()
    assert "largest norm" in log
    assert "capture for inline at 2 sites" in log
    assert "3.0625" not in log
    assert KEY not in log
    assert SECRET not in log and "'filesystem(root, storage_options)'" in log
    # Upstream logs what ends a request of /v1/messages, also what is the client's own fault, and
    # what ends a stream.
    own = log.count("Error in create_messages: ") + log.count(" stream generator.")
    assert log.count("Traceback") == own


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
def test_steering_to_nan_is_an_error_that_names_it(server: Server, prompt: Any, n: int) -> None:
    """Where log-probabilities are asked for, whole and streamed; those that are finite are sent,
    and so is the text of who asked for none. Nobody else is hurt."""
    chat = isinstance(prompt, list)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    said = {"messages": prompt, "logprobs": True} if chat else {"prompt": prompt, "logprobs": 1}
    body = greedy(**said, n=n, temperature=1.0, seed=1)
    before = server.post(path, body)
    huge = np.full(HIDDEN, 1e38).tolist()
    nan = {"steering_vectors": {point: {"all": huge} for point in STREAM_POINTS}}
    whole = server.post(path, {**body, **nan})
    error = whole.json()["error"]
    assert (whole.status_code, error["param"]) == (400, "steering_vectors")
    assert "log-probabilities of the answer are not finite" in error["message"]
    streamed = server.post(path, {**body, **nan, "stream": True}).text
    (event,) = [line for line in streamed.splitlines() if '"error"' in line]
    assert json.loads(event.removeprefix("data: "))["error"]["param"] == "steering_vectors"
    assert streamed.rstrip().endswith("data: [DONE]")
    silent = {**{k: v for k, v in body.items() if k != "logprobs"}, **nan}
    assert len(server.post(path, silent).json()["choices"]) == n
    small = {"steering_vectors": {point: {"all": VECTOR.tolist()} for point in STREAM_POINTS}}
    assert server.post(path, {**body, **small}).status_code == 200
    tier = {"vectors": nan["steering_vectors"]}
    assert server.change("/v1/steering/set", tier).is_success
    of_all = server.post(path, {**body, "cache_salt": f"all{chat}{n}"})
    assert server.change("/v1/steering/clear", {}).is_success
    assert (of_all.status_code, of_all.json()["error"]["param"]) == (400, "logprobs")
    # Other salts: this is of the answer, and not of blocks that were written by it.
    after = server.post(path, {**body, "cache_salt": f"other{chat}{n}"})
    assert before.status_code == after.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [1 << 40, 1 << 70, 1000])
def test_a_token_that_is_none_is_refused_beside_a_text(
    server: Server, token: int, stream: bool
) -> None:
    """As without: by the engine's own rule, and before anything decodes it."""
    capture = {"inline": {**READ["inline"], "positions": {"text": "bc"}}}
    body = greedy(prompt=[1, 2, 3, token], stream=stream)
    plain, asked = (
        server.post("/v1/completions", each) for each in (body, {**body, "capture": capture})
    )
    assert plain.status_code == 400 or stream
    error = asked.json()["error"]
    assert (asked.status_code, error["code"]) == (400, 400)
    assert error["message"].startswith(f"Token id {token} is out of vocabulary")
    assert error["param"] == "prompt"
    right = server.post("/v1/completions", {**body, "prompt": [1, 2, 3, 4], "capture": capture})
    assert right.status_code == 200


def test_a_disconnected_client_gives_its_slot_back(server: Server, client: SteeringClient) -> None:
    for _ in range(3):
        chunks = client.stream(
            PROMPT, **greedy(max_tokens=80, capture=READ, steering_vectors=STEER)
        )
        next(chunks)
        chunks.close()
    deadline = time.monotonic() + 300
    while client.state()["slots"]["in_use"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.state()["slots"]["in_use"] == 0
