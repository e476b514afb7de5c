# SPDX-License-Identifier: Apache-2.0
"""An engine core in a process of its own, when its frontend is killed or it cannot send any more.

Each engine lives in a program of its own, which may be killed or hang.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.conformance.engine import make_llm
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.capture.consumer import CaptureConsumer, CaptureSession, ConsumerContext, RequestInfo
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackEncoder

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

ORPHAN_SECONDS = 300
"""A deadline: they need two where nothing else runs. One that imports ends when it has, and a busy
machine imports for long; orphans used to live for hours."""
STANDS = "the engine stands"
PATIENCE = 900
"""Seconds until a test gives up: on a busy machine each process imports for minutes."""
CAPTURE = {"hooks": {"post_block": [0]}}
PROMPT = TokensPrompt(prompt_token_ids=[1, 2, 3])


class Mute(CaptureConsumer):
    """From its first session on its engine core cannot encode outputs."""

    location = "engine"
    capture = CAPTURE

    def open(self, request: RequestInfo) -> CaptureSession:
        def fail(*_: Any) -> Any:
            raise TypeError("cannot be encoded")

        MsgpackEncoder.encode_into = fail  # type: ignore[method-assign,assignment]
        raise ValueError("no session")


class Exits(CaptureConsumer):
    """Ends its engine core without a word, at its first session."""

    location = "engine"
    capture = CAPTURE

    def open(self, request: RequestInfo) -> CaptureSession:
        os._exit(0)


class ExitsEarly(Exits):
    """Ends it while it starts."""

    def start(self, context: ConsumerContext) -> None:
        os._exit(0)


CONSUMERS = (Mute, Exits, ExitsEarly)
NAMES = [consumer.__name__ for consumer in CONSUMERS]


def wait_to_be_killed(model: str) -> None:
    """Start an engine of two workers, and say when it stands."""
    llm = make_llm(Path(model), tensor_parallel_size=2)
    print(STANDS, flush=True)
    time.sleep(600)
    del llm


def ask_engines(model: str) -> None:
    """Ask engines that will not answer, and say what becomes of each."""
    for consumer in CONSUMERS:
        try:
            llm = make_llm(Path(model), capture_consumers=[{"consumer": consumer}])
            llm.generate(PROMPT, SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
        except (EngineDeadError, RuntimeError) as error:
            print(f"{consumer.__name__}:{type(error).__name__}", flush=True)


def program(function: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that calls a function of this module, and spawns its own as users' do."""
    code = f"import tests.serving.test_engine_death as t; t.{function}(*{arguments!r})"
    code = f"from tests.conformance import engine; engine.start_warm = lambda: None; {code}"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def engine_processes(frontend: subprocess.Popen[str]) -> list[psutil.Process]:
    """The engine core and its workers, with what Python started to keep track of them."""
    return psutil.Process(frontend.pid).children(recursive=True)


@pytest.mark.parametrize("loading", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_engine_core_and_its_workers_end_with_their_frontend(
    tiny_models: TinyModels, loading: bool
) -> None:
    with program("wait_to_be_killed", str(tiny_models.path("llama"))) as frontend:
        assert frontend.stdout is not None
        if loading:
            while len(core := engine_processes(frontend)) < 2:  # a core, and Python's tracker
                time.sleep(0.1)
        else:
            assert any(line.strip() == STANDS for line in frontend.stdout)
            core = engine_processes(frontend)
            assert len(core) >= 3
        time.sleep(3)
        assert all(map(lives, core)), "they end though their frontend lives"
        core = engine_processes(frontend)
        frontend.send_signal(signal.SIGTERM if loading else signal.SIGKILL)
        told = time.monotonic()
        while any(map(lives, core)) and time.monotonic() - told < ORPHAN_SECONDS:
            time.sleep(0.1)
        lived = time.monotonic() - told
        for orphan in (orphans := [*filter(lives, core)]):
            orphan.kill()
    assert not orphans
    print(f"orphans lived for {lived:.2f} s")


@pytest.mark.long
def test_an_engine_that_cannot_answer_is_dead(tiny_models: TinyModels) -> None:
    """Requests are an error, and so is a start; nobody waits for ever."""
    with program("ask_engines", str(tiny_models.path("llama"))) as frontend:
        try:
            said, _ = frontend.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            frontend.kill()
            raise AssertionError("a request or a start hangs") from None
    found = dict(word.split(":") for word in said.split() if word.partition(":")[0] in NAMES)
    assert found == {
        "Mute": "EngineDeadError",
        "Exits": "EngineDeadError",
        "ExitsEarly": "RuntimeError",
    }
