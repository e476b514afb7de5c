# SPDX-License-Identifier: Apache-2.0
"""Layers that may not have taps are refused when they are bound, by name and with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.plans import config_of
from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, UnboundTaps
from vllm.v1.interventions.worker.layers import (
    bound_taps,
    executions,
    find_layers,
    own_layers,
    refuse_layers,
)
from vllm.v1.interventions.worker.runner import WorkerInterventions

pytestmark = pytest.mark.quick


class Scaled(nn.Module):
    """A layer whose wiring assumes two things away."""

    taps = UnboundTaps("pre_attn", unless=("float16", "splits_rows"))

    def __init__(self, splits_rows: bool = False) -> None:
        super().__init__()
        self.splits_rows = splits_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return x


class Switched(Scaled):
    """A layer whose wiring takes one thing to be on."""

    taps = UnboundTaps("pre_attn", unless=("not splits_rows",))


class Several(nn.Module):
    """A layer of a class that is refused."""

    taps = UnboundTaps(refused="it has several streams")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return x


class Looped(nn.Module):
    """A layer that runs several times, with the attention of each time."""

    taps = UnboundTaps("pre_attn", loops="attn.times")

    def __init__(self, **times: str) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.times = nn.ModuleDict({key[1:]: nn.Module() for key in times})
        for key, name in times.items():
            self.attn.times[key[1:]].layer_name = name  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, time: int) -> torch.Tensor:
        """As the codemod has it."""
        taps = self.taps.at(time)
        return taps.pre_attn(x)


def model_of(*layers: nn.Module) -> dict[int, nn.Module]:
    return find_layers(nn.ModuleDict({"layers": nn.ModuleList(layers)}))


def test_layers_within_the_assumptions_pass() -> None:
    layers = model_of(Scaled(), Scaled())
    assert set(layers) == {0, 1}
    refuse_layers(layers, torch.bfloat16)
    refuse_layers(model_of(Switched(True)), torch.bfloat16)


def test_a_wired_block_inside_another_is_a_part_of_it() -> None:
    outer, after = Scaled(), Scaled()
    outer.add_module("inner", Scaled(splits_rows=True))
    layers = model_of(outer, after)
    assert layers == {0: outer, 1: after}
    refuse_layers(layers, torch.bfloat16)


def test_drafts_in_the_same_tree_stay_unbound() -> None:
    """Multi-token prediction modules of the target's layer class, numbered past its depth."""
    own, draft = nn.ModuleList([Scaled(), Scaled()]), nn.ModuleDict({"2": Scaled()})
    model = nn.ModuleDict({"layers": own, "mtp": nn.ModuleDict({"layers": draft})})
    config = config_of()
    config.model_config = SimpleNamespace(  # type: ignore[assignment]
        get_hidden_size=lambda: 4,
        get_vocab_size=lambda: 100,
        get_total_num_hidden_layers=lambda: 2,
        dtype=torch.float32,
    )
    interventions = WorkerInterventions(config, torch.device("cpu"))
    interventions.bind(model)
    assert all(isinstance(layer.taps, BoundTaps) for layer in own)
    assert not isinstance(draft["2"].taps, BoundTaps)
    assert interventions.shape is not None and set(interventions.shape.layers) == {0, 1}


def looped() -> nn.Module:
    """Two stacks of one layer, in turn, as a model counts them that runs each twice."""
    slow = Looped(_1="m.slow.layers.1.attn", _3="m.slow.layers.3.attn")
    fast = Looped(_0="m.fast.layers.0.attn", _2="m.fast.layers.2.attn")
    stacks = {name: nn.ModuleDict({"layers": nn.ModuleList([each])})
              for name, each in (("slow", slow), ("fast", fast))}  # fmt: skip
    return nn.ModuleDict(stacks)


def test_a_layer_has_the_number_of_each_execution() -> None:
    model = looped()
    found = find_layers(model)
    fast, slow = model["fast"]["layers"][0], model["slow"]["layers"][0]  # type: ignore[index]
    assert found == {0: fast, 1: slow, 2: fast, 3: slow}
    assert own_layers(found, 1) == found, "its config may count what is run, or what there is"
    assert [executions(found[n])[n] for n in range(4)] == [0, 1, 2, 3]
    assert executions(Scaled()) == {}

    def shift(index: int) -> BoundTaps:
        class Shift(PassTap):
            def __call__(self, h: torch.Tensor) -> torch.Tensor:
                return h + 10**index

        return BoundTaps(Shift(), PassTap(), PassTap(), PassTap())

    x = torch.zeros(1)
    assert slow(x, 3) == 0, "unbound, it does nothing"
    for layer, taps in bound_taps(found, shift).items():
        vars(layer)["taps"] = taps
    assert [int(found[n](x, n)) for n in range(4)] == [1, 10, 100, 1000]


def test_executions_of_one_number_are_refused() -> None:
    model = looped()
    model["slow"]["layers"][0].attn.times["3"].layer_name = "m.slow.layers.2.attn"  # type: ignore
    with pytest.raises(ValueError, match="two decoder layers have index 2"):
        find_layers(model)


@pytest.mark.parametrize(
    ("layers", "dtype", "says"),
    [
        ((Scaled(),), torch.float16, "Scaled .* with float16"),
        ((Scaled(), Scaled(splits_rows=True)), torch.bfloat16, "Scaled .* with splits_rows"),
        ((Switched(True), Switched()), torch.bfloat16, "Switched .* with not splits_rows"),
        ((Several(),), torch.bfloat16, "Several .* several streams"),
    ],
)
def test_others_are_refused(layers: tuple[nn.Module, ...], dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        refuse_layers(model_of(*layers), dtype)
