# SPDX-License-Identifier: Apache-2.0
"""What clients get when the server is told to end, and what its log says of them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import httpx
import pytest

from tests.http.server import greedy, save_model, serve
from tests.support.plans import config_of
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.steering import serving
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

CLIENTS = 24
PATIENCE = 300
"""Seconds until a test gives up waiting. Clients wait for less than one where nothing else runs,
which the test prints; what hangs would wait for ever."""


@pytest.mark.parametrize(
    ("number", "captures"),
    [
        (signal.SIGTERM, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.long),
    ],
)
def test_every_client_has_an_answer_or_an_error_soon_after_a_signal(
    tiny_models: TinyModels, tmp_path: Path, number: signal.Signals, captures: bool
) -> None:
    model = save_model(tiny_models, tmp_path / "model")
    consumer = f"--capture-consumers=filesystem:root={tmp_path / 'acts'}"
    capture = {"hooks": {"post_block": "all"}, "positions": "all"}
    fields = {"capture": {"filesystem": capture}} if captures else {}
    begun = threading.Barrier(CLIENTS + 1)

    def ask(_: int) -> tuple[str, float]:
        """How it ended, a status or the name of an exception, and when."""
        body = greedy(prompt="Today I went", max_tokens=80, **fields)
        begun.wait(PATIENCE)
        try:
            while True:  # until the server ends
                answer = httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE)
                if answer.status_code != 200 or "abort" in answer.text:
                    return str(answer.status_code), time.monotonic()
        except httpx.HTTPError as error:
            return type(error).__name__, time.monotonic()

    with (
        serve(model, tmp_path / "server.log", consumer) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        url = server.url
        asked = [pool.submit(ask, n) for n in range(CLIENTS)]
        begun.wait(PATIENCE)
        time.sleep(1)
        server.process.send_signal(number)
        told = time.monotonic()
        ends = [one.result(2 * PATIENCE) for one in asked]
    assert not {"ReadTimeout", "PoolTimeout"} & {end for end, _ in ends}, ends
    print("seconds after the signal:", [f"{when - told:.2f}" for _, when in ends])


@pytest.mark.quick
def test_a_request_id_cannot_forge_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Threads:
        async def run(self, work: Any, *args: Any) -> Any:
            return work(*args)

    log = Mock()
    monkeypatch.setattr(serving, "logger", log)
    monkeypatch.setattr(serving, "checked", lambda *_: Plan())
    processor = SimpleNamespace(
        plan_threads=Threads(), tokenizer=None, modules=None, renderer=Mock()
    )
    stub: Any = SimpleNamespace(
        engine_client=SimpleNamespace(input_processor=processor, vllm_config=config_of()),
        request_logger=object(),
        _extract_prompt_components=lambda prompt: SimpleNamespace(token_ids=[1]),
    )
    body = CompletionRequest.model_validate({"prompt": "a", "steering_inherit_global": True})
    params = SamplingParams(steering_inherit_global=True)
    prompt: Any = {"type": "token"}
    for request_id in ("cmpl-1\nINFO: forged", "cmpl-\u2028forged", "cmpl-2"):
        asyncio.run(serving.intervene(stub, body, request_id, params, prompt))
    said = [text % tuple(values) for (text, *values), _ in log.info.call_args_list]
    assert [len(line.splitlines()) for line in said] == [1, 1, 1]
    assert said[0].startswith("Request cmpl-1\\nINFO: forged: ")
    assert said[2].startswith("Request cmpl-2: ")
