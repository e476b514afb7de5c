# SPDX-License-Identifier: Apache-2.0
"""`vllm steering check`: agrees on a right model, and says where on a broken one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conformance.engine import engine
from tests.mutations.taps import BOUND, bound_taps
from vllm.entrypoints.cli.steering.findings import Finding, table
from vllm.entrypoints.cli.steering.huggingface import compare
from vllm.entrypoints.cli.steering.identities import check_identities
from vllm.entrypoints.cli.steering.probe import Probe
from vllm.v1.interventions.worker.tap_layers import find_layers

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def probe(tiny_models: TinyModels) -> Iterator[Probe]:
    model = tiny_models.path("llama")
    with engine(model, enable_steering=True, capture_consumers=["inline"]) as llm:
        yield Probe(llm)


def disagreeing(findings: list[Finding]) -> list[str]:
    return [f.check for f in findings if f.agrees is False]


def test_right_model(probe: Probe) -> None:
    findings = check_identities(probe) + compare(probe)
    assert [f for f in findings if not f.agrees] == []
    names = "\n".join(f.check for f in findings)
    for name in ("post_block[l] = pre_attn[l+1]", "head(norm", "scale 0", "beside steered"):
        assert name in names
    for point in ("pre_attn", "post_attn", "post_block"):
        assert f"read {point} = transformers" in names
        assert f"write {point}[0] = transformers" in names


@pytest.mark.parametrize("mistake", BOUND)
def test_broken_taps(probe: Probe, mistake: str) -> None:
    model = probe.llm.apply_model(lambda model: model)[0]
    layers = find_layers(model)
    before = bound_taps(layers)
    broken = BOUND[mistake](before)
    try:
        for index, layer in layers.items():
            layer.taps = broken[index]  # type: ignore[assignment]
        assert disagreeing(check_identities(probe))
    finally:
        for index, layer in layers.items():
            layer.taps = before[index]  # type: ignore[assignment]


def test_table() -> None:
    lines = table(
        [
            Finding.at_most("a", 1.0, 0.5, "why"),
            Finding.at_most("b", float("nan"), 0.5),
            Finding.skipped("c", "no head"),
        ]
    ).split("\n")
    assert "DISAGREES" in lines[1] and "why" in lines[1]
    assert "DISAGREES" in lines[2]
    assert "not checked" in lines[3] and "no head" in lines[3]
