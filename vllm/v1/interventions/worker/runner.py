# SPDX-License-Identifier: Apache-2.0
"""The one object both model runners call. It makes no decisions, only copies.

Per step: `apply_updates` (also when no token is scheduled, else an update would be lost),
`map_rows` before the forward or `map_dummy` before a dummy one, `collect` after it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from vllm.config import CompilationMode, VllmConfig
from vllm.config.points import BLOCK_POINTS, CAPTURE_POINTS, HEAD_POINTS, NEURONS, RETURNED
from vllm.config.steering import FeatureFile
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_taps import HeadSteering, HeadTap, HeadTaps, InnerTap
from vllm.model_executor.layers.native_rows import NATIVE_ROWS, NativeTap
from vllm.model_executor.layers.residual_taps import (
    BoundTaps,
    LanesTap,
    LoopedTaps,
    PassTap,
    SiteTap,
)
from vllm.v1.features.autoencoder import Autoencoder, opened
from vllm.v1.interventions.calls import FeaturePhase
from vllm.v1.interventions.capture_groups import num_senders
from vllm.v1.interventions.messages import TableName, num_table_rows
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.step_rows import StepRows
from vllm.v1.interventions.worker.attention.layers import attention_of, reads_masked
from vllm.v1.interventions.worker.focus.layers import FocusLayers
from vllm.v1.interventions.worker.inner import InnerRows, inner_rows
from vllm.v1.interventions.worker.layers import (
    bound_taps,
    find_layers,
    has_whole_prompts,
    head_reads_rows,
    need_stopped,
    num_lanes,
    own_layers,
    refuse_layers,
    unbound_taps,
)
from vllm.v1.interventions.worker.making.features import on_device
from vllm.v1.interventions.worker.making.held import FeatureLoads, Holder
from vllm.v1.interventions.worker.making.lens import LensReader
from vllm.v1.interventions.worker.making.placed import PlaceTable
from vllm.v1.interventions.worker.rows.arena import CaptureArena
from vllm.v1.interventions.worker.tables.sums import SteeringTable
from vllm.v1.interventions.worker.tables.terms import ProgramTable, TermTable
from vllm.v1.interventions.worker.token_map import TokenMap
from vllm.v1.interventions.worker.variants.graphs import refuse_late_breaks
from vllm.v1.interventions.worker.variants.variants import ModelVariants
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

_PROBE_ROW = 1
"""A row of the steering table that no request uses."""


class Table(Protocol):
    """A table on the device, whose rows the scheduler gives to requests."""

    def write(self, placed: list[tuple[int, Any]]) -> None:
        """Write the contents of a table in `StepInterventions.placed`."""

    def forget(self) -> None:
        """Empty the table: the device's memory was lost."""


class WorkerInterventions:
    """Device state of steering and capture of one worker, and the map of this step's tokens."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._steering = config.steering_config.enable_steering
        self.capture = CaptureArena(config, device) if config.capture_config.enabled else None
        self.sites: list[Site] = []
        self.table: SteeringTable | None = None
        self._programs: ProgramTable | None = None
        self._tables: dict[TableName, Table] = {}
        self._places: PlaceTable | None = None
        self.focus: FocusLayers | None = None
        """The layers that are focused, if any may be."""
        self.shape: TapShape | None = None
        self.layers: dict[int, nn.Module] = {}
        """The wired decoder layers here."""
        self.attention: dict[int, Attention | MLAAttention] = {}
        """The attention of each layer that has one."""
        self._variants: ModelVariants | None = None
        self._probe: Callable[[], None] | None = None

    # -- start-up ---------------------------------------------------------------------------

    def bind(self, model: nn.Module) -> None:
        """Give every wired decoder layer of the target model its taps.

        Raises:
            ValueError: the model has decoder layers that are not wired, or none that are, or CUDA
                graphs that would not end before attention.
        """
        if not self._steering and self.capture is None:
            return
        refuse_late_breaks(self._config)
        layers = find_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no decoder layer wired for steering or capture "
                "(patches/taps/table.py lists those that are); start without "
                "enable_steering and capture_consumers"
            )
        model_config = self._config.model_config
        depth = model_config.get_total_num_hidden_layers()
        hidden_size = model_config.get_hidden_size()
        self.layers = layers = own_layers(layers, depth)
        stop = self._config.capture_config.capture_stop_after
        if stop is not None:
            need_stopped(model, layers, stop)
        last = max([depth - 1, *layers])
        # Attention that runs several times is several, and each token of a prompt that is seen both
        # ways has weights which a later one changes: neither has rows of heads.
        attention = attention_of({n: m for n, m in layers.items() if not unbound_taps(m).loops})
        inner = self._inner({n: m for n, m in layers.items() if not unbound_taps(m).loops})
        shapes = {}
        for index, layer in layers.items():
            unbound = unbound_taps(layer)
            shapes[index] = LayerShape(
                points=unbound.points,
                inputs=unbound.inputs,
                heads=attention[index].points if index in attention else {},
                branches=unbound.branches,
                widths={point: found.width for point, found in inner.get(index, {}).items()},
                final=index == last and head_reads_rows(model, hidden_size),
            )
        self.shape = TapShape(
            hidden_size=hidden_size,
            dtype=str(model_config.dtype).removeprefix("torch."),
            layers=shapes,
            token_ids=model_config.get_vocab_size(),
            lanes=num_lanes(layers, self._config),
            stop=stop,
            depth=depth,
            whole_prompts=has_whole_prompts(layers),
            reads_masked=reads_masked(model),
            senders=num_senders(self._config),
            fuses_focus=self._device.type == "cuda",
        )
        refuse_layers(layers, self.shape.torch_dtype)
        self._allocate(self.shape)
        taps: dict[nn.Module, BoundTaps | LoopedTaps | HeadTaps | HeadTap] = {
            **bound_taps(layers, lambda n: BoundTaps(**{p: self._tap(p, n) for p in BLOCK_POINTS}))
        }
        config = self._config
        if not (config.capture_config.captures_heads or config.steering_config.steers_heads):
            attention = {}
        self.attention = {index: found.module for index, found in attention.items()}
        if config.steering_config.focuses:
            self.focus = FocusLayers(self._config, self.attention, self._device)
            self._tables["focus"] = self.focus.table
        gathers = config.parallel_config.tensor_parallel_size > 1
        for index, found in attention.items():
            replicas = {"k": found.replicas, "v": found.replicas}
            q, k, v, z = (
                self._head_tap((point, index), gathers, replicas.get(point, 1))
                for point in HEAD_POINTS
            )
            name = None if self.focus is None else self.focus.names.get(index)
            bound = HeadTaps(q, k, v, z, self._head_steering(index), name)
            taps[found.module] = bound
            if self.focus is not None and name is not None:
                self.focus.taps[index] = bound
        for index, of_points in inner.items():
            for point, rows in of_points.items():
                tap = self._head_tap((point, index), rows.gathers, kind=InnerTap)
                if tap is not None:
                    taps[rows.module] = tap
        switches = None if self.capture is None else self.capture.switches
        self._variants = ModelVariants(self._config, model, taps, switches)

    def _inner(self, layers: dict[int, nn.Module]) -> dict[int, dict[str, InnerRows]]:
        config = self._config.capture_config
        dtype = self._config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        reads = config.enabled and NEURONS in config.capture_points
        return inner_rows(layers, dtype if reads else None)

    def _allocate(self, shape: TapShape) -> None:
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        device = self._device
        self.sites = [
            (p, n) for n in sorted(shape.layers) for p in shape.offers(n) if p in CAPTURE_POINTS
        ]
        drafts, connector = self._config.speculative_config, self._config.kv_transfer_config
        grows, ahead = drafts is None and connector is None, 0
        if drafts is not None:
            ahead = drafts.num_speculative_tokens
        self.tokens = TokenMap(max_tokens, device, grows, ahead)
        if self._steering:
            config = self._config.steering_config
            steered = [site for site in self.sites if site[0] in config.steering_points]
            num_rows = num_table_rows(config.max_steering_configs)
            ranks = self._config.parallel_config.tensor_parallel_size
            rank = self._config.parallel_config.rank % ranks
            scales = "scale" in config.steering_families
            self.table = SteeringTable(steered, num_rows, shape, device, scales, rank, ranks)
            self._tables["sums"] = self.table
            if config.has_ops:
                of_stream = [site for site in steered if site[0] not in HEAD_POINTS]
                terms = TermTable(config, shape, device)
                dense = self._autoencoders(of_stream) if config.reconstructs else {}
                self._programs = ProgramTable(of_stream, config, shape, terms, self.tokens, dense)
                self._tables |= {"terms": terms, "programs": self._programs}
        if self.capture is not None:
            points = self._config.capture_config.capture_points
            captured = [site for site in self.sites if site[0] in points]
            self.capture.allocate(shape, captured, self.tokens)
            if self.capture.projections is not None:
                self._tables["matrices"] = self.capture.projections
            if self.table is not None:
                self.capture.compare_with(self.table.at)
        reads = None if self.capture is None else self.capture.features
        holders: list[Holder | None] = [reads, self._places]
        self._loads = FeatureLoads([each for each in holders if each is not None])

    def _autoencoders(self, sites: list[Site]) -> dict[Site, tuple[Autoencoder, ...]]:
        """Return those of each site, in the option's order, and then the site's places."""
        assert self.shape is not None
        config = self._config.steering_config
        files = config.feature_files
        one = sites if self.shape.lanes == 1 else []
        own = {n: file for n, file in files.items() if (file.point, file.layer) in one}
        found: dict[Site, tuple[Autoencoder, ...]] = {}
        for name, file in own.items():
            site, made = (file.point, file.layer), opened(file)
            held = on_device(name, made, self._device, self.shape.torch_dtype)
            found[site] = (*found.get(site, ()), held)
        self._places = PlaceTable(config.feature_places, one, self.shape, self._device)
        for site, places in self._places.at.items():
            found[site] = (*found.get(site, ()), *places)
        return found

    def bind_caches(self, runner: Any) -> None:
        """Tell layers that are focused where the pages of their KV cache are.

        Args:
            runner: the model runner, which has just allocated them.
        """
        if self.focus is not None:
            self.focus.bind(runner, self.tokens)

    def _tap(self, point: str, layer: int) -> PassTap | SiteTap:
        site = (point, layer)
        arena = dest = switch = None
        if self.capture is not None and site in self.capture.sites:
            arena, switch = self.capture.arena, self.capture.switch_of(site)
            dest = self.capture.dest_of(site)
        table = None if self.table is None else self.table.at.get(site)
        terms = None if self._programs is None else self._programs.at.get(site)
        if dest is None and table is None:
            return PassTap()
        traced = self._config.compilation_config.mode != CompilationMode.NONE
        assert self.shape is not None
        kind = NativeTap if NATIVE_ROWS and not traced else SiteTap
        kind = LanesTap if self.shape.lanes > 1 else kind
        return kind(table, terms, self.tokens.slots, arena, dest, switch)

    def _head_tap(
        self, site: Site, gathers: bool, replicas: int = 1, kind: type[HeadTap] = HeadTap
    ) -> HeadTap | None:
        if self.capture is None or site not in self.capture.sites:
            return None
        dest, width = self.capture.dest_of(site), self.capture.shape.row_width(site)
        arena, switch = self.capture.arena, self.capture.switch_of(site)
        return kind(arena, dest, switch, width, gathers, replicas)

    def _head_steering(self, layer: int) -> HeadSteering | None:
        site = (RETURNED, layer)
        if self.table is None or site not in self.table.at:
            return None
        factors = self.table.factors.get(site)
        return HeadSteering(self.table.at[site], factors, self.tokens.slots)

    def num_graphs(self, full: bool) -> int:
        """Number of graphs that are recorded of one size: of whole forwards, or of pieces."""
        return self._variants.num_graphs(full) if self._variants is not None else 1

    def num_full_graphs(self, manager: Any, planned: int) -> int:
        """Number of graphs of whole forwards, recorded of all sizes; `planned` without taps."""
        return planned if self._variants is None else self._variants.num_full_graphs(manager)

    def each_variant(
        self, items: Iterable[Any] = (None,), graph_owner: Any = None
    ) -> Iterator[Any]:
        """Yield what is to be compiled or captured, in each model variant, while the engine starts.
        When the first call of it ends, all is compiled and graphs may be captured.

        Args:
            graph_owner: upstream's object that keeps the CUDA graphs which are captured meanwhile.
        """
        pinning = None if self.capture is None else self.capture.pinning
        if pinning is not None and graph_owner is not None:
            pinning.pause()
        yield from self._variants.each(items, graph_owner) if self._variants is not None else items
        if pinning is not None:
            pinning.pause()

    def recording(self, manager: "CudaGraphManager") -> Callable[..., None]:
        """Upstream's `manager.capture` for each model variant, kept for what is recorded later."""

        def capture(*args: Any, **kwargs: Any) -> None:
            recorder = partial(manager.capture, *args, **kwargs)
            for _ in self.each_variant(graph_owner=manager):
                recorder()
            if self._variants is not None:
                self._variants.recorder = recorder

        return capture

    def started(self) -> None:
        """Get ready for requests. All graphs are captured: what had to rest meanwhile goes on."""
        if self.sites:
            self.tokens.load_kernels()
        if self.capture is not None and self.capture.pinning is not None:
            self.capture.pinning.resume()

    def captures(self, site: Site) -> bool:
        """Tell whether this worker can capture at a site."""
        return self.capture is not None and self.capture.captures(site)

    @contextmanager
    def probing(self, site: Site, vector: torch.Tensor | None) -> Iterator[None]:
        """Within, dummy forwards steer their first token at `site` and capture it into row 0.

        Args:
            vector: as wide as the site's rows here, or None to steer nothing.
        """
        row = None
        if vector is not None:
            assert self.table is not None
            row = self.table.at[site][_PROBE_ROW]
            row.copy_(vector)
        rows = {site: 0} if self.captures(site) else {}
        with self.capturing(rows, len(rows), steered=vector is not None):
            yield
        if row is not None:
            row.zero_()

    @contextmanager
    def capturing(
        self,
        rows: Mapping[Site, int],
        size: int,
        steered: bool = False,
        focused: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        """Within, dummy forwards capture their first token, and steer it by the row for probes.

        Args:
            rows: the arena row in which each site's begins.
            size: how many rows that takes; they hold NaN before.
            focused: the focus program of the token, and its position.
        """
        assert self._variants is not None
        self._variants.choose(tapped=True)
        if size:
            assert self.capture is not None
            self.capture.arena[:size].fill_(float("nan"))
        self._probe = lambda: self._map_probe(rows, steered, focused)
        try:
            yield
        finally:
            self._probe = None
            self.map_dummy()

    def _map_probe(
        self, rows: Mapping[Site, int], steered: bool, focused: tuple[int, int] | None
    ) -> None:
        if steered:
            self.tokens.probe(_PROBE_ROW)
        if focused is not None:
            self.tokens.probe_focus(*focused)
        if self.capture is not None:
            self.capture.probe(rows)

    def hold(self, phase: FeaturePhase, name: str, file: FeatureFile) -> str | None:
        """Answer by `FeatureLoads.answer`."""
        return self._loads.answer(phase, name, file)

    def read_lenses(self, reader: LensReader, shape: TapShape) -> None:
        """Read lenses by this from now on; `shape` has them."""
        assert self.capture is not None
        self.shape = shape
        self.capture.read_lenses(reader)

    # -- per step ---------------------------------------------------------------------------

    def apply_updates(self, scheduler_output: "SchedulerOutput") -> None:
        """Take over what the scheduler decided. Everything was validated: this cannot fail."""
        if not self.sites:
            return
        step = scheduler_output.interventions
        self.tokens.update(scheduler_output.finished_req_ids, step.admitted if step else {})
        if self.capture is not None:
            self.capture.update(scheduler_output)
        self._choose_variant(scheduler_output.num_scheduled_tokens.keys())
        if step is None:
            return
        if self.table is not None and (step.new_sets or step.tiers or step.dropped_sets):
            self.table.take(step)
        for name, placed in step.placed.items():
            if name in self._tables:
                self._tables[name].write(placed)

    def _choose_variant(self, req_ids: Collection[str]) -> None:
        """Use what a step of these needs, before upstream picks a graph: sizes may differ."""
        if self._variants is not None and req_ids:
            wanted = None if self.capture is None else self.capture.wanted_sites(req_ids)
            tapped = wanted is not None or self.tokens.steers(req_ids)
            self._variants.choose(tapped, wanted or frozenset())

    def need_graph(self, desc: "BatchExecutionDescriptor") -> "BatchExecutionDescriptor":
        """Return the graph for a step, by `ModelVariants.need_graph`; `desc` without variants."""
        return desc if self._variants is None else self._variants.need_graph(desc, self.map_dummy)

    def forget(self) -> None:
        """Clear all tables: after sleep memory holds anything, and all is sent again."""
        if not self.sites:
            return
        self.tokens.forget()
        if self.capture is not None:
            self.capture.forget()
        for table in self._tables.values():
            table.forget()

    def map_dummy(self) -> None:
        """Prepare a dummy forward: no token is steered or captured, but by the start-up check."""
        if self.sites:
            self.tokens.clear(0)
            self.tokens.focuses = True  # graphs are recorded with all that a step may need
            if self.capture is not None:
                self.capture.clear()
            if self._probe is not None:
                self._probe()

    def map_rows(self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor) -> None:
        """Prepare a forward: which slot and which arena rows this step's tokens get.

        Args:
            req_ids: in batch order.
            num_tokens: int [len(req_ids)], scheduled tokens of each.
            positions: int [>= total tokens] on the device, the *true* position of each token; the
                host's are only optimistic under speculation.
        """
        if self._variants is None or not self._variants.tapped:
            return  # what was mapped for an earlier step stays, unread, until the next is mapped
        self.tokens.map(req_ids, num_tokens[: len(req_ids)], positions)
        if self.capture is not None:
            self.capture.map(req_ids, num_tokens, positions)

    def capture_final(self, hidden_states: torch.Tensor) -> None:
        """Capture what goes to the head, if wanted, before anything else may use its memory.

        Args:
            hidden_states: what the model returned, [>= tokens, hidden]; on the last stage.
        """
        if self.capture is not None:
            self.capture.capture_final(hidden_states, probed=self._probe is not None)

    def collect(self) -> StepRows | None:
        """Send this step's rows to the host; None if it captured none, or another rank sends."""
        return None if self.capture is None else self.capture.collect()

    def rows_alone(self) -> ModelRunnerOutput | None:
        """An output with this step's rows alone, if any, for a worker not of the last stage."""
        if (captured := self.collect()) is None:
            return None
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, captured=captured)
