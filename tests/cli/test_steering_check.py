# SPDX-License-Identifier: Apache-2.0
"""`vllm steering check`: agrees on a right model, and says where on a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.conformance.checkpoints import section
from tests.conformance.engine import engine
from tests.mutations.taps import BOUND, bound_taps
from tests.support.serving import watching
from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.cli.steering.check import row
from vllm.entrypoints.cli.steering.findings import Finding, table
from vllm.entrypoints.cli.steering.huggingface import compare
from vllm.entrypoints.cli.steering.identities import check_identities
from vllm.entrypoints.cli.steering.probe import (
    GENERATED,
    Probe,
    without_largest,
    worst_row,
)
from vllm.v1.interventions.worker.layers import find_layers

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def probe(tiny_models: TinyModels) -> Iterator[Probe]:
    model = tiny_models.path("llama")
    with engine(model, enable_steering=True, capture_consumers=["inline"]) as llm:
        yield Probe(llm)


def model_of(probe: Probe) -> Any:
    [model] = probe.llm.apply_model(lambda model: model)
    return model


def disagreeing(findings: list[Finding]) -> list[str]:
    return [f.check for f in findings if f.agrees is False]


def test_right_model(probe: Probe) -> None:
    findings = check_identities(probe) + compare(probe)
    assert [f for f in findings if not f.agrees] == []
    names = "\n".join(f.check for f in findings)
    for name in ("post_block[l] = pre_attn[l+1]", "head(norm", "scale 0", "beside steered"):
        assert name in names
    for point in STREAM_POINTS:
        assert f"read {point} = transformers" in names
        assert f"read {point} but for its largest channels" in names
        assert f"write {point}[0] = transformers" in names


@contextmanager
def massive(probe: Probe) -> Iterator[None]:
    """Within, the second layer adds some 20,000 to one number of the stream, another for each
    token, and the last but one takes 20,000 away, as models that people have do."""
    layers: list[Any] = list(find_layers(model_of(probe)).values())

    def adds(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        output[:, 5] += 2e4 + args[0][:, 3]

    def takes(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        output[:, 5] -= 2e4

    first = layers[1].mlp.register_forward_hook(adds)
    second = layers[-2].mlp.register_forward_hook(takes)
    try:
        yield
    finally:
        first.remove()
        second.remove()


@contextmanager
def padding(probe: Probe) -> Iterator[None]:
    """Within, every second token has an embedding of zeros."""
    weight = model_of(probe).model.embed_tokens.weight
    before = weight.clone()
    try:
        with torch.inference_mode():
            weight[::2] = 0
        yield
    finally:
        with torch.inference_mode():
            weight.copy_(before)


def test_massive_activations(probe: Probe) -> None:
    """What rounding does to a sum of large numbers is no mistake."""
    with massive(probe):
        (answer,) = probe.run([(probe.prompts[0], {})])
        findings = check_identities(probe)
    largest = [float(rows.abs().max()) for rows in answer.rows.values()]
    assert max(largest) > 1e4 > 100 * largest[-1], "nothing is massive, or it stays"
    assert [f for f in findings if not f.agrees] == []


def test_rows_of_zeros(probe: Probe) -> None:
    with padding(probe):
        (answer,) = probe.run([(probe.prompts[0], {})])
        findings = check_identities(probe)
    assert not answer.rows["pre_attn", 0].any(dim=-1).all()
    assert [f for f in findings if not f.agrees] == []
    assert worst_row(torch.zeros(2, 3), torch.zeros(2, 3)) == 0
    assert worst_row(torch.ones(2, 3), torch.zeros(2, 3)) == torch.inf


def test_a_batch_has_all_that_was_asked_for_at_once(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine runs while requests still arrive, as in a process of its own."""
    llm = probe.llm
    add = llm.llm_engine.add_request

    def add_and_run(*args: Any, **kwargs: Any) -> Any:
        made = add(*args, **kwargs)
        llm.llm_engine.step()
        return made

    monkeypatch.setattr(llm.llm_engine, "add_request", add_and_run)
    with watching(llm) as steps:
        probe.run([(prompt, {}) for prompt in probe.prompts])
    assert len(steps.outputs[0].num_scheduled_tokens) == len(probe.prompts)
    assert len(steps.outputs) == GENERATED


@pytest.mark.parametrize("within", [nullcontext, massive])
@pytest.mark.parametrize("mistake", BOUND)
def test_broken_taps(
    probe: Probe, mistake: str, within: Callable[[Probe], AbstractContextManager[None]]
) -> None:
    layers = find_layers(model_of(probe))
    before = bound_taps(layers)
    broken = BOUND[mistake](before)
    try:
        for index, layer in layers.items():
            layer.taps = broken[index]  # type: ignore[assignment]
        with within(probe):
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


def test_a_massive_channel_does_not_hide_the_rest() -> None:
    """Half of each number is missing but for the massive one's; without it that is seen."""
    want = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    want[:, 7] = 22_528.0
    got = want / 2
    got[:, 7] = want[:, 7]
    assert worst_row(got, want) < 1e-3
    rest = worst_row(without_largest(got, want), without_largest(want, want))
    assert rest == pytest.approx(0.5)


def test_a_row_for_the_page(probe: Probe) -> None:
    """What is printed makes a row; what disagrees is named in it."""
    findings = [
        Finding.at_most("read pre_attn = transformers", 2e-6, 1e-5),
        Finding.at_most("read pre_attn but for its largest channels", 3e-5, 1e-5),
        Finding.at_most("write pre_attn[0] = transformers", 4e-5, 1e-3),
        Finding.at_most("write pre_attn[9] = transformers", 7e-5, 1e-3),
        Finding.skipped("c", "no head"),
    ]
    made = json.loads(row("models/small/", probe, findings))
    assert (made["model"], made["layers"], made["dtype"]) == ("small", 4, "float32")
    assert {"tp", "pp", "mode", "graphs", "device", "version", "points"} < made.keys()
    line = section([{**made, "by": "me | here"}]).splitlines()[-1]
    assert line.startswith("| small | LlamaForCausalLM | cpu, float32, eager, tp 1, ")
    assert "| 2e-06, 3e-05 | none, none | none, none | 7e-05 | none |" in line
    assert line.endswith("| 3 of 4; not read pre_attn but for its largest channels | me / here |")
