# SPDX-License-Identifier: Apache-2.0
"""`/v1/steering/train` over a real server: a training beside the engine, one at a time, which ends
when it is told to and with its server."""

from __future__ import annotations

import base64
import glob
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy

from tests.conformance.models import HIDDEN
from tests.http.server import KEY, Server, greedy, save_model, serve
from vllm.entrypoints.serve.steering.train_job import last_lines

pytestmark = pytest.mark.long

PATH = "/v1/steering/train"
SECONDS = 300.0
HEADERS = {"X-Steering-Key": KEY}
PAIRS = [
    {"prompt": f"{a}{b}", "positive": "eee", "negative": "ooo"} for a in "abcde" for b in "fghi"
]
SHORT = {"pairs": PAIRS, "layers": [1], "epochs": 12}
LONG = {"pairs": PAIRS * 40, "layers": [0, 1, 2], "epochs": 100}


@pytest.fixture(scope="module")
def model(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_models, tmp_path_factory.mktemp("training") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(model, tmp_path_factory.mktemp("log") / "log", "--steering-train") as started:
        yield started


def folders() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/vllm-steering-train-*"))


def started(server: Server, body: Any) -> None:
    answer = server.post(PATH, body, **HEADERS)
    assert (answer.status_code, answer.json()) == (200, {"state": "running"}), answer.text


def wait_for(server: Server, condition: Any) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        told: dict[str, Any] = server.get(PATH, **HEADERS).json()
        if condition(told):
            return told
        time.sleep(0.2)
    raise AssertionError(told)


def test_a_training_leaves_a_vector_that_steers(server: Server) -> None:
    assert server.get("/v1/steering").json()["train"] is True
    before = folders()
    started(server, SHORT)
    seen, answers = set(), 0
    while (told := server.get(PATH, **HEADERS).json())["state"] == "running":
        seen.update(told["said"])
        server.complete()  # the engine goes on
        answers += 1
    assert answers > 1 and any(line.startswith("pass 3: loss") for line in seen), told
    assert told["state"] == "done", told
    report = told["report"]
    assert report["held"] and report["settings"]["layers"] == [1]
    assert report["evidence"]["margin"] > max(report["evidence"]["randoms"])
    assert "command" not in report and folders() == before, "nothing is left, nothing is told"
    ((name, vector),) = safetensors.numpy.load(base64.b64decode(told["safetensors"])).items()
    assert name == "base.post_block.1" and vector.shape == (HIDDEN,)
    registered = server.change("/v1/steering/modules",
                               {"name": "learned", "safetensors": told["safetensors"]})  # fmt: skip
    assert registered.status_code == 200, registered.text

    def likely(**fields: Any) -> float:
        """log P of what was wanted."""
        body = greedy(prompt="afeee", max_tokens=1, echo=True, logprobs=0, **fields)
        answer = server.post("/v1/completions", body).json()
        return float(sum(answer["choices"][0]["logprobs"]["token_logprobs"][2:5]))

    plain = likely()
    assert likely(steering_modules=[["learned", 1.0]]) > plain + 1
    assert likely(steering_modules=[["learned", -1.0]]) < plain


def test_one_at_a_time_and_it_can_be_ended(server: Server) -> None:
    before = folders()
    started(server, LONG)
    assert len(folders() - before) == 1
    second = server.post(PATH, SHORT, **HEADERS)
    assert second.status_code == 409 and "one runs already" in second.text
    wait_for(server, lambda told: told["said"])
    asked = time.monotonic()
    ended = httpx.delete(server.url + PATH, headers=HEADERS, timeout=60)
    assert (ended.status_code, ended.json()) == (200, {"state": "cancelled"})
    assert time.monotonic() - asked < 20 and folders() == before
    assert server.get(PATH, **HEADERS).json() == {"state": "none"}
    assert httpx.delete(server.url + PATH, headers=HEADERS).json() == {"state": "none"}
    started(server, SHORT)
    wait_for(server, lambda told: told["state"] == "done")


def test_what_goes_wrong_is_told(server: Server) -> None:
    """By the training itself, where it is found out there."""
    same = [{**pair, "prompt": "a"} for pair in PAIRS]
    started(server, {**SHORT, "pairs": same[:5]})
    told = wait_for(server, lambda told: told["state"] != "running")
    if told["state"] == "failed":
        assert "error:" in "\n".join(told["said"])
    else:
        assert told["state"] == "done" and told["report"]["held"] == bool(told["safetensors"])


def test_refused_without_a_key(server: Server) -> None:
    for answer in (
        server.post(PATH, SHORT),
        server.get(PATH),
        httpx.delete(server.url + PATH),
        server.post(PATH, SHORT, **{"X-Steering-Key": "no"}),
    ):
        assert answer.status_code == 403, answer.text


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"pairs": PAIRS[:4]}, "pairs"),
        ({"pairs": PAIRS * 52}, "pairs"),
        ({"pairs": None}, "pairs"),
        ({"pairs": [*PAIRS, {"prompt": "a", "positive": "b"}]}, "pairs[20].negative"),
        ({"pairs": [{**PAIRS[0], "negative": "x" * 2001}, *PAIRS]}, "pairs[0].negative"),
        ({"pairs": [{**PAIRS[0], "split": "train"}, *PAIRS]}, "pairs[0]"),
        ({"layers": [4]}, "layers[0]"),
        ({"layers": []}, "layers"),
        ({"layers": "all"}, "layers"),
        ({"method": "reft"}, "method"),
        ({"epochs": 101}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"out": "/tmp/elsewhere"}, "out"),
    ],
)
def test_a_body_is_refused_by_its_field(server: Server, changed: Any, field: str) -> None:
    answer = server.post(PATH, {**SHORT, **changed}, **HEADERS)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: "), answer.text
    assert answer.json()["error"]["param"] == field


def children(pid: int) -> set[int]:
    """The processes that a process started."""
    found = set()
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            text = Path(stat).read_text()
        except OSError:
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found.add(int(stat.split("/")[2]))
    return found


def test_it_ends_with_its_server(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log", "--steering-train", cold=True) as server:
        before = children(server.process.pid)
        started(server, LONG)
        wait_for(server, lambda told: told["said"])
        trains = children(server.process.pid) - before
        assert trains
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
        deadline = time.monotonic() + 60
        while (alive := [p for p in trains if os.path.exists(f"/proc/{p}")]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        assert not alive


def test_off_unless_the_operator_turns_it_on(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log") as server:
        assert server.get("/v1/steering").json()["train"] is False
        for answer in (server.post(PATH, SHORT, **HEADERS), server.get(PATH, **HEADERS)):
            assert answer.status_code == 400 and "--steering-train" in answer.text


def test_its_lines_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(50_000)))
    said = last_lines(log)
    assert said[-1] == "line 49999" and len(said) == 200
    log.write_text("one\ntwo")
    assert last_lines(log) == ["one", "two"]
