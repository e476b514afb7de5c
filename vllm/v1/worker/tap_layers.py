# SPDX-License-Identifier: Apache-2.0
"""Which modules of a loaded model are wired decoder layers."""

from torch import nn

from vllm.model_executor.layers.residual_taps import UnboundTaps
from vllm.model_executor.models.utils import extract_layer_index


def unbound_taps(layer: nn.Module) -> UnboundTaps:
    """The class-level taps of a wired layer."""
    taps = type(layer).taps  # type: ignore[attr-defined]
    assert isinstance(taps, UnboundTaps)
    return taps


def find_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Wired decoder layers by global layer index.

    A class counts if the class that defines its `forward` was wired: a subclass that overrides
    `forward` inherits the attribute but not the calls.

    Raises:
        ValueError: a layer's class overrides `forward` of a wired one, or two layers share an
            index.
    """
    layers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
        if "taps" in vars(owner):
            index = extract_layer_index(name)
            if index in layers:
                raise ValueError(f"two decoder layers have index {index}, the second is {name}")
            layers[index] = module
        elif any("taps" in vars(cls) for cls in type(module).__mro__):
            raise ValueError(
                f"{name}: {type(module).__name__} overrides the forward of a wired decoder layer; "
                "wire it in patches/taps/table.py or start without steering and capture"
            )
    return layers
