# SPDX-License-Identifier: Apache-2.0
"""The one object both model runners call. It makes no decisions, only copies.

Per step: `apply_updates` (also when no token is scheduled, else an update would be lost),
`map_rows` before the forward or `map_dummy` before a dummy one, `collect` after it.
"""

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vllm.config import CompilationMode, VllmConfig
from vllm.config.capture import CAPTURE_POINTS, HEAD_POINTS
from vllm.config.steering import HEADS, POINTS
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.attention_taps import HeadSteering, HeadTap, HeadTaps
from vllm.model_executor.layers.native_rows import NATIVE_ROWS, NativeTap
from vllm.model_executor.layers.residual_taps import BoundTaps, LoopedTaps, PassTap, SiteTap
from vllm.model_executor.layers.row_capture import capture_rows
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.capture_groups import CaptureGroup, CaptureGroups
from vllm.v1.interventions.messages import num_table_rows
from vllm.v1.interventions.plan import FINAL, Site, TapShape
from vllm.v1.interventions.step_rows import Blocks, Members, StepRows
from vllm.v1.interventions.worker.attention_layers import AttentionHeads, attention_of
from vllm.v1.interventions.worker.attention_reader import AttentionReader
from vllm.v1.interventions.worker.attention_requests import AttentionRequests
from vllm.v1.interventions.worker.block_attention import BlockAttention, Captured
from vllm.v1.interventions.worker.focus_layers import FocusLayers
from vllm.v1.interventions.worker.lens_files import FileLens
from vllm.v1.interventions.worker.lens_reader import LensReader
from vllm.v1.interventions.worker.model_variants import ModelVariants
from vllm.v1.interventions.worker.outbox import Outbox
from vllm.v1.interventions.worker.pinning import Pinning, landing_bytes
from vllm.v1.interventions.worker.projection_table import ProjectionTable
from vllm.v1.interventions.worker.steering_table import SteeringTable
from vllm.v1.interventions.worker.tap_layers import (
    bound_taps,
    find_layers,
    has_whole_prompts,
    head_reads_rows,
    own_layers,
    refuse_layers,
    unbound_taps,
)
from vllm.v1.interventions.worker.term_table import TermTable
from vllm.v1.interventions.worker.token_map import TokenMap, to_device
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_PROBE_ROW = 1
"""A row of the steering table that no request uses."""


class Decoding(NamedTuple):
    """What `dest` was written for, if each request had one token; an equal step sends nothing."""

    req_ids: list[str]
    wanted: KeysView[str]
    blocks: Blocks
    token_index: torch.Tensor


class WorkerInterventions:
    """Device state of steering and capture of one worker, and the map of this step's tokens."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._steering = config.steering_config.enable_steering
        self._capture = config.capture_config.enabled
        self._groups: CaptureGroups | None = None
        self._captures: dict[str, CaptureGroup] = {}
        self._attention = AttentionRequests()
        self._wanted: dict[str, np.ndarray] = {}
        self._version = 0
        self.sites: list[Site] = []
        self._dest_rows: dict[Site, int] = {}
        self._final: int | None = None
        """The one of what goes to the head, if this stage has it."""
        self.table: SteeringTable | None = None
        self._terms: TermTable | None = None
        self.focus: FocusLayers | None = None
        """The layers that are focused, if any may be."""
        self._projections: ProjectionTable | None = None
        self._outbox: Outbox | None = None
        self._captured_tokens = 0
        self._decoding: Decoding | None = None
        self._pending: tuple[StepRows, Captured] | None = None
        # The stream is the same on every tensor-parallel rank: the first one captures, and sends.
        # Of attention and of the head before the vocabulary, each has a part, and needs the rows.
        parallel, capture = config.parallel_config, config.capture_config
        first = parallel.rank % parallel.tensor_parallel_size == 0
        self.captures_here = self._capture and (first or capture.shared)
        self.reads_attention = capture.reads_attention
        self._landing: Landing | None = None
        self._pinning: Pinning | None = None
        if self._capture and first:
            self._landing = Landing(landing_bytes(config))
            if device.type == "cuda":
                self._pinning = Pinning(self._landing, device)  # beside the loading of weights
        self.shape: TapShape | None = None
        self.layers: dict[int, nn.Module] = {}
        """The wired decoder layers here."""
        self.attention: dict[int, Attention | MLAAttention] = {}
        """The attention of each layer that has one."""
        self.lenses: dict[str, FileLens] = {}
        """Those of files, by name."""
        self._variants: ModelVariants | None = None
        self._probe: Callable[[], None] | None = None

    # -- start-up ---------------------------------------------------------------------------

    def bind(self, model: nn.Module) -> None:
        """Give every wired decoder layer of the target model its taps.

        Raises:
            ValueError: the model has decoder layers that are not wired, or none that are.
        """
        if not (self._steering or self._capture):
            return
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
        last = max([depth - 1, *layers])
        # Attention that runs several times is several, and each token of a prompt that is seen both
        # ways has weights which a later one changes: neither has rows of heads.
        attention = attention_of({n: m for n, m in layers.items() if not unbound_taps(m).loops})
        self.shape = TapShape(
            hidden_size=hidden_size,
            dtype=str(model_config.dtype).removeprefix("torch."),
            points={index: unbound_taps(layer).points for index, layer in layers.items()},
            heads={index: found.points for index, found in attention.items()},
            whole_prompts=has_whole_prompts(layers),
            branches={index: unbound_taps(layer).branches for index, layer in layers.items()},
            final=last if last in layers and head_reads_rows(model, hidden_size) else None,
        )
        refuse_layers(layers, self.shape.torch_dtype)
        self._allocate(self.shape)
        taps: dict[nn.Module, BoundTaps | LoopedTaps | HeadTaps] = {
            **bound_taps(layers, lambda n: BoundTaps(*(self._tap(point, n) for point in POINTS)))
        }
        config = self._config
        if not (config.capture_config.captures_heads or config.steering_config.steers_heads):
            attention = {}
        self.attention = {index: found.module for index, found in attention.items()}
        if config.steering_config.focuses:
            self.focus = FocusLayers(self._config, self.attention, self._device)
        for index, found in attention.items():
            q, k, v, z = (self._head_tap(point, index, found) for point in HEAD_POINTS)
            name = None if self.focus is None else self.focus.names.get(index)
            bound = HeadTaps(q, k, v, z, self._head_steering(index), name)
            taps[found.module] = bound
            if self.focus is not None and name is not None:
                self.focus.taps[index] = bound
        self._variants = ModelVariants(self._config, model, taps)

    def _allocate(self, shape: TapShape) -> None:
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        hidden, dtype, device = shape.hidden_size, shape.torch_dtype, self._device
        self.sites = [
            (p, n) for n in sorted(shape.points) for p in shape.offers(n) if p in CAPTURE_POINTS
        ]
        self.tokens = TokenMap(max_tokens, device)
        if self._steering:
            config = self._config.steering_config
            steered = [site for site in self.sites if site[0] in config.steering_points]
            num_rows = num_table_rows(config.max_steering_configs)
            ranks = self._config.parallel_config.tensor_parallel_size
            rank, scales = (
                self._config.parallel_config.rank % ranks,
                "scale" in config.steering_families,
            )
            self.table = SteeringTable(steered, num_rows, shape, device, scales, rank, ranks)
            if config.has_ops:
                of_stream = [site for site in steered if site[0] != HEADS]
                self._terms = TermTable(of_stream, config, hidden, self.tokens.program)
        self.arena: torch.Tensor | None = None
        self.dest: torch.Tensor | None = None
        if self._capture:
            rows = self._config.capture_config.capture_buffer_bytes // shape.row_bytes
            points = self._config.capture_config.capture_points
            captured = [site for site in self.sites if site[0] in points]
            self._dest_rows = {site: i for i, site in enumerate(captured)}
            if shape.final is not None:
                self._final = self._dest_rows.get((FINAL, shape.final))
            self._groups = CaptureGroups(self._dest_rows, shape)
            # The start-up check captures one token of any site, which may need several rows.
            least = max(map(shape.arena_rows, captured), default=1)
            rows = max(rows, least) if self.captures_here else least
            self.arena = torch.zeros(rows, hidden, dtype=dtype, device=device)
            if self.captures_here:
                self._projections = ProjectionTable(hidden, device)
                files = self._config.capture_config.lens_files
                self.lenses = {n: FileLens(n, path, shape, device) for n, path in files.items()}
                self._outbox = Outbox(self.arena, self._landing, self._projections)
            self.dest = torch.full(
                (len(self._dest_rows), max_tokens), -1, dtype=torch.int32, device=device
            )
            self._dest_host = np.full(tuple(self.dest.shape), -1, dtype=np.int32)

    def bind_caches(self, runner: Any) -> None:
        """Tell layers that are focused where the pages of their KV cache are.

        Args:
            runner: the model runner, which has just allocated them.
        """
        if self.focus is not None:
            self.focus.bind(runner, self.tokens)

    def _tap(self, point: str, layer: int) -> PassTap | SiteTap:
        site = (point, layer)
        arena = dest = None
        if self.dest is not None and site in self._dest_rows:
            arena, dest = self.arena, self.dest[self._dest_rows[site]]
        table = None if self.table is None else self.table.at.get(site)
        terms = None if self._terms is None else self._terms.at.get(site)
        if dest is None and table is None:
            return PassTap()
        traced = self._config.compilation_config.mode != CompilationMode.NONE
        kind = NativeTap if NATIVE_ROWS and not traced else SiteTap
        return kind(table, terms, self.tokens.slots, arena, dest)

    def _head_tap(self, point: str, layer: int, found: AttentionHeads) -> HeadTap | None:
        site = (point, layer)
        if site not in self._dest_rows:
            return None
        assert self.arena is not None and self.dest is not None and self.shape is not None
        dest, width = self.dest[self._dest_rows[site]], self.shape.row_width(site)
        gathers = self._config.parallel_config.tensor_parallel_size > 1
        replicas = found.replicas if point in ("k", "v") else 1
        return HeadTap(self.arena, dest, width, gathers, replicas)

    def _head_steering(self, layer: int) -> HeadSteering | None:
        site = (HEADS, layer)
        if self.table is None or site not in self.table.at:
            return None
        factors = self.table.factors.get(site)
        return HeadSteering(self.table.at[site], factors, self.tokens.slots)

    @property
    def num_variants(self) -> int:
        """Number of model variants, each to be compiled and recorded."""
        return self._variants.count if self._variants is not None else 1

    def each_variant(
        self, items: Iterable[Any] = (None,), graph_owner: Any = None
    ) -> Iterator[Any]:
        """Yield what is to be compiled or captured, in each model variant, while the engine starts.
        When the first call of it ends, all is compiled and graphs may be captured.

        Args:
            graph_owner: upstream's object that keeps the CUDA graphs which are captured meanwhile.
        """
        if self._pinning is not None and graph_owner is not None:
            self._pinning.pause()
        yield from self._variants.each(items, graph_owner) if self._variants is not None else items
        if self._pinning is not None:
            self._pinning.pause()

    def started(self) -> None:
        """Go on with what has to rest while graphs are captured: all of them are."""
        if self._pinning is not None:
            self._pinning.resume()

    def captures(self, site: Site) -> bool:
        """Whether this worker can capture at a site."""
        return self.captures_here and site in self._dest_rows

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
        if rows:
            assert self.arena is not None
            self.arena[:size].fill_(float("nan"))
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
        for site, row in rows.items():
            assert self.dest is not None
            self.dest[self._dest_rows[site], 0] = row
            self._captured_tokens = 1

    def read_attention(self, reader: AttentionReader) -> None:
        """Read attention by this from now on."""
        assert self._outbox is not None and self.arena is not None
        self._outbox.attention = BlockAttention(reader, self.arena)

    def read_lenses(self, reader: LensReader, shape: TapShape) -> None:
        """Read lenses by this from now on; `shape` has them."""
        assert self._outbox is not None
        self._outbox.lens, self.shape = reader, shape

    # -- per step ---------------------------------------------------------------------------

    def apply_updates(self, scheduler_output: "SchedulerOutput") -> None:
        """Take over what the scheduler decided. Everything was validated: this cannot fail."""
        if not self.sites:
            return
        step = scheduler_output.interventions
        self.tokens.update(scheduler_output.finished_req_ids, step.admitted if step else {})
        for req_id in scheduler_output.finished_req_ids:
            self._captures.pop(req_id, None)
        self._wanted = step.rows if step is not None else {}
        self._attention.update(scheduler_output)
        if step is None:
            return
        self._version = step.version
        if self._projections is not None:
            self._projections.apply(step.projections)
        if self._groups is not None and step.admitted:
            self._decoding = None
            groups = {r: self._groups.of(w) for r, w in step.admitted.items()}
            self._captures |= {r: group for r, group in groups.items() if group is not None}
        if self.table is not None:
            self.table.apply(step)
        if self._terms is not None:
            self._terms.apply(step)
        if self.focus is not None:
            self.focus.table.apply(step)

    def forget(self) -> None:
        """Clear all tables: after sleep the device's memory holds anything, and the scheduler sends
        everything again."""
        if not self.sites:
            return
        self.tokens.forget()
        if self.dest is not None:
            self.dest.fill_(-1)
            self._decoding = None
        if self.table is not None:
            self.table.forget()
        if self._terms is not None:
            self._terms.forget()
        if self.focus is not None:
            self.focus.table.forget()
        if self._projections is not None:
            self._projections.forget()

    def map_dummy(self) -> None:
        """Prepare a dummy forward: no token is steered or captured, but by the start-up check."""
        if self.sites:
            self.tokens.clear(0)
            self.tokens.focuses = True  # graphs are recorded with all that a step may need
            self._clear_dest()
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
        if self._variants is None:
            return
        captures = not self._wanted.keys().isdisjoint(req_ids)
        if not self._variants.choose(tapped=captures or self.tokens.steers(req_ids)):
            return  # what was mapped for an earlier step stays, unread, until the next is mapped
        self.tokens.map(req_ids, num_tokens[: len(req_ids)], positions)
        self._map_dest(req_ids, num_tokens, positions)

    def _map_dest(
        self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor
    ) -> None:
        if not self._wanted or not self.captures_here:
            self._clear_dest()
            return
        assert self.dest is not None
        starts = np.cumsum(num_tokens[: len(req_ids)]) - num_tokens[: len(req_ids)]
        total = int(num_tokens[: len(req_ids)].sum())
        last, wanted = self._decoding, self._wanted.keys()
        if last and len(req_ids) == total and (last.req_ids, last.wanted) == (req_ids, wanted):
            # As in the step before: nothing is sent.
            self._attention.count_keys(last.blocks)
            self._pending = self._rows_at(last.blocks, positions, last.token_index)
            return
        self._clear_dest()
        # Requests that want the same share one dense block of the arena.
        groups: dict[CaptureGroup, Members] = {}
        for req_id, start in zip(req_ids, starts, strict=True):
            offsets, group = self._wanted.get(req_id), self._captures.get(req_id)
            if offsets is not None and group is not None:
                groups.setdefault(group, []).append((req_id, start + offsets))
        if self._landing is None:
            groups = {group: members for group, members in groups.items() if group.shared}
        if not groups:
            return  # all of it at other pipeline stages, or for the first rank alone
        blocks = Blocks(groups)
        of_block = [np.concatenate([t for _, t in members]) for members in groups.values()]
        for block, tokens in zip(blocks.all, of_block, strict=True):
            self._dest_host[np.ix_(block.group.sites, tokens)] = block.rows()
        self._attention.place(blocks, req_ids)
        self.dest[:, :total] = to_device(self._dest_host[:, :total], self._device)
        self._captured_tokens = total
        token_index = to_device(np.concatenate(of_block), self._device)
        self._pending = self._rows_at(blocks, positions, token_index)
        if total == len(req_ids):
            self._decoding = Decoding(list(req_ids), wanted, blocks, token_index)

    def _rows_at(
        self, blocks: Blocks, positions: torch.Tensor, token_index: torch.Tensor
    ) -> tuple[StepRows, Captured]:
        """A step's result, and what is captured for it."""
        assert self.shape is not None
        rows = StepRows(self._version, blocks, self.shape.hidden_size, self.shape.torch_dtype)
        programs = self.tokens.focus[token_index] if self.tokens.focuses else None
        return rows, Captured(positions[token_index].long(), programs)

    def capture_final(self, hidden_states: torch.Tensor) -> None:
        """Capture what goes to the head, if that is wanted, before anything else runs that may use
        its memory.

        Args:
            hidden_states: what the model returned, [>= tokens, hidden]; on the last stage.
        """
        if self._final is None or (self._pending is None and self._probe is None):
            return
        blocks = [] if self._pending is None else self._pending[0].blocks.all
        if self._probe is not None or any(self._final in block.group.sites for block in blocks):
            assert self.arena is not None and self.dest is not None
            capture_rows(hidden_states, self.arena, self.dest[self._final])

    def _clear_dest(self) -> None:
        if self._captured_tokens and self.dest is not None:
            self.dest[:, : self._captured_tokens].fill_(-1)
            self._dest_host[:, : self._captured_tokens] = -1
        self._captured_tokens = 0
        self._decoding = None

    def collect(self) -> StepRows | None:
        """Send this step's rows to the host, after the forward; None if it captured none, or if
        another rank sends them."""
        if self._pending is None:
            return None
        (rows, captured), self._pending = self._pending, None
        assert self._outbox is not None
        if self._landing is None:
            self._outbox.take_part(rows, captured)
            return None
        self._outbox.send(rows, captured)
        return rows

    def rows_alone(self) -> ModelRunnerOutput | None:
        """An output with this step's rows alone, for a worker not of the last stage; None without
        rows."""
        captured = self.collect()
        if captured is None:
            return None
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, captured=captured)
