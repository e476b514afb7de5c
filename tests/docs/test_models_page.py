# SPDX-License-Identifier: Apache-2.0
"""docs/models.md is what the results and the table of wired classes say, and covers vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patches.taps.rows import Idiom
from patches.taps.table import ROWS
from tests.conformance import report
from tests.conformance.proof import load_results
from tests.conformance.zoo import MODELS
from tests.conformance.zoo.absent import ABSENT
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

pytestmark = pytest.mark.quick


def test_page_is_generated() -> None:
    """After wiring a class or measuring: `python -m tests.conformance.report [DIR]`."""
    assert report.PAGE.read_text() == report.render(load_results())


def test_page_follows_the_table() -> None:
    """A class that is wired, or no longer is, changes the page."""
    results = load_results()
    page = report.render(results)
    for key in ("llama.py:LlamaDecoderLayer", "gpt2.py:GPT2Block"):
        rows = tuple(
            replace(row, idiom=Idiom.EXCLUDED, reason="a test") if row.key.endswith(key) else row
            for row in ROWS
        )
        assert report.render(results, rows) != page


def test_every_architecture_is_accounted_for() -> None:
    known = {row.architecture for row in MODELS.values()} | set(ABSENT)
    assert set(_TEXT_GENERATION_MODELS) <= known


def test_measured_out_of_tolerance_is_not_verified() -> None:
    results = load_results()
    page = report.render(results).split("## Not verified")[0]
    bad = {r.architecture for r in results if r.failures()}
    good = {r.architecture for r in results if not r.failures()}
    assert good and not [name for name in bad - good if f"| {name} |" in page]
