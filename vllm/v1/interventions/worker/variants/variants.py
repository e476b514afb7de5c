# SPDX-License-Identifier: Apache-2.0
"""The variants of the target model: with taps, and plain as upstream compiles it.

A step in which nobody steers or captures runs the plain one, so that an engine pays for its taps
only while they are used. Both share weights, input and output buffers; each has its own compiled
code and CUDA graphs. The plain one is compiled under the configuration of an engine without
steering and capture: their artifacts in the compile cache are the same.

Each site has a switch: where it is off, the tap launches no capture. So there are graphs of whole
forwards with all captures, without any, for steps that steer alone, and with those of the few sets
of sites that steps want most (`SiteSets`); each is a variant of the same code. Graphs of pieces
have all captures, as they hang off the code. Under V2 graphs with taps have fewer sizes, `coarse`,
which is why a step's variant is chosen before its graph; but for the largest, each is recorded when
steps need it (`ModelVariants.need_graph`): one step warms up, the next records.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn

import vllm.envs as envs
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.attention_taps import HeadTap, HeadTaps
from vllm.model_executor.layers.residual_taps import BoundTaps, LoopedTaps
from vllm.v1.interventions.worker.variants.graphs import (
    can_record_late,
    graphs_of,
    no_graphs,
    planning,
)
from vllm.v1.interventions.worker.variants.recording import emptied_once
from vllm.v1.interventions.worker.variants.site_sets import SETS, SiteSets
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

_Taps = BoundTaps | LoopedTaps | HeadTaps | HeadTap
STAND_INS = 8
"""Number of steps of a size without a graph that run a graph of up to twice that size, if there is
one: most sizes that a batch passes through are not wanted for longer, and recording stalls all."""


class _Variant:
    """State that makes one variant, kept here while another is in use."""

    def __init__(self, taps: Mapping[nn.Module, _Taps | None], sites: frozenset[int]) -> None:
        self.taps = taps
        """The taps of each layer and its attention; None for those of its class, which do nothing.
        """
        self.sites = sites
        """Sites whose captures are in this variant's graphs of whole forwards."""
        self.graphs: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        """Attributes of each upstream owner of graphs, by name; weak, because owners replaced
        during start-up drop out."""
        self.stood_in: Counter[BatchExecutionDescriptor] = Counter()
        """Steps of each size that ran a larger graph."""


class ModelVariants:
    """Switches the model between its variants.

    Args:
        model: loaded, its taps not bound.
        taps: those of each layer, bound.
        switches: bool [sites] in the host's memory, whether each one's tap captures; None of an
            engine that captures nothing.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: nn.Module,
        taps: Mapping[nn.Module, _Taps],
        switches: torch.Tensor | None = None,
    ) -> None:
        self._compilation = config.compilation_config
        # Data-parallel ranks run graphs of one size, and each may run another variant.
        self._coarse = config.parallel_config.data_parallel_size == 1
        self._late = can_record_late(config)
        self.recorder: Callable[..., None] | None = None
        """Upstream's, of a V2 runner: records the graphs that its manager plans."""
        self._pieces: set[BatchExecutionDescriptor] = set()
        """Graphs of pieces with taps that are recorded, where graphs are recorded when needed."""
        self._warm: set[tuple[BatchExecutionDescriptor, frozenset[int]]] = set()
        """The graphs that can be recorded: their kernels ran, with captures of these sites."""
        self._switches = switches
        self._all = frozenset(range(0 if switches is None else len(switches)))
        self._on = self._all
        """The sites whose switches are on."""
        self._cache_dir = self._compilation.cache_dir
        self._graph_owner: Callable[[], Any] = lambda: None
        self._modules = _compiled_modules(model, taps)
        self._plain_config = copy.copy(config)
        self._plain_config.steering_config = SteeringConfig()
        self._plain_config.capture_config = config.capture_config.without_captures()
        self._plain = self._steering = self._tapped = self._current = _Variant(taps, self._all)
        self._counts = False
        """True if steps that want captures are counted: sets of sites may get graphs."""
        self.tapped = True
        """True if the variant in use has taps."""
        self._settled: tuple[bool, frozenset[int]] | None = None
        """The last arguments of `choose`, while they need no more than what is in use."""
        self._set_taps(self._tapped)
        if _can_switch(config):
            self._plain = _Variant(dict.fromkeys(taps), self._all)
            if config.steering_config.enable_steering and self._all:
                self._steering = _Variant(taps, frozenset())
        of_taps = {variant.sites: variant for variant in (self._tapped, self._steering)}
        self._of_taps, self._sets = of_taps, SiteSets(of_taps)

    @property
    def _variants(self) -> list[_Variant]:
        return [*dict.fromkeys((self._plain, self._tapped, self._steering))]

    def num_graphs(self, full: bool) -> int:
        """Number of graphs of one size: of whole forwards, or of pieces."""
        return sum(full or variant.sites == self._all for variant in self._variants)

    def num_full_graphs(self, manager: CudaGraphManager) -> int:
        """Number of graphs of whole forwards, of all sizes; `each` has been called."""
        variants = self._variants + [self._tapped] * (SETS if self._late else 0)
        found = [variant.graphs[manager]["_capture_descs"] for variant in variants]
        return sum(len(descs.get(CUDAGraphMode.FULL, ())) for descs in found)

    def each(self, items: Iterable[Any], graph_owner: Any = None) -> Iterator[Any]:
        """Yield all items once in each variant; afterwards the one with taps is in use.

        Args:
            graph_owner: upstream's object that keeps the CUDA graphs which are captured meanwhile;
                a `CUDAGraphWrapper`'s items are pairs, a mode and the sizes of its graphs.
        """
        items, variants = list(items), self._variants
        if graphs_of(graph_owner):
            self.choose(tapped=True)  # not one of those that go
            self._graph_owner = ref(graph_owner)
            keeps = self._late and self._tapped is not self._plain
            self._counts = keeps and isinstance(graph_owner, CudaGraphManager)
            self._pieces.clear()
            self._warm.clear()
            self._sets.clear()
            self._of_taps = {sites: self._of_taps[sites] for sites in self._sets.sets}
            for variant in variants:
                variant.graphs[graph_owner] = self._no_graphs(graph_owner, variant)
            vars(graph_owner).update(self._current.graphs[graph_owner])
        else:
            variants = [variant for variant in variants if variant.sites == self._all]
        # Loading compiled code makes so many objects that the garbage collector would go through
        # all others again and again. Upstream does the same where graphs are captured.
        gc.freeze()
        try:
            for variant in variants:
                self._use(variant)
                self._turn(variant.sites)
                # Else what this variant compiles would lie in the directory of the one before it.
                self._compilation.cache_dir = self._cache_dir
                if variant.sites != self._all and isinstance(graph_owner, CUDAGraphWrapper):
                    # Graphs of pieces hang off the compiled code, which is that of both.
                    items = [item for item in items if item[0] == CUDAGraphMode.FULL]
                if not self._records_late(graph_owner):
                    yield from items
                    continue
                # The largest needs the most memory, which smaller ones use, too.
                descs = {mode: sizes[:1] for mode, sizes in graph_owner._capture_descs.items()}
                self._pieces.update(descs.get(CUDAGraphMode.PIECEWISE, ()))
                with planning(graph_owner, descs):
                    yield from items
            self.choose(tapped=True)
        finally:
            gc.unfreeze()

    def choose(self, tapped: bool, wanted: frozenset[int] | None = None) -> None:
        """Use the variant that a step needs, for the forwards to come.

        Args:
            tapped: whether it steers or captures.
            wanted: the sites at which it captures; None for all.
        """
        wanted = self._all if wanted is None else wanted
        if self._settled == (tapped, wanted):
            return
        variant = self._of(wanted) if tapped else self._plain
        if variant is not self._current:
            self._use(variant)
        self._turn(wanted)
        if not (self._counts and variant.sites != wanted):
            self._settled = tapped, wanted

    def _of(self, wanted: frozenset[int]) -> _Variant:
        manager, sites = self._graph_owner(), self._sets.choose(wanted, self._counts)
        if sites not in self._of_taps:
            variant = _Variant(self._tapped.taps, sites)
            variant.graphs[manager] = self._no_graphs(manager, variant)
            made = {**self._of_taps, sites: variant}
            self._of_taps = {kept: made[kept] for kept in self._sets.sets}
        return self._of_taps[sites]

    def need_graph(
        self, desc: BatchExecutionDescriptor, map_dummy: Callable[[], None]
    ) -> BatchExecutionDescriptor:
        """Have the graph that upstream chose for a step, before its inputs are put in place.

        Args:
            map_dummy: maps tokens as those of a dummy forward.

        Returns: what the step runs: that graph, a larger one, or the same without one.
        """
        manager = self._graph_owner()
        if desc.cg_mode == CUDAGraphMode.NONE or not self._records_late(manager):
            return desc
        full = desc.cg_mode == CUDAGraphMode.FULL
        recorded = manager.graphs if full else self._pieces
        if desc in recorded:
            return desc
        larger = _larger(desc, recorded)
        if larger is not None and self._current.stood_in[desc] < STAND_INS:
            self._current.stood_in[desc] += 1
            return larger
        wanted = desc, self._current.sites if full else self._all
        if wanted in self._warm:
            map_dummy()
            self._record(*wanted)
            if not full:
                self._pieces.add(desc)
            return desc
        # To warm up and record takes too long for one step.
        self._warm.add(wanted)
        # As many requests as it has: attention pads them for a graph of a whole forward alone.
        without = replace(desc, cg_mode=CUDAGraphMode.NONE, num_reqs=None)
        if not full:
            self._turn(self._all)
            return without  # which runs the same kernels
        # Its attention may have kernels that no step without it runs.
        map_dummy()
        self._record(*wanted, warm_up=True)
        return larger or without

    def _record(
        self, desc: BatchExecutionDescriptor, sites: frozenset[int], warm_up: bool = False
    ) -> None:
        """Record the graph of a size, with captures of these sites; or only run its `warm_up`."""
        assert self.recorder is not None
        torch.accelerator.synchronize()  # what the step before reads is written to
        on = self._on
        self._turn(sites)
        planned = planning(self._graph_owner(), {desc.cg_mode: [desc]}, warm_up, not warm_up)
        with planned, emptied_once():
            self.recorder(progress_bar_desc="A CUDA graph with taps, needed now")
        torch.accelerator.synchronize()  # its warm-up was on another stream
        self._turn(on)

    def _records_late(self, graph_owner: Any) -> bool:
        return (
            self._late
            and self._current is not self._plain
            and isinstance(graph_owner, CudaGraphManager)
            # Else the memory of all is measured.
            and graph_owner._max_full_descs_to_capture is None
        )

    def _turn(self, on: frozenset[int]) -> None:
        if self._switches is not None and on != self._on:
            self._switches.fill_(False)
            self._switches[list(on)] = True
            self._on, self._settled = on, None

    def _no_graphs(self, graph_owner: Any, variant: _Variant) -> dict[str, Any]:
        """Return the attributes that a graph owner has before any graph of this variant is
        recorded."""
        thinned = self._coarse and variant is not self._plain
        return no_graphs(graph_owner, thinned, of_pieces=variant.sites == self._all)

    def _use(self, variant: _Variant) -> None:
        if variant.taps is not self._current.taps:  # else the code is that of both, too
            for module, stand_in in self._stand_ins.items():
                if variant is self._plain:
                    vars(module)["stand_in"] = stand_in
                else:
                    del vars(module)["stand_in"]
            self._set_taps(variant)
        graph_owner = self._graph_owner()
        if names := graphs_of(graph_owner):
            self._current.graphs[graph_owner] = {n: getattr(graph_owner, n) for n in names}
            vars(graph_owner).update(variant.graphs[graph_owner])
        self._current, self._settled = variant, None
        self.tapped = variant.taps is self._tapped.taps

    @cached_property
    def _stand_ins(self) -> dict[nn.Module, nn.Module]:
        """Compiled module -> its copy, on which upstream keeps what it compiles of the plain
        variant.

        Both share weights and submodules. The copy is made when the plain variant is first used:
        then upstream has set what it sets once the model is loaded, and nothing is compiled, as
        that variant is the first to run. A module calls its `stand_in` by a seam in `__call__` of
        upstream's `compilation/decorators.py`.
        """
        made: dict[nn.Module, nn.Module] = {}
        for module in self._modules:
            stand_in = made[module] = copy.copy(module)
            with set_current_vllm_config(self._plain_config):
                TorchCompileWithNoGuardsWrapper.__init__(stand_in, compile_prefix="plain")
            # An engine that goes cleans up the modules of its model, of which this is none.
            finalize(module, stand_in.cleanup)
        return made

    def _set_taps(self, variant: _Variant) -> None:
        for layer, taps in variant.taps.items():
            if taps is None:
                vars(layer).pop("taps", None)
            else:
                vars(layer)["taps"] = taps


def _larger(
    desc: BatchExecutionDescriptor, recorded: Iterable[BatchExecutionDescriptor]
) -> BatchExecutionDescriptor | None:
    """The smallest of these graphs that does for a size, if it is at most twice that."""
    found = [
        larger
        for larger in recorded
        if desc.num_tokens < larger.num_tokens <= 2 * desc.num_tokens
        # Larger only in what upstream pads.
        and replace(larger, num_tokens=desc.num_tokens, num_reqs=desc.num_reqs) == desc
    ]
    return min(found, key=lambda larger: larger.num_tokens, default=None)


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
    """Tell whether there is to be a plain variant beside the other."""
    # Results must not depend on what other requests do: rounding may differ between the variants.
    # Breakable graphs, and torch.compile with guards, are kept where they cannot be exchanged.
    return not (
        config.steering_config.single_variant
        or envs.VLLM_BATCH_INVARIANT
        or envs.VLLM_USE_BREAKABLE_CUDAGRAPH
        or config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE
    )
