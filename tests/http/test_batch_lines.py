# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch`: a line that is refused is an error of that line alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.entrypoints.launchers import run_batch
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.steering.capture_results import add_capture_results
from vllm.v1.capture import CapturedRows, CaptureResult
from vllm.v1.interventions.errors import reject

pytestmark = pytest.mark.quick

CHAT = "/v1/chat/completions"
SAID = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
CAPTURE = {"inline": {"hooks": {"post_block": [0]}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/audio/transcriptions": {"file_url": "data:audio/wav;base64,AAAA"},
    "/v1/audio/translations": {"file_url": "data:audio/wav;base64,AAAA"},
    "/v1/elsewhere": {"input": "x"},
}


async def answer(request: Any) -> ChatCompletionResponse:
    """In place of the engine: what a chat that captures is answered."""
    if (request.model_extra or {}).get("steering_vectors") == 3:
        reject("steering_vectors", "must be a mapping, got 3")
    choice = ChatCompletionResponseChoice(
        index=0, message=ChatMessage(role="assistant", content="said"), finish_reason="stop"
    )
    if "capture" in (request.model_extra or {}):
        numbers = np.zeros(1, np.int64)
        rows = CapturedRows(numbers, numbers, torch.ones(1, 2), numbers)
        results = {"inline": CaptureResult("ok", None, {("post_block", 0): rows})}
        output: Any = SimpleNamespace(rules=None, capture_results=results, finish_reason="stop")
        add_capture_results(choice, output)
    return ChatCompletionResponse(model="m", choices=[choice], usage=UsageInfo())


async def registry(engine_client: Any, args: Any) -> dict[str, Any]:
    def entry(url: str) -> dict[str, Any]:
        return {"url_matcher": url.__eq__, "handler_getter": lambda: answer, "wrapper_fn": None}

    return {url.rsplit("/", 1)[-1]: entry(url) for url in (CHAT, *list(BODIES)[:-1])}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a batch of lines, (url, body) or a whole line; returns the answers."""
    monkeypatch.setattr(run_batch, "build_endpoint_registry", registry)

    def run(*lines: Any) -> list[dict[str, Any]]:
        made = [
            {"custom_id": str(i), "method": "POST", "url": line[0], "body": line[1]}
            if isinstance(line, tuple)
            else line
            for i, line in enumerate(lines)
        ]
        given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        given.write_text("\n".join(map(json.dumps, made)))
        args: Any = SimpleNamespace(
            input_file=str(given), output_file=str(out), output_tmp_dir=None
        )
        asyncio.run(run_batch.run_batch(SimpleNamespace(), args))  # type: ignore[arg-type]
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def error_of(line: dict[str, Any]) -> dict[str, Any]:
    assert line["response"]["status_code"] == 400 and line["response"]["body"] is None
    found: dict[str, Any] = line["error"]["error"]
    return found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"steering_vector": {}}, "steering_vector"),
        ({"captures": CAPTURE}, "captures"),
        ({"steering_vectors": 3}, "steering_vectors"),
    ],
)
def test_a_wrong_field_is_a_400_of_its_line(ran: Any, fields: dict[str, Any], param: str) -> None:
    """Whether the model of the body refuses it or the engine; others are answered."""
    before, wrong, after = ran((CHAT, SAID), (CHAT, SAID | fields), (CHAT, SAID))
    assert error_of(wrong)["param"] == param and error_of(wrong)["message"].startswith(f"{param}: ")
    assert wrong["custom_id"] == "1"
    for line in (before, after):
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "said"


@pytest.mark.parametrize("url", BODIES)
def test_other_urls_refuse_captures_by_name(ran: Any, url: str) -> None:
    wrong, right = ran((url, {**BODIES[url], "capture": CAPTURE}), (CHAT, SAID))
    if url == "/v1/elsewhere":
        assert "Supported endpoints" in wrong["error"]
    else:
        assert error_of(wrong)["message"].startswith("capture: this endpoint does not take")
    assert right["error"] is None


def test_a_field_beside_the_body_is_a_400_of_its_line(ran: Any) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": SAID, "capture": CAPTURE}
    wrong, right = ran(line, (CHAT, SAID))
    assert wrong["custom_id"] == "a" and error_of(wrong)["param"] == "capture"
    assert right["error"] is None


def test_a_body_that_upstream_refuses_is_a_400_of_its_line(ran: Any) -> None:
    wrong, right = ran((CHAT, {**SAID, "max_tokens": "many"}), (CHAT, SAID))
    assert "max_tokens" in error_of(wrong)["message"]
    assert right["error"] is None


def test_captured_rows_are_in_the_answer(ran: Any) -> None:
    captured, plain = ran((CHAT, SAID | {"capture": CAPTURE}), (CHAT, SAID))
    (site,) = captured["response"]["body"]["choices"][0]["capture_results"]["inline"]["payload"]
    assert (site["point"], site["layer"], site["shape"]) == ("post_block", 0, [1, 2])
    assert "capture_results" not in plain["response"]["body"]["choices"][0]


def test_a_line_that_no_answer_could_name_ends_the_run(ran: Any) -> None:
    with pytest.raises(ValueError, match="custom_id"):
        ran({"method": "POST", "url": CHAT, "body": SAID})
