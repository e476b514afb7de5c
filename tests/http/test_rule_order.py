# SPDX-License-Identifier: Apache-2.0
"""Rules beside other fields that end or shape an answer, as the table in docs/capture.md has it,
over real servers, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest
import transformers

from tests.http.checks import LAYER
from tests.http.server import NAME, Server, greedy, save_model, serve
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import SteeringClient

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

PROBE = vector(5, norm=1.0)
LENGTH = 24
CHARACTERS = 62
"""Token ids of letters and digits, which alone are sampled."""
CHAT = [{"role": "user", "content": "Today I went"}]
END = "</think>"


@pytest.fixture(scope="module")
def thinking(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the words around a reasoning."""
    folder = save_model(tiny_models, tmp_path_factory.mktemp("order") / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", END])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thinker(thinking: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its grammars begin where the reasoning ends, so the others' server has no parser."""
    log = tmp_path_factory.mktemp("order-log") / "server.log"
    with serve(thinking, log, "--reasoning-parser=deepseek_r1") as started:
        yield started


def rule(threshold: float = 1e30, **fields: Any) -> dict[str, Any]:
    probe = PROBE.tolist()
    place = {"point": "post_block", "layer": LAYER}
    return {"name": "r", **place, "probe": probe, "threshold": threshold, **fields}


def completed(server: Server, **fields: Any) -> dict[str, Any]:
    asked = {"max_tokens": LENGTH, "allowed_token_ids": [*range(CHARACTERS)], **fields}
    choice: dict[str, Any] = server.complete(**asked)["choices"][0]
    return choice


@pytest.fixture
def found(server: Server, client: SteeringClient) -> tuple[str, int, float]:
    """A plain answer, a token of it that is not the first, and a threshold that fires there."""
    rows = {"hooks": {"post_block": [LAYER]}, "positions": "all_generated"}
    asked = greedy(max_tokens=LENGTH, allowed_token_ids=[*range(CHARACTERS)])
    asked["capture"] = {"inline": {**rows, "project": PROBE[None].numpy()}}
    [choice] = client.complete("Today I went", **asked).choices
    scores = choice.captures["inline"]["post_block", LAYER].values[:, 0]
    index = int(np.argmax(scores))
    assert index > 0
    ordered = np.sort(scores)
    return choice.text, index, float(ordered[-1] + ordered[-2]) / 2


def streamed(server: Server, fields: dict[str, Any]) -> tuple[str, str, int]:
    """Reasoning and content of a chat's chunks, and the tokens that it is charged for."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    reasoning = content = ""
    tokens = 0
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    body = {k: v for k, v in fields.items() if k not in ("messages", "model")}
    for chunk in client.chat.completions.create(
        model=NAME, messages=fields["messages"], extra_body=body, **options
    ):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            content += choice.delta.content or ""
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return reasoning, content, tokens


def test_stop_strings(server: Server, found: tuple[str, int, float]) -> None:
    text, index, threshold = found
    one = rule(threshold, then="stop")
    for last, by_rule in ((index - 1, False), (index, False), (index + 1, True)):
        string = text[: last + 1]  # found when its last character comes
        choice = completed(server, rules=[one], stop=[string], include_stop_str_in_output=True)
        assert choice["stop_reason"] == ("rule:r" if by_rule else string)
        assert choice["text"] == text[: (index if by_rule else last) + 1]


def test_stop_tokens(server: Server, found: tuple[str, int, float], model: Path) -> None:
    """The row of the token that ends an answer is not computed."""
    text, index, threshold = found
    ids = transformers.AutoTokenizer.from_pretrained(model).encode(text)
    one = rule(threshold, then="stop")
    for at in (index, index + 1):
        first = ids.index(ids[at])
        choice = completed(server, rules=[one], stop_token_ids=[ids[at]])
        assert choice["stop_reason"] == (ids[at] if first <= index else "rule:r")


def test_least_and_most_tokens(server: Server, found: tuple[str, int, float]) -> None:
    text, index, threshold = found
    one = rule(threshold, then="stop")
    choice = completed(server, rules=[one], min_tokens=LENGTH)
    assert (choice["text"], choice["stop_reason"]) == (text[: index + 1], "rule:r")
    for most, why in ((index + 1, None), (index + 2, "rule:r")):
        choice = completed(server, rules=[one], max_tokens=most)
        assert (choice["text"], choice["stop_reason"]) == (text[: index + 1], why)


def test_several_completions(server: Server, found: tuple[str, int, float]) -> None:
    one = rule(found[2], then="stop")
    asked = {"max_tokens": LENGTH, "allowed_token_ids": [*range(CHARACTERS)], "n": 3}
    made = server.complete(**asked, temperature=1, seed=1, rules=[one])["choices"]
    plain = server.complete(**asked, temperature=1, seed=1)["choices"]
    for choice, whole in zip(made, plain, strict=True):
        fired = choice["rules"]["r"]["fired_at"]
        assert whole["text"].startswith(choice["text"])
        assert (choice["stop_reason"] == "rule:r") == (fired is not None)
    assert len({choice["text"] for choice in made}) == 3


def test_grammars(server: Server) -> None:
    grammar = {"regex": "[a-z]{40}"}
    whole = completed(server, structured_outputs=grammar)
    assert whole["text"].islower() and len(whole["text"]) == LENGTH
    cut = completed(server, structured_outputs=grammar, rules=[rule(-1e30, then="stop")])
    assert cut["text"] == whole["text"][:1] and cut["stop_reason"] == "rule:r"
    forced = rule(then={"force": [1]})
    refused = server.post(
        "/v1/completions", greedy(prompt="a", structured_outputs=grammar, rules=[forced])
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs"


def test_reasoning(thinker: Server, thinking: Path) -> None:
    """The model never ends its reasoning by itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking)
    end_id = tokenizer.convert_tokens_to_ids(END)
    fields = greedy(
        messages=CHAT, max_tokens=LENGTH, allowed_token_ids=[*range(CHARACTERS)], rules=[rule()]
    )

    def message(**more: Any) -> tuple[str, str, int]:
        answer = thinker.post("/v1/chat/completions", {**fields, **more})
        assert answer.status_code == 200, answer.text
        made = answer.json()
        [choice] = made["choices"]
        said = choice["message"]
        tokens = made["usage"]["completion_tokens"]
        assert made["usage"]["prompt_tokens"] == prompt_tokens
        return said.get("reasoning") or "", said.get("content") or "", tokens

    asked = {"model": NAME, "messages": CHAT, "max_tokens": 1}
    plain = thinker.post("/v1/chat/completions", asked).json()
    prompt_tokens = plain["usage"]["prompt_tokens"]
    thought, content, tokens = message()
    assert (len(thought), content, tokens) == (LENGTH, "", LENGTH)

    late = {"need": 5, "of": 5}
    stops = {"rules": [rule(-1e30, then="stop", **late)]}
    assert message(**stops) == (thought[:5], "", 5)
    forces = {"rules": [rule(-1e30, then={"force": [end_id]}, **late)]}
    thought_then, content, tokens = message(**forces)
    assert (thought_then, len(content), tokens) == (thought[:5], LENGTH - 6, LENGTH)
    assert streamed(thinker, {**fields, **forces}) == (thought_then, content, tokens)
    assert streamed(thinker, {**fields, **stops}) == (thought[:5], "", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(server: Server, stream: bool) -> None:
    """The tokenizer has no braces, so that the argument is a number."""
    function = {"name": "count", "parameters": {"type": "integer"}}
    asked = greedy(
        messages=CHAT,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "count"}},
        max_tokens=LENGTH,
    )

    def arguments(**fields: Any) -> tuple[str, str]:
        if stream:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            known = ("messages", "model", "tools", "tool_choice")
            body = {k: v for k, v in {**asked, **fields}.items() if k not in known}
            given: Any = {k: asked[k] for k in known}
            text, why = "", ""
            for chunk in client.chat.completions.create(**given, stream=True, extra_body=body):
                for choice in chunk.choices:
                    for call in choice.delta.tool_calls or ():
                        assert call.function is not None
                        text += call.function.arguments or ""
                    why = choice.model_dump().get("stop_reason") or why
            return text, why
        answer = server.post("/v1/chat/completions", {**asked, **fields})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        return call["function"]["arguments"], choice["stop_reason"]

    whole, _ = arguments()
    cut, why = arguments(rules=[rule(-1e30, then="stop", need=3, of=3)])
    assert len(whole) > 3 and (cut, why) == (whole[:3], "rule:r")


def test_a_client_that_hangs_up_after_a_cut_leaves_nothing(server: Server) -> None:
    """The request that goes on is another to the engine: it must end with the first's client."""
    forced = rule(-1e30, then={"force": [1]})
    body = greedy(prompt="Today", max_tokens=80, rules=[forced], stream=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    running = "vllm:num_requests_running"
    for _ in range(100):
        text = server.get("/metrics").text
        counts = [line.split()[-1] for line in text.splitlines() if line.startswith(running)]
        if counts and all(float(count) == 0 for count in counts):
            return
    pytest.fail("the request goes on")
