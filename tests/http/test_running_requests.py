# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/steering/requests/{id}`: a client changes its own running answer, and nobody else's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.http.server import Server, greedy
from tests.support.serving import vector

pytestmark = pytest.mark.full

LENGTH = 80
PUSH = {"steering": [{"op": "add", "point": "post_block", "layers": [1],
                      "vector": vector(3, 40.0).tolist()}]}  # fmt: skip
MINE, OTHERS = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer others"}
ROWS = {"capture": {"inline": {"hooks": {"post_block": [1]}, "positions": "all_generated"}}}
LETTERS = {"allowed_token_ids": [*range(62)]}


class Answer:
    """An answer that is being streamed."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.id, self.tokens = "", list[int]()

    def next(self) -> bool:
        """Read on to the next chunk with tokens; false at the end."""
        for line in self._lines:
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            self.id = chunk["id"]
            if new := [t for choice in chunk["choices"] for t in choice.get("token_ids") or ()]:
                self.tokens += new
                return True
        return False


@contextmanager
def answering(server: Server, path: str, **fields: Any) -> Iterator[Answer]:
    body = greedy(stream=True, max_tokens=LENGTH, return_token_ids=True, **LETTERS, **fields)
    with httpx.stream("POST", server.url + path, json=body, headers=MINE, timeout=300) as stream:
        yield Answer(stream.iter_lines())


def whole(server: Server, **fields: Any) -> list[int]:
    asked = {"max_tokens": LENGTH, "return_token_ids": True, **LETTERS, **fields}
    tokens: list[int] = server.complete(**asked)["choices"][0]["token_ids"]
    return tokens


def test_a_client_changes_its_own_answer(server: Server) -> None:
    """It goes on as one that was steered there from the start, and the client is told where."""
    plain = whole(server)
    for _ in range(20):  # an answer may have ended before the change comes
        with answering(server, "/v1/completions", prompt="Today I went") as answer:
            assert answer.next()
            done = server.post(f"/v1/steering/requests/{answer.id}", PUSH, **MINE)
            while answer.next():
                pass
        if done.status_code == 200:
            break
    assert done.status_code == 200, done.text
    [changed] = done.json()["changed"]
    assert done.json()["id"] == answer.id
    assert (changed["prompt"], changed["completion"]) == (0, 0)
    first = len("Today I went")
    at = changed["position"]
    assert first < at < first + LENGTH - 1
    [op] = PUSH["steering"]
    there = {**op, "positions": {"start": at, "stop": first + LENGTH - 1}}
    assert answer.tokens == whole(server, steering=[there])
    assert answer.tokens != plain and answer.tokens[: at + 1 - first] == plain[: at + 1 - first]


def test_a_chat_is_found_by_its_id(server: Server) -> None:
    chat = [{"role": "user", "content": "Today I went"}]
    for _ in range(20):
        with answering(server, "/v1/chat/completions", messages=chat) as answer:
            assert answer.next()
            done = server.post(f"/v1/steering/requests/{answer.id}", PUSH, **MINE)
        if done.status_code == 200:
            break
    assert done.status_code == 200, done.text
    assert len(done.json()["changed"]) == 1


def test_all_prompts_of_a_body_are_changed_or_none(server: Server) -> None:
    """What one of them refuses is found before any is changed."""
    prompts = ["Today I went to", "a"]
    [op] = PUSH["steering"]
    later = {"steering": [{**op, "positions": {"start": LENGTH + 5}}]}  # past the second's end
    for body, status in ((PUSH, 200), (later, 400)):
        for _ in range(20):
            with answering(server, "/v1/completions", prompt=prompts) as answer:
                assert answer.next()
                done = server.post(f"/v1/steering/requests/{answer.id}", body, **MINE)
                while answer.next():
                    pass
            if done.status_code == status and len(done.json().get("changed", "no")) == 2:
                break
        assert done.status_code == status, done.text
        if status == 200:
            assert {(c["prompt"], c["completion"]) for c in done.json()["changed"]} == {
                (0, 0), (1, 0)
            }  # fmt: skip
    plain = [whole(server, prompt=prompt) for prompt in prompts]
    assert sorted(answer.tokens) == sorted(plain[0] + plain[1])


def test_nobody_changes_the_answers_of_others(server: Server) -> None:
    """With another key, or an id that is nobody's, nothing is found, and the answer is as it was.
    The twin, with its own key, is changed."""
    plain = whole(server)
    for headers, found in ((OTHERS, 404), ({}, 404), (MINE, 200)):
        for _ in range(20):
            with answering(server, "/v1/completions", prompt="Today I went") as answer:
                assert answer.next()
                path = f"/v1/steering/requests/{answer.id}"
                done = server.post(path, PUSH, **headers)
                unknown = server.post(f"{path}-0", PUSH, **headers)
                while answer.next():
                    pass
            if done.status_code == found:
                break
        assert (done.status_code, unknown.status_code) == (found, 404), done.text
        assert (answer.tokens == plain) == (found == 404)
        if found == 404:
            assert "no request of yours is running" in done.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "body", "said"),
    [
        ({}, {"steering": [{"op": "spin"}]}, "steering[0].op"),
        ({}, {"capture": {}}, "capture"),
        ({}, {"steering_modules": ["nobody"]}, "steering_modules[0]"),
        ({}, {"prefill_steering_vectors": {"post_block": {"1": [1.0] * 64}}}, "prefill_steering"),
        ({"structured_outputs": {"regex": "[a-z ]*"}}, PUSH, "structured_outputs"),
        ({"capture": {"filesystem": {**ROWS["capture"]["inline"], "tag": "t"}}}, PUSH, "capture"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused(
    server: Server, fields: dict[str, Any], body: dict[str, Any], said: str
) -> None:
    for _ in range(20):
        with answering(server, "/v1/completions", prompt="Today I went", **fields) as answer:
            assert answer.next()
            done = server.post(f"/v1/steering/requests/{answer.id}", body, **MINE)
        if done.status_code == 400:
            break
    assert done.status_code == 400, done.text
    assert said in done.json()["error"]["message"]
