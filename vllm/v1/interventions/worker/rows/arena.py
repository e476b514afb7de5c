# SPDX-License-Identifier: Apache-2.0
"""Arena of captured rows: the row that each token of a step gets, and what leaves afterwards.

Per step: `update` with what the scheduler decided, `map` before the forward or `clear` before one
that captures nothing, `collect` after it.
"""

from collections.abc import Collection, KeysView, Mapping
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.config.points import FINAL
from vllm.model_executor.layers.row_capture import WRITTEN, capture_rows
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.capture_groups import CaptureGroup, CaptureGroups, all_make, num_senders
from vllm.v1.interventions.makings import Attention, Dose, Lens
from vllm.v1.interventions.messages import WorkerRequest
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.step_rows import Block, Blocks, Members, StepRows
from vllm.v1.interventions.worker.attention.reader import AttentionReader
from vllm.v1.interventions.worker.making.attention import AttentionMaker, AttentionRequests
from vllm.v1.interventions.worker.making.doses import DoseMaker, Steered
from vllm.v1.interventions.worker.making.held import HeldFeatures
from vllm.v1.interventions.worker.making.lens import FileLens, LensMaker, LensReader
from vllm.v1.interventions.worker.making.maker import Captured, Material
from vllm.v1.interventions.worker.making.shards import Shards
from vllm.v1.interventions.worker.rows.outbox import Outbox
from vllm.v1.interventions.worker.rows.pinning import Pinning, landing_bytes
from vllm.v1.interventions.worker.tables.matrices import ProjectionTable
from vllm.v1.interventions.worker.token_map import TokenMap

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


PARTS = 4
"""In so many parts the rows of a step of many leave, each of half of the layers that are left: the
first ones have time, and for the last one waits who asked."""


class Decoding(NamedTuple):
    """The step that `dest` was written for, if each request had one token; an equal step sends
    nothing."""

    req_ids: list[str]
    wanted: KeysView[str]
    blocks: Blocks
    token_index: torch.Tensor


class Leaving(NamedTuple):
    """The rows of a step that leave together, and when."""

    rows: StepRows
    captured: Captured
    missing: set[int] | None = None
    """The sites that the forward has not come to yet; with none they have left. None of what leaves
    after the forward."""
    early: bool = False
    """True if the forward goes on for long after the last of these sites."""


def _zeros(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of a `dtype` on the device: [rows, hidden]. On a CPU a page is in memory once it is
    written: a start does not wait for a gigabyte of them."""
    if device.type != "cpu":
        return torch.zeros(rows, hidden, dtype=dtype, device=device)
    pages = np.zeros(rows * hidden * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(rows, hidden)


class CaptureArena:
    """The arena, in which the taps of a worker leave captured rows.

    Its memory on the host is registered from the first moment, beside the loading of weights; that
    on the device exists since `allocate`.
    """

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        # The stream is the same on every tensor-parallel rank: the first one captures, and sends,
        # and of a step of many rows every sender those of its share of the layers.
        # Of attention and of the head before the vocabulary, each has a part, and needs the rows.
        parallel = config.parallel_config
        self._sender = parallel.rank % parallel.tensor_parallel_size
        self._shards = Shards(self._sender, parallel.tensor_parallel_size)
        lands = self._sender < num_senders(config)
        self.fills = lands or all_make(config)
        """True if rows are captured here, or only where graphs are alike on all ranks."""
        self.reads_attention = config.capture_config.reads_attention
        self._landing = Landing(landing_bytes(config)) if lands else None
        self.pinning: Pinning | None = None
        if self._landing is not None and device.type == "cuda":
            self.pinning = Pinning(self._landing, device)
        self._captures: dict[str, list[CaptureGroup | None]] = {}
        """Request id -> its groups here: one for steps that are not split, one for split ones."""
        self._parts_of: WeakKeyDictionary[CaptureGroup, list[CaptureGroup | None]] = (
            WeakKeyDictionary()
        )
        """Group of `_captures` -> the group of its rows in each part; None if it has none."""
        self._split = False
        """True if this step leaves in parts."""
        self._attention = AttentionRequests()
        self._wanted: dict[str, np.ndarray] = {}
        self._version = 0
        self._captured_tokens = 0
        self._decoding: Decoding | None = None
        self._last_sites: tuple[set[str], frozenset[int]] | None = None
        """Request ids, and what `wanted_sites` found for them, while they capture the same."""
        self._takes_final = False
        """True if rows of `_pending` are of what goes to the head."""
        self._pending: list[Leaving] = []
        """The parts of this step's rows."""

    def allocate(self, shape: TapShape, sites: list[Site], tokens: TokenMap) -> None:
        """Make what the taps of `sites` write to."""
        config, device, hidden = self._config.capture_config, self._device, shape.hidden_size
        self._tokens, self.shape = tokens, shape
        self.sites = {site: i for i, site in enumerate(sites)}
        """The row of `dest` of each."""
        # The start-up check captures one token of any site, which may need several rows.
        rows = max(map(shape.arena_rows, sites), default=1)
        self.most_rows = max(config.capture_buffer_bytes // shape.row_bytes, rows)
        """Number of rows of the arena, on a worker that captures."""
        if self.fills:
            rows = self.most_rows
        self.arena = _zeros(rows, hidden, shape.torch_dtype, device)
        """[rows, hidden]."""
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        self._row_map = RowMap(len(sites), max_tokens, device)
        self.dest = self._row_map.dest
        self.switches = torch.ones(len(sites), dtype=torch.bool)
        """[sites] whether the tap of each captures in this step; `ModelVariants` turns them."""
        self._final = next((i for (point, _), i in self.sites.items() if point == FINAL), None)
        shares = [(0, 1)] + [(self._sender, shape.senders)] * (shape.senders > 1)
        self._groups = [CaptureGroups(self.sites, shape, *share) for share in shares]
        layers = sorted({layer for _, layer in sites})
        of_part = np.split(layers, [len(layers) * (2**n - 1) // 2**n for n in range(1, PARTS)])
        self._parts = [
            [CaptureGroups(self.sites, shape, *share, set(map(int, own))) for own in of_part]
            for share in shares
        ]
        self._config.compilation_config.static_forward_context[WRITTEN] = self
        self.lenses: dict[str, FileLens] = {}
        """Name -> lens, of the lenses that are read from files."""
        self._outbox: Outbox | None = None
        self.projections: ProjectionTable | None = None
        """The matrices of `project`, on a worker that captures."""
        self.features: HeldFeatures | None = None
        """Autoencoders, likewise."""
        if self.fills:
            files = config.lens_files
            self.lenses = {n: FileLens(n, path, shape, device) for n, path in files.items()}
            # Alone, a worker is the engine core, whose one thread launches, and waits.
            apart = self._config.parallel_config.world_size > 1
            self.projections = ProjectionTable(hidden, device)
            steering, here = self._config.steering_config, {layer for _, layer in sites}
            own = {n: file for n, file in steering.feature_files.items() if file.layer in here}
            room = steering.features_memory_bytes if steering.features_root else 0
            dtype, shards = shape.torch_dtype, self._shards
            self.features = HeldFeatures(own, here, device, dtype, room, shards)
            material = Material(self.arena, self.projections, self.features.by_key, shards)
            self._outbox = Outbox(self._landing, material, sleeps=apart)

    def captures(self, site: Site) -> bool:
        """Tell whether this worker can capture at a site."""
        return self.fills and site in self.sites

    def dest_of(self, site: Site) -> torch.Tensor:
        """Return the arena row of each token at a site: int32 [tokens], a view of `dest`."""
        return self.dest[self.sites[site]]

    def switch_of(self, site: Site) -> torch.Tensor:
        """Tell whether rows of a site go there: bool [], a view of `switches`."""
        return self.switches[self.sites[site]]

    def read_attention(self, reader: AttentionReader) -> None:
        """Read attention by this from now on."""
        assert self._outbox is not None
        maker = self._outbox.makers[Attention]
        assert isinstance(maker, AttentionMaker)
        maker.reader = reader

    def compare_with(self, tables: Mapping[Site, torch.Tensor]) -> None:
        """Make doses by these from now on, which `Steered` describes."""
        if self._outbox is not None:
            maker = self._outbox.makers[Dose]
            assert isinstance(maker, DoseMaker)
            maker.steered = Steered(list(self.sites), self._tokens.slots, tables)

    def read_lenses(self, reader: LensReader) -> None:
        """Read lenses by this from now on."""
        assert self._outbox is not None
        maker = self._outbox.makers[Lens]
        assert isinstance(maker, LensMaker)
        maker.reader = reader

    def update(self, scheduler_output: "SchedulerOutput") -> None:
        """Take over whose rows are wanted in this step, and of whom in those to come."""
        step = scheduler_output.interventions
        for req_id in scheduler_output.finished_req_ids:
            if self._captures.pop(req_id, None) is not None:
                self._last_sites = None
        self._wanted = step.rows if step is not None else {}
        if self.reads_attention:
            self._attention.update(scheduler_output)
        if step is None:
            return
        if step.admitted:
            self._decoding = self._last_sites = None
            groups = {r: self._groups_of(asked) for r, asked in step.admitted.items()}
            self._captures |= {r: found for r, found in groups.items() if found[0] is not None}
        if self._outbox is None:
            return
        self._version = step.version
        if step.split != self._split:
            self._split, self._decoding = step.split, None

    def _groups_of(self, asked: WorkerRequest) -> list[CaptureGroup | None]:
        found = [groups.of(asked) for groups in self._groups]
        for group, parts in zip(found, self._parts, strict=True):
            if group is not None and group not in self._parts_of:
                self._parts_of[group] = [part.of(asked) for part in parts]
        return found

    def forget(self) -> None:
        """Clear all that sleep took away."""
        self.dest.fill_(-1)
        self._decoding = None

    def wanted_sites(self, req_ids: Collection[str]) -> frozenset[int] | None:
        """The sites at which these capture here in this step, of every tensor-parallel rank; None
        if none of them captures, here or at another pipeline stage."""
        wanted = self._wanted.keys() & req_ids
        if not wanted:
            return None
        if self._last_sites is None or self._last_sites[0] != wanted:
            groups = {self._captures[r][0] for r in wanted & self._captures.keys()}
            sites = frozenset[int]().union(*(group.site_set for group in groups if group))
            self._last_sites = wanted, sites
        return self._last_sites[1]

    def probe(self, rows: Mapping[Site, int]) -> None:
        """Have the next forward capture its first token, each site in this row of the arena."""
        for site, row in rows.items():
            self.dest_of(site)[0] = row
            self._captured_tokens = 1

    def map(self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor) -> None:
        """Write `dest` for a step, with the arguments of `WorkerInterventions.map_rows`."""
        sends = self._split or self._sender == 0
        if not self._wanted or not (sends or self.fills):
            self.clear()
            return
        num_tokens = num_tokens[: len(req_ids)]
        total = int(num_tokens.sum())
        if self._outbox is not None:
            self._outbox.next_step()
        last, wanted = self._decoding, self._wanted.keys()
        if last and len(req_ids) == total and (last.req_ids, last.wanted) == (req_ids, wanted):
            # As in the step before: nothing is sent.
            if self.reads_attention:
                self._attention.count_keys(last.blocks)
            self._pending = [Leaving(*self._rows_at(last.blocks, positions, last.token_index))]
            return
        self.clear()
        members = []
        for req_id, start in zip(req_ids, np.cumsum(num_tokens) - num_tokens, strict=True):
            offsets, found = self._wanted.get(req_id), self._captures.get(req_id)
            group = found[self._split] if found is not None else None
            if offsets is not None and group is not None and (sends or group.shared):
                members.append((group, req_id, start + offsets))
        if not members:
            return  # all of it at other pipeline stages, or for others to send
        # Those that decode run graphs, which tell nothing, and are mapped once for many steps.
        decodes = total == len(req_ids)
        rows = sum((group.num_raw + group.rest_rows) * len(at) for group, _, at in members)
        whole = decodes or rows * PARTS < self.most_rows
        whole |= any(g.late or (g.shared and self._shards.ranks > 1) for g, _, _ in members)
        self._captured_tokens = total
        self._takes_final = any(self._final in group.site_set for group, _, _ in members)
        for part, blocks, tokens in self._laid_out(members, whole):
            if self.reads_attention:
                self._attention.place(blocks, req_ids)
            token_index = async_tensor_h2d(tokens, self._device)
            for block, own in blocks.split(token_index):
                self._row_map.write(block, own)
            leaving = Leaving(*self._rows_at(blocks, positions, token_index))
            if not whole:
                missing = {site for block in blocks.all for site in block.group.site_set}
                leaving = leaving._replace(missing=missing, early=part + 1 < PARTS)
            self._pending.append(leaving)
        if decodes:
            self._decoding = Decoding(list(req_ids), wanted, blocks, token_index)

    def _laid_out(
        self, members: list[tuple[CaptureGroup, str, np.ndarray]], whole: bool
    ) -> list[tuple[int, Blocks, np.ndarray]]:
        """Lay out the rows of a step by the part in which they leave: (the part's number, its
        blocks, the places in the batch of their tokens).

        Args:
            members: the requests: (what it captures, request id, places of its captured tokens).
            whole: whether there is one part.
        """
        parts, row = [], 0
        for part in range(1 if whole else PARTS):
            # Requests that want the same share one dense block of the arena.
            groups: dict[CaptureGroup, Members] = {}
            for asked, req_id, at in members:
                group = asked if whole else self._parts_of[asked][part]
                if group is not None:
                    groups.setdefault(group, []).append((req_id, at))
            if not groups:
                continue
            blocks = Blocks(groups, row)
            row = blocks.stop
            of_block = [at for owners in groups.values() for _, at in owners]
            parts.append((part, blocks, np.concatenate(of_block)))
        return parts

    def wrote(self, dest: torch.Tensor) -> None:
        """Send a part of the rows when the forward has left all of it, as `Written.wrote`."""
        if not self._pending or self._pending[-1].missing is None:
            return  # they leave after the forward
        # Not by its offset: compiled code makes a copy of what is not aligned.
        site, rest = divmod(dest.data_ptr() - self.dest.data_ptr(), self.dest[0].nbytes)
        for part in () if rest else self._pending:
            if part.missing and site in part.missing:
                part.missing.remove(site)
                if not part.missing and self._outbox is not None:
                    self._outbox.send(part.rows, part.captured, early=part.early)

    def _rows_at(
        self, blocks: Blocks, positions: torch.Tensor, token_index: torch.Tensor
    ) -> tuple[StepRows, Captured]:
        """A step's result, and what is captured for it."""
        rows = StepRows(self._version, blocks, self.arena.shape[1], self.arena.dtype)
        programs = self._tokens.focus[token_index] if self._tokens.focuses else None
        return rows, Captured(positions[token_index].long(), token_index, programs)

    def capture_final(self, hidden_states: torch.Tensor, probed: bool) -> None:
        """Capture what goes to the head, if wanted, as `WorkerInterventions.capture_final`.

        Args:
            probed: whether this is a forward of the start-up check.
        """
        if self._final is not None and (probed or (self._pending and self._takes_final)):
            on = self.switches[self._final]
            capture_rows(hidden_states, self.arena, self.dest[self._final], on)

    def clear(self) -> None:
        """Capture nothing in the next forward."""
        if self._captured_tokens:
            self.dest[:, : self._captured_tokens].fill_(-1)
        self._captured_tokens = 0
        self._decoding, self._pending = None, []

    def collect(self) -> StepRows | None:
        """Send the rows of this step to the host, as `WorkerInterventions.collect` says."""
        if not self._pending:
            return None
        pending, self._pending = self._pending, []
        assert self._outbox is not None
        first, *later = pending
        if self._landing is None:
            self._outbox.take_part(first.rows, first.captured)
            return None
        for part in pending:
            if part.missing or part.missing is None:  # a graph tells of no site
                self._outbox.send(part.rows, part.captured)
        for part in later:
            first.rows.join(part.rows)
        return first.rows


class RowMap:
    """First arena row of each token at each site, on the device, which taps read before they write
    rows.

    Args:
        num_sites: of this worker.
        max_tokens: of a step.
    """

    def __init__(self, num_sites: int, max_tokens: int, device: torch.device) -> None:
        self.dest = torch.full((num_sites, max_tokens), -1, dtype=torch.int32, device=device)
        """[sites, tokens], -1 for none."""
        self._of_group: WeakKeyDictionary[CaptureGroup, list[torch.Tensor]] = WeakKeyDictionary()
        """Int64 [n, 1] a group's sites, the raw ones and the others, and int32 [n, 1] which of a
        token's rows is the first of each, of both."""

    def write(self, block: Block, tokens: torch.Tensor) -> None:
        """Set `dest` for the tokens of a block.

        Args:
            tokens: int64 [count] on the device, their places in the batch.
        """
        group, device = block.group, self.dest.device
        if group not in self._of_group:
            arrays = np.split(group.sites, [group.num_raw])
            arrays += [np.arange(group.num_raw, dtype=np.int32), group.rest_at.astype(np.int32)]
            self._of_group[group] = [async_tensor_h2d(each[:, None], device) for each in arrays]
        raw_sites, rest_sites, raw_rows, rest_rows = self._of_group[group]
        nth = torch.arange(len(tokens), dtype=torch.int32, device=device)
        if group.num_raw:
            self.dest[raw_sites, tokens] = raw_rows + (nth * group.num_raw + block.raw)
        if group.rest_rows:
            self.dest[rest_sites, tokens] = rest_rows + (nth * group.rest_rows + block.rest)
