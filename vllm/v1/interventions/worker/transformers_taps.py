# SPDX-License-Identifier: Apache-2.0
"""Taps of models that vLLM runs through its Transformers backend.

Their decoder layers are Hugging Face's, so no class can be wired beforehand. Each layer of the
loaded model becomes an instance of a subclass whose `forward` calls the taps: the stream is what a
layer takes and what it returns. There is no `post_attn`, for inside the layer a module sees the
stream or the skip, not both.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.residual_taps import PassTap, SiteTap, UnboundTaps
from vllm.model_executor.models.utils import PPMissingLayer

if TYPE_CHECKING:
    from vllm.model_executor.models.transformers.base import Base

_BACKEND = "vllm.model_executor.models.transformers."
_STREAM = "hidden_states"


def tap_backend_layers(model: nn.Module) -> None:
    """Give the decoder layers of every Transformers backend in `model` taps that do nothing yet.

    Raises:
        ValueError: which modules are the decoder layers cannot be told.
    """
    done: dict[type[nn.Module], type[nn.Module]] = {}
    for backend in _backends(model):
        for layer in _decoder_layers(backend):
            cls = type(layer)
            if cls is not PPMissingLayer:
                done.setdefault(cls, tapped(cls))
                layer.__class__ = done[cls]


def _backends(model: nn.Module) -> "Iterator[Base]":
    # By name: to import the backend for a model that does not use it takes seconds.
    for module in model.modules():
        if any(cls.__module__.startswith(_BACKEND) for cls in type(module).__mro__):
            from vllm.model_executor.models.transformers.base import Base

            if isinstance(module, Base):
                yield module


def _decoder_layers(backend: "Base") -> nn.ModuleList:
    """The only list of modules that is as long as the model is deep and has its attention."""
    decoder, depth = backend.model.get_decoder(), backend.text_config.num_hidden_layers
    found = [
        m
        for m in decoder.modules()
        if isinstance(m, nn.ModuleList) and len(m) == depth and _attends(m)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(decoder).__name__} cannot be steered or captured: it has {len(found)} lists "
            f"of {depth} layers with attention, not one; "
            "start without enable_steering and capture_consumers"
        )
    return found[0]


def _attends(layers: nn.ModuleList) -> bool:
    return any(isinstance(m, AttentionLayerBase) for m in layers.modules())


def tapped(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a Hugging Face layer that calls the taps."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_through(self.taps.pre_attn, args[0]), *args[1:])
        else:
            kwargs[_STREAM] = _through(self.taps.pre_attn, kwargs[_STREAM])
        out = cls.forward(self, *args, **kwargs)
        if isinstance(out, tuple):
            return (_through(self.taps.post_block, out[0]), *out[1:])
        return _through(self.taps.post_block, out)

    return type(
        f"Tapped{cls.__name__}",
        (cls,),
        {"taps": UnboundTaps("pre_attn", "post_block"), "forward": forward},
    )


def _through(tap: PassTap | SiteTap, stream: torch.Tensor) -> torch.Tensor:
    """The tap's result for a stream of [1, tokens, hidden]."""
    if stream.dim() != 3 or stream.shape[0] != 1:
        raise ValueError(
            "this model on the Transformers backend cannot be steered or captured: its decoder "
            f"layers carry {tuple(stream.shape)}, not one stream of [1, tokens, hidden]; "
            "start without enable_steering and capture_consumers"
        )
    return tap(stream[0]).unsqueeze(0)
