# SPDX-License-Identifier: Apache-2.0
"""Layers that may not have taps are refused when they are bound, by name and with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.plans import config_of
from vllm.model_executor.layers.residual_taps import BoundTaps, UnboundTaps
from vllm.v1.interventions.worker.runner import WorkerInterventions
from vllm.v1.interventions.worker.tap_layers import find_layers, refuse_layers

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


class Several(nn.Module):
    """A layer of a class that is refused."""

    taps = UnboundTaps(refused="it has several streams")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        return x


def model_of(*layers: nn.Module) -> dict[int, nn.Module]:
    return find_layers(nn.ModuleDict({"layers": nn.ModuleList(layers)}))


def test_layers_within_the_assumptions_pass() -> None:
    layers = model_of(Scaled(), Scaled())
    assert set(layers) == {0, 1}
    refuse_layers(layers, torch.bfloat16)


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
        get_total_num_hidden_layers=lambda: 2,
        dtype=torch.float32,
    )
    interventions = WorkerInterventions(config, torch.device("cpu"))
    interventions.bind(model)
    assert all(isinstance(layer.taps, BoundTaps) for layer in own)
    assert not isinstance(draft["2"].taps, BoundTaps)
    assert interventions.shape is not None and set(interventions.shape.points) == {0, 1}


@pytest.mark.parametrize(
    ("layers", "dtype", "says"),
    [
        ((Scaled(),), torch.float16, "Scaled .* with float16"),
        ((Scaled(), Scaled(splits_rows=True)), torch.bfloat16, "Scaled .* with splits_rows"),
        ((Several(),), torch.bfloat16, "Several .* several streams"),
    ],
)
def test_others_are_refused(layers: tuple[nn.Module, ...], dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        refuse_layers(model_of(*layers), dtype)
