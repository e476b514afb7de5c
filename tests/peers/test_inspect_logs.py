# SPDX-License-Identifier: Apache-2.0
"""The provider `vllm-steer/` with a model of 8B's shape: small logs, rows that are of their own
sample with many connections and retries, and a cache that tells vectors apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests import ROOT
from tests.peers.inspect_fake import HIDDEN, LAYERS, TOGETHER, row_of
from tests.peers.inspect_logs import CASES, LAYER, SAMPLES, digest
from tests.peers.packages import folder_of

pytestmark = pytest.mark.long

Said = dict[str, Any]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("inspect-logs")
    path = [str(folder_of("inspect")), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.inspect_logs", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OPENAI_API_KEY": "none"},
        capture_output=True, text=True, check=False, timeout=1800, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    made: Said = json.loads((folder / "said.json").read_text())
    assert {case["status"] for case in made.values()} == {"success"}
    return made


def rows_of(prompt: str) -> list[str]:
    return [digest(row_of(prompt, layer)[None]) for layer in range(LAYERS)]


def test_a_log_grows_by_less_than_a_megabyte(said: Said) -> None:
    assert said["plain"]["rows"] == {} != said["captured"]["rows"]
    more = said["captured"]["size"] - said["plain"]["size"]
    assert 0 < more < 1 << 20 < SAMPLES * LAYERS * HIDDEN * np.float16().itemsize


@pytest.mark.parametrize("case", ["captured", "crowd", "busy", "choices"])
def test_rows_are_of_their_own_sample(said: Said, case: str) -> None:
    """All of a crowd were open at once, and who was turned away came back."""
    prompts, _, options = CASES[case]
    want = [rows_of(prompt) for prompt in prompts]
    assert len({row for rows in want for row in rows}) == len(prompts) * LAYERS  # the twin
    choices = options.get("num_choices", 1)
    assert said[case]["rows"] == {
        prompt: [rows] * choices for prompt, rows in zip(prompts, want, strict=True)
    }
    times = 3 if case == "busy" else 1
    assert said[case]["asked"] == dict.fromkeys(prompts, times)
    assert len(CASES["crowd"][0]) == TOGETHER


def test_the_cache_tells_vectors_and_scales_apart(said: Said) -> None:
    """Two vectors that differ in one number of thousands, too."""
    got = {
        name: said[name]["rows"]["cached"][0][LAYER]
        for name in ("first", "other vector", "other scale", "again")
    }
    assert len(set(got.values())) == 3 and got["again"] == got["first"]
    asked = [said[name]["asked"] for name in got]
    assert asked == [{"cached": 1}] * 3 + [{}]
