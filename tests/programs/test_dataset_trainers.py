# SPDX-License-Identifier: Apache-2.0
"""Rows that leave an engine for trainers in other processes: killed in turn, and two trainers of
sparse autoencoders as they were published."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import ROOT
from tests.http.server import save_model
from tests.peers.packages import folder_of
from tests.support import stream_autoencoders, stream_trainer
from tests.support.warm import Warm

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.full

TRAINER = ROOT / "vllm" / "pilot" / "dataset"
"""The folder with `trainer`, which is all that a trainer gets of us."""
TEXTS = [f"{i} apples and {'pears ' * (i % 5)}" for i in range(60)]


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_models, tmp_path_factory.mktemp("stream") / "model")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def address_of(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/rows"


class Feeding:
    """An engine's process that is started again whenever it was killed."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self._folder, self._arguments, self.starts = tmp_path, arguments, 0

    @contextmanager
    def running(self) -> Iterator[Warm]:
        self.starts += 1
        out = self._folder / f"feeder-{self.starts}"
        engine = Warm(
            "tests.support.stream_feeder", self._arguments, out, out.with_suffix(".err"),
            dict(os.environ), ROOT,
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.kill()
            engine.wait()


def apart(program: Any, *arguments: str, beside: str = "") -> subprocess.Popen[str]:
    """A program in a Python that finds nothing of ours."""
    environment = {**os.environ, "PYTHONPATH": beside, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, program.__file__, str(TRAINER), *arguments],
        cwd=arguments[-1] if beside else None,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def counted(file: Path) -> int:
    return len(json.loads(file.read_text())["rows"]) if file.exists() else 0


def grown(file: Path, by: int, process: subprocess.Popen[str]) -> None:
    """Wait until the trainer has so many rows more."""
    aim, until = counted(file) + by, time.monotonic() + 60
    while counted(file) < aim and process.poll() is None:
        assert time.monotonic() < until, "no rows come"
        time.sleep(0.01)


def test_killed_in_turn(model: Path, data: Path, tmp_path: Path) -> None:
    """Whoever is killed, what the trainer has is there once, and in the end it has all."""
    file, address = tmp_path / "trained.json", address_of(tmp_path)
    feeding = Feeding(tmp_path, str(model), str(data), address, "8", "64", "2")
    trainer = apart(stream_trainer, address, str(file))
    with feeding.running():
        grown(file, 60, trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        trainer = apart(stream_trainer, address, str(file))
        grown(file, 60, trainer)
    with feeding.running():  # the one before was killed
        grown(file, 60, trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    between = counted(file)
    trainer = apart(stream_trainer, address, str(file))
    with feeding.running():
        out, errors = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, errors
    rows = json.loads(file.read_text())["rows"]
    assert out == f"all {len(rows)}\n" and 180 <= between < len(rows)
    pairs = [(example, position) for example, position, _ in rows]
    half = sorted(set(pairs))
    assert sorted(pairs) == sorted(half * 2), "two epochs, each row once in each"
    assert {example for example, _ in half} == set(range(len(TEXTS)))
    assert pairs != sorted(pairs)
    sums: dict[tuple[int, int], list[float]] = {}
    for example, position, total in rows:
        sums.setdefault((example, position), []).append(total)
    assert all(abs(a - b) <= 1e-3 * max(1, abs(a)) for a, b in sums.values())


def test_trainers_as_they_were_published(model: Path, data: Path, tmp_path: Path) -> None:
    """Each learns from the stream."""
    packages = folder_of("trainers")
    address = address_of(tmp_path)
    trainer = apart(stream_autoencoders, address, str(tmp_path), beside=str(packages))
    with Feeding(tmp_path, str(model), str(data), address, "64", "512", "0").running():
        out, errors = trainer.communicate(timeout=110)
    assert trainer.returncode == 0, errors[-3000:]
    told = json.loads(out.splitlines()[-1])
    assert set(told) == {"sae_lens", "dictionary_learning"}
    for before, after in told.values():
        assert after < 0.5 * before and after < 0.5, told
