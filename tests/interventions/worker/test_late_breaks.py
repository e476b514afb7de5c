# SPDX-License-Identifier: Apache-2.0
"""Attention is not imported before upstream would, and breakable CUDA graphs that come too late for
it are refused. What such graphs compute on a GPU: tests/gpu/breakable.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

ATTENTION = "vllm.model_executor.layers.attention.attention"

IMPORTS = f"""
import sys
from vllm import LLM
print("{ATTENTION}" in sys.modules)
import vllm.v1.interventions.worker.check.taps
print("{ATTENTION}" in sys.modules)
"""

REFUSES = """
import os
from types import SimpleNamespace
from vllm.config import CUDAGraphMode
from vllm.v1.interventions.worker.variants.graphs import refuse_late_breaks
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE):
    try:
        refuse_late_breaks(SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode)))
    except ValueError as error:
        print(error)
    else:
        print("fine")
"""


def printed(program: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_frontend_does_not_import_attention() -> None:
    assert printed(IMPORTS) == ["False", "True"]


def test_breaks_that_come_too_late_are_refused() -> None:
    fine, refused = printed(REFUSES)
    assert fine == "fine"
    assert "set VLLM_USE_BREAKABLE_CUDAGRAPH=1 in the environment" in refused
    assert printed(REFUSES, VLLM_USE_BREAKABLE_CUDAGRAPH="1") == ["fine", "fine"]
