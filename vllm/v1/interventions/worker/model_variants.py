# SPDX-License-Identifier: Apache-2.0
"""The two variants of the target model: with taps, and plain as upstream compiles it.

A step that steers and captures nothing runs the plain one, so that an engine pays for its taps
only while they are used. Both share weights, input and output buffers; each has its own compiled
code and its own CUDA graphs of the same sizes, so whatever picks a graph need not know which
variant is in use. The plain one is compiled under the configuration of an engine without
steering and capture: their artifacts in the compile cache are the same.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn

import vllm.envs as envs
from vllm.compilation import breakable_cudagraph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.model_executor.layers.attention_taps import HeadTaps
from vllm.model_executor.layers.residual_taps import BoundTaps, LoopedTaps
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

_Item = TypeVar("_Item")

_COMPILED = (
    "vllm_config",
    "compiled",
    "first_compile",
    "aot_compiled_fn",
    "was_aot_compile_fn_loaded_from_disk",
    "_aot_compilation_path",
    "_aot_cache_dir",
    "_compiled_callable",
    "_compiled_bytecode",
    "_bytecode_hook_handle",
)
"""What upstream keeps of a module's compilation on the module."""


_Taps = BoundTaps | LoopedTaps | HeadTaps


class _Variant:
    """What makes one variant, kept here while the other is in use."""

    def __init__(self, taps: Mapping[nn.Module, _Taps | None]) -> None:
        self.taps = taps
        """The taps of each layer and its attention; None for those of its class, which do nothing.
        """
        self.compiled: dict[nn.Module, dict[str, Any]] = {}
        """Module -> its attributes named in `_COMPILED`."""
        self.graphs: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        """Graph dict per upstream owner; weak, because owners replaced during start-up drop out."""


class ModelVariants:
    """Switches the model between its variants.

    Args:
        model: loaded, its taps not bound.
        taps: those of each layer, bound.
    """

    def __init__(
        self, config: VllmConfig, model: nn.Module, taps: Mapping[nn.Module, _Taps]
    ) -> None:
        self._compilation = config.compilation_config
        self._cache_dir = self._compilation.cache_dir
        self._graph_owner: Callable[[], Any] = lambda: None
        self._modules = _compiled_modules(model, taps)
        self._tapped = self._current = _Variant(taps)
        self._variants = [self._tapped]
        self._set_taps(self._tapped)
        if _can_switch(config):
            self._plain = _Variant(dict.fromkeys(taps))
            self._variants = [self._plain, self._tapped]
            plain_config = copy.copy(config)
            plain_config.steering_config = SteeringConfig()
            plain_config.capture_config = CaptureConfig()
            self._use(self._plain)
            for module in self._modules:
                with set_current_vllm_config(plain_config):
                    TorchCompileWithNoGuardsWrapper.__init__(module, compile_prefix="plain")
                vars(module)["was_aot_compile_fn_loaded_from_disk"] = False
            self._use(self._tapped)

    @property
    def count(self) -> int:
        """Number of variants: 1 where no plain one can be kept beside the other."""
        return len(self._variants)

    def each(self, items: Iterable[_Item], graph_owner: Any = None) -> Iterator[_Item]:
        """Yield all items once in each variant; afterwards the one with taps is in use.

        Args:
            graph_owner: upstream's object that keeps the CUDA graphs which are captured meanwhile.
        """
        items = list(items)
        if graph_owner is not None:
            self._graph_owner = ref(graph_owner)
        # Loading compiled code makes so many objects that the garbage collector would go through
        # all others again and again. Upstream does the same where graphs are captured.
        gc.freeze()
        try:
            for variant in self._variants:
                self._use(variant)
                # Else what this variant compiles would lie in the directory of the one before it.
                self._compilation.cache_dir = self._cache_dir
                yield from items
        finally:
            gc.unfreeze()

    def choose(self, tapped: bool) -> bool:
        """Use the variant with taps where they are needed, else the plain one if there is one.
        Returns whether the one with taps is in use."""
        variant = self._tapped if tapped or self.count == 1 else self._plain
        if variant is not self._current:
            self._use(variant)
        return variant is self._tapped

    def _use(self, variant: _Variant) -> None:
        for module in self._modules:
            state = vars(module)
            self._current.compiled[module] = {n: state.pop(n) for n in _COMPILED if n in state}
            state.update(variant.compiled.get(module, {}))
        graph_owner = self._graph_owner()
        if (name := _graphs_of(graph_owner)) is not None:
            self._current.graphs[graph_owner] = getattr(graph_owner, name)
            setattr(graph_owner, name, variant.graphs.setdefault(graph_owner, {}))
        self._set_taps(variant)
        self._current = variant

    def _set_taps(self, variant: _Variant) -> None:
        for layer, taps in variant.taps.items():
            if taps is None:
                vars(layer).pop("taps", None)
            else:
                vars(layer)["taps"] = taps


def _compiled_modules(model: nn.Module, layers: Iterable[nn.Module]) -> list[Any]:
    """The modules whose compiled code has calls of these layers' taps in it."""
    tapped = set(layers)
    return [
        module
        for module in model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper)
        and not module.do_not_compile
        and not tapped.isdisjoint(module.modules())
    ]


def _can_switch(config: VllmConfig) -> bool:
    """Whether there is to be a plain variant beside the other."""
    # Results must not depend on what other requests do: rounding may differ between the variants.
    # Breakable graphs, and torch.compile with guards, are kept where they cannot be exchanged.
    return not (
        config.steering_config.single_variant
        or envs.VLLM_BATCH_INVARIANT
        or envs.VLLM_USE_BREAKABLE_CUDAGRAPH
        or config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE
    )


def refuse_late_breaks(config: VllmConfig) -> None:
    """Refuse breakable CUDA graphs in which attention is recorded like any other kernel.

    They are to end before it. Upstream's attention decides that when it is imported, and a config
    turns them on for some architectures: too late in a process that had imported it by then, or was
    forked from one. Graphs are recorded without requests, so that prompts would get no attention.

    Raises:
        ValueError: they were turned on too late.
    """
    breaks = unified_attention_with_output.__globals__ is vars(breakable_cudagraph)
    records = config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH and records and not breaks:
        raise ValueError(
            "this model's breakable CUDA graphs were turned on after attention had been imported, "
            "and would not end before it; set VLLM_USE_BREAKABLE_CUDAGRAPH=1 in the environment "
            "in which Python starts, or 0 to do without them"
        )


def _graphs_of(graph_owner: Any) -> str | None:
    """The attribute in which a graph owner keeps the graphs of whole forwards; None if it keeps
    none. Those of pieces hang off the compiled code."""
    if isinstance(graph_owner, CUDAGraphWrapper):
        return "concrete_cudagraph_entries"
    return "graphs" if isinstance(graph_owner, CudaGraphManager) else None
