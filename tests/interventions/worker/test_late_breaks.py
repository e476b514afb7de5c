# SPDX-License-Identifier: Apache-2.0
"""Attention is not imported before upstream would, and breakable CUDA graphs that come too late for
it are refused. What such graphs compute on a GPU: tests/gpu/breakable.py."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import vllm.v1.interventions.worker.check.taps  # noqa: F401  which imports attention
from vllm.config import CUDAGraphMode
from vllm.v1.interventions.worker.variants.graphs import refuse_late_breaks

pytestmark = pytest.mark.quick

BREAKS = "VLLM_USE_BREAKABLE_CUDAGRAPH"
ATTENTION = "vllm.model_executor.layers.attention.attention"

IN_TIME = f"""
import sys
from types import SimpleNamespace
from vllm import LLM
print("{ATTENTION}" in sys.modules)
import vllm.v1.interventions.worker.check.taps
print("{ATTENTION}" in sys.modules)
from vllm.config import CUDAGraphMode
from vllm.v1.interventions.worker.variants.graphs import refuse_late_breaks
mode = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
refuse_late_breaks(SimpleNamespace(compilation_config=mode))
print("fine")
"""
"""For a process that has the variable before it imports anything."""


def test_a_frontend_does_not_import_attention_and_breaks_in_time_are_fine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_TIME],
        env={**os.environ, BREAKS: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "True", "fine"]


def test_breaks_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(mode: CUDAGraphMode) -> Any:
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))

    assert ATTENTION in sys.modules and BREAKS not in os.environ
    monkeypatch.setenv(BREAKS, "1")
    refuse_late_breaks(config(CUDAGraphMode.NONE))
    with pytest.raises(ValueError, match=f"set {BREAKS}=1 in the environment"):
        refuse_late_breaks(config(CUDAGraphMode.FULL_AND_PIECEWISE))
