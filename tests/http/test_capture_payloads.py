# SPDX-License-Identifier: Apache-2.0
"""Payloads of consumers in answers: what JSON can hold arrives, the rest is that result's error."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.steering import capture_results
from vllm.entrypoints.serve.steering.capture_results import (
    add_capture_results,
    has_captured,
    written,
    written_chunk,
)
from vllm.entrypoints.serve.steering.packed import pack, unpack
from vllm.v1.capture.results import CaptureResult

pytestmark = pytest.mark.quick


class Choice(BaseModel):
    """As upstream's choices: extra fields are kept."""

    model_config = ConfigDict(extra="allow")
    text: str


def sent(payload: Any) -> dict[str, Any]:
    """The result of a consumer as a client gets it, beside text and another consumer's result."""
    choice = Choice(text="said")
    results = {
        "odd": CaptureResult("ok", None, payload),
        "other": CaptureResult("ok", None, {"rows": 3}),
    }
    output: Any = SimpleNamespace(capture_results=results, finish_reason="length", rules=None)
    add_capture_results(choice, output)
    got = json.loads(choice.model_dump_json())
    assert got["text"] == "said"
    assert got["capture_results"]["other"] == {
        "status": "ok",
        "error": None,
        "payload": {"rows": 3},
    }
    odd: dict[str, Any] = got["capture_results"]["odd"]
    return odd


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (torch.tensor([3.0, 4.0]).norm(), 5.0),
        (torch.tensor(2, dtype=torch.int32), 2),
        (torch.tensor(True), True),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(float("nan")), None),
        (np.float64(1.5), 1.5),
        (np.array(7), 7),
        ({"n": np.int64(1), "x": [1.5, None, "a"]}, {"n": 1, "x": [1.5, None, "a"]}),
        (0, 0),
    ],
)
def test_numbers_are_payloads(payload: Any, expected: Any) -> None:
    assert sent(payload) == {"status": "ok", "error": None, "payload": expected}


@pytest.mark.parametrize(
    "payload",
    [
        np.array([1.0, 2.0], dtype=">f4"),
        np.array([1.0, 2.0], dtype="<f4"),
        torch.tensor([-1.0, -2.0])._neg_view(),
        torch.tensor([1.0, 2.0], requires_grad=True),
    ],
)
def test_arrays_of_any_kind_arrive(payload: Any) -> None:
    result = sent(payload)
    assert unpack(result["payload"], "payload").tolist() == [1.0, 2.0]


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "payload",
    [
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        np.array(["a", "b"]),
        np.array([object()]),
        np.ma.array([1.0, 2.0], mask=[0, 1]),
        np.array([1.0], np.longdouble),
        LOOP,
        "half \ud800",
        {"half \ud800": 1},
    ],
    ids=["meta", "sparse", "strings", "objects", "masked", "long double", "loop", "text", "key"],
)
def test_what_json_cannot_hold_is_an_error_of_that_result(payload: Any) -> None:
    result = sent(payload)
    assert (result["status"], result["payload"]) == ("error", None)
    assert result["error"].startswith("the payload cannot be written as JSON: ")


class Response(BaseModel):
    choices: list[Choice]


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_are_written_in_a_thread(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the event loop, which packs nothing when it makes the choice. A response without
    results stays with upstream, or is written at once."""
    packed_by: list[int] = []

    def packing(values: torch.Tensor) -> dict[str, Any]:
        packed_by.append(threading.get_ident())
        return pack(values)

    monkeypatch.setattr(capture_results, "pack", packing)
    plain, captures = Choice(text="plain"), Choice(text="captures")
    results = {"odd": CaptureResult("ok", None, torch.ones(3))}
    output: Any = SimpleNamespace(capture_results=results, finish_reason="length", rules=None)
    add_capture_results(captures, output)
    response: Any = Response(choices=[plain, captures])
    asked = CompletionRequest.model_validate({"prompt": "x"})
    assert not packed_by
    assert has_captured(response)
    assert not has_captured(Response(choices=[plain]))  # type: ignore[arg-type]
    if streamed:
        text: str | bytes = asyncio.run(written_chunk(response))
    else:
        answer = asyncio.run(written(response, asked, {"of": "upstream"}))
        assert answer.headers["of"] == "upstream"
        text = bytes(answer.body)
    assert len(packed_by) == 1 and threading.get_ident() not in packed_by
    assert json.loads(text) == json.loads(response.model_dump_json())
    assert threading.get_ident() in packed_by


def test_a_chunk_without_rows_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_results, "run_in_threadpool", None)
    plain: Any = Response(choices=[Choice(text="plain")])
    assert json.loads(asyncio.run(written_chunk(plain)))["choices"] == [{"text": "plain"}]
