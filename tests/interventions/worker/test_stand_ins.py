# SPDX-License-Identifier: Apache-2.0
"""The code of the plain variant: upstream compiles a copy of the module for it, and keeps on the
copy what it compiled. A module of upstream's decorator runs here, without an engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, UnboundTaps
from vllm.v1.interventions.worker.variants.variants import ModelVariants

pytestmark = pytest.mark.quick


class Adds(PassTap):
    """A tap that can be seen in what a layer returns."""

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h + 1000


class Layer(nn.Module):
    taps = UnboundTaps("pre_attn")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """As a decoder layer, with one tap."""
        return self.taps.pre_attn(h) * self.weight


@support_torch_compile(dynamic_arg_dims={"h": 0})
class Stack(nn.Module):
    """As a model's stack of layers, which upstream compiles."""

    late = 0.0

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """All layers."""
        return self.layer(h) + self.late


@pytest.fixture(params=["0", "1"], ids=["bytecode", "ahead-of-time"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[], tuple[ModelVariants, nn.Sequential]]]:
    """Makes a model and its variants, for each of upstream's ways to keep compiled code."""
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", request.param)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    mode, backend = CompilationMode.DYNAMO_TRACE_ONCE, ("eager", "inductor")[int(request.param)]
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode, backend=backend))

    def made() -> tuple[ModelVariants, nn.Sequential]:
        stack: Any = Stack(vllm_config=config)
        bound = BoundTaps(Adds(), PassTap(), PassTap(), PassTap())
        model = nn.Sequential(stack)
        return ModelVariants(config, model, {stack.layer: bound}), model

    with set_current_vllm_config(config):
        yield made
    torch._dynamo.reset()


def run(forms: ModelVariants, model: nn.Module, tapped: bool) -> float:
    forms.choose(tapped)
    values = model(torch.full((5, 1), 3.0))
    assert (values == values[0]).all()
    return float(values[0, 0])


def test_each_variant_runs_its_own_code(
    make: Callable[[], tuple[ModelVariants, nn.Sequential]],
) -> None:
    """Upstream keeps all that it compiles on the module that it calls."""
    forms, model = make()
    module: Any = model[0]
    module.late = 0.5  # upstream sets some attributes when the model is loaded
    states, results = [], []
    for tapped in (False, True, False, True):
        before = {n: id(v) for n, v in vars(module).items() if n != "stand_in"}
        results.append(run(forms, model, tapped))
        after = {n: id(v) for n, v in vars(module).items() if n != "stand_in"}
        states.append(before == after)
    plain, steered = 3 * 2 + 0.5, 1003 * 2 + 0.5
    moved = "upstream keeps code elsewhere than on the module: see its compilation/decorators.py"
    assert results == [plain, steered, plain, steered], moved
    # The plain variant leaves no trace on the module, the other does when it compiles.
    assert states == [True, False, True, True], moved
    assert len(list(model.modules())) == 3 and "stand_in" not in dict(model.named_modules())
    module.layer.weight.fill_(7.0)
    assert [run(forms, model, t) for t in (False, True)] == [3 * 7 + 0.5, 1003 * 7 + 0.5]


def test_a_model_that_goes_lets_go_of_both(
    make: Callable[[], tuple[ModelVariants, nn.Sequential]],
) -> None:
    """An engine that goes cleans up the modules of its model, as here."""
    forms, model = make()
    for tapped in (True, False):
        run(forms, model, tapped)
    module: Any = model[0]
    alive = {"module": ref(module), "stand-in": ref(module.stand_in), "layer": ref(module.layer)}
    module.cleanup()
    torch._dynamo.reset()
    del forms, module, model
    for _ in range(2):  # the module first, then its stand-in
        gc.collect()
    assert not [name for name, of in alive.items() if of() is not None]
