# SPDX-License-Identifier: Apache-2.0
"""Wired decoder layers among the modules of a loaded model.

The decoder layers of models that vLLM runs through its Transformers backend are Hugging Face's, so
no class can be wired beforehand. Each layer of the loaded model becomes an instance of a subclass
whose `forward` calls the taps: the stream is what a layer takes and what it returns. There is no
`post_attn`, for inside the layer a module sees the stream or the skip, not both.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import PrefillPrefixLMAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.residual_taps import (
    BoundTaps,
    LoopedTaps,
    PassTap,
    SiteTap,
    UnboundTaps,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces_base import is_text_generation_model
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index

if TYPE_CHECKING:
    from vllm.model_executor.models.transformers.base import Base


def unbound_taps(layer: nn.Module) -> UnboundTaps:
    """The class-level taps of a wired layer."""
    taps = type(layer).taps  # type: ignore[attr-defined]
    assert isinstance(taps, UnboundTaps)
    return taps


def find_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Wired decoder layers by global layer index; one that runs several times for a token is at
    that of each of its executions.

    A class counts if the class that defines its `forward` was wired: a subclass that overrides
    `forward` inherits the attribute but not the calls. A wired block inside another is a part of
    it (Zamba2's hybrid layers hold a Mamba layer): the outer one has the points.

    Raises:
        ValueError: a layer's class overrides `forward` of a wired one, or two layers share an
            index.
    """
    tap_backend_layers(model)
    layers: dict[int, nn.Module] = {}
    outer = "."
    for name, module in model.named_modules():  # outer modules first
        if name.startswith(outer):
            continue
        owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
        if _is_wired(owner):
            for index in executions(module) or (extract_layer_index(name),):
                if index in layers:
                    raise ValueError(f"two decoder layers have index {index}, the second is {name}")
                layers[index] = module
            outer = f"{name}."
        elif any(map(_is_wired, type(module).__mro__)):
            raise ValueError(
                f"{name}: {type(module).__name__} overrides the forward of a wired decoder layer; "
                "wire it in patches/taps/table.py or start without steering and capture"
            )
    return layers


def executions(layer: nn.Module) -> dict[int, int]:
    """The global layer index of each execution of a layer that runs several times for a token, and
    the number that upstream gives it for that one; empty for all other layers.

    Upstream counts executions so for their KV caches: the i-th of L layers' l-th is i * L + l.
    """
    if not (holder := unbound_taps(layer).loops):
        return {}
    attentions = layer.get_submodule(holder).named_children()
    return {extract_layer_index(a.layer_name): int(name) for name, a in attentions}  # type: ignore[arg-type]


def bound_taps(
    layers: Mapping[int, nn.Module], bind: Callable[[int], BoundTaps]
) -> dict[nn.Module, BoundTaps | LoopedTaps]:
    """The taps of each layer, those of a layer index as `bind` makes them."""
    taps: dict[nn.Module, BoundTaps | LoopedTaps] = {}
    for index, layer in layers.items():
        if layer not in taps:
            times = {number: bind(at) for at, number in executions(layer).items()}
            taps[layer] = LoopedTaps(times) if times else bind(index)
    return taps


def has_whole_prompts(layers: Mapping[int, nn.Module]) -> bool:
    """Tell whether a prompt's tokens see each other both ways, so that one step has all of them."""
    parts = (part for layer in layers.values() for part in layer.modules())
    return any(isinstance(part, PrefillPrefixLMAttention) for part in parts)


def head_reads_rows(model: nn.Module, width: int) -> bool:
    """Tell whether the head reads what the model's forward returns, as it is: some models norm it
    there.

    Nothing is computed: the head is stopped when it is called.

    Args:
        width: of the stream.
    """
    if not is_text_generation_model(model):
        return False
    weight = next(model.parameters())
    rows = torch.zeros(1, width, dtype=weight.dtype, device=weight.device)

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        head, given = args[:2]
        raise _HeadReadError(
            given is rows
            and isinstance(head, VocabParallelEmbedding)
            and head.embedding_dim == width
        )

    # With LoRA another class has its place, and its name.
    heads = [m for m in model.modules() if "LogitsProcessor" in type(m).__name__]
    hooks = [head.register_forward_pre_hook(stop) for head in heads]
    try:
        model.compute_logits(rows)
    except _HeadReadError as read:
        return bool(read.args[0])
    finally:
        for hook in hooks:
            hook.remove()
    return False


class _HeadReadError(Exception):
    """The head was called; says whether it got the rows that were given."""


def _is_wired(cls: type) -> bool:
    return isinstance(vars(cls).get("taps"), UnboundTaps)


def own_layers(layers: Mapping[int, nn.Module], depth: int) -> dict[int, nn.Module]:
    """The layers of the target itself: those past its `depth` are a draft's, in the same tree.

    Multi-token prediction modules are built from the target's layer class and numbered on. A model
    that runs its layers several times may count each of them once.
    """
    return {n: layer for n, layer in layers.items() if n < depth or unbound_taps(layer).loops}


def need_stopped(model: nn.Module, layers: Mapping[int, nn.Module], stop: int) -> None:
    """Check that a model which is to end after a layer does, and that nothing else is missing.

    Raises:
        ValueError: it has made other layers, or runs layers several times.
    """
    own = set(layers.values())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    cut = [each for each in lists if any(isinstance(m, PPMissingLayer) for m in each)]
    others = [m for each in cut for m in each if not isinstance(m, PPMissingLayer) and m not in own]
    if max(layers) != stop or others or len(own) < len(layers):
        raise ValueError(
            f"capture_stop_after: {type(model).__name__} cannot end after layer {stop}: its layers "
            "are not one list that pipeline stages split; leave it out, or give vllm capture run "
            "--whole-model"
        )


def num_lanes(layers: Mapping[int, nn.Module], config: VllmConfig) -> int:
    """Number of lanes of the stream.

    Raises:
        ValueError: it has several, and an option is on that is for one.
    """
    layer = next(iter(layers.values()))
    if not (attribute := unbound_taps(layer).lanes):
        return 1
    capture = config.capture_config
    refused = {
        "capture_lens": bool(capture.capture_lens),
        "rules": capture.rules is not None,
        "compat": bool(config.steering_config.compat),
    }
    if given := [option for option, on in refused.items() if on]:
        raise ValueError(
            f"{given[0]}: is not offered where the stream has lanes, as in "
            f"{type(layer).__name__}; leave it out"
        )
    return int(attrgetter(attribute)(layer))


def refuse_layers(layers: Mapping[int, nn.Module], dtype: torch.dtype) -> None:
    """Check that these layers may have taps, configured as they are.

    Args:
        dtype: the model's.

    Raises:
        ValueError: a layer's class is refused, or something its wiring assumes away is on.
    """
    for layer in layers.values():
        taps = unbound_taps(layer)
        reasons = [taps.refused] if taps.refused else []
        for what in taps.unless:
            wanted, name = what.startswith("not "), what.removeprefix("not ")
            on = dtype == torch.float16 if what == "float16" else bool(getattr(layer, name))
            if on != wanted:
                reasons.append(f"its rows are not the whole stream in its own units with {what}")
        if reasons:
            raise ValueError(
                f"{type(layer).__name__} cannot be steered or captured: {reasons[0]}; "
                "start without enable_steering and capture_consumers"
            )


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
