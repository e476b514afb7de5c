# SPDX-License-Identifier: Apache-2.0
"""The one object both model runners call. It makes no decisions, only copies.

Per step: `apply_updates` (also when no token is scheduled, else an update would be lost),
`map_rows` before the forward or `map_dummy` before a dummy one, `collect` after it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.config.steering import POINTS
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.residual_taps import BoundTaps, PassTap, SiteTap
from vllm.v1.interventions import Content, Site, TapShape, WorkerRequest
from vllm.v1.steering.plan import rows_of
from vllm.v1.worker.step_rows import StepRows
from vllm.v1.worker.tap_layers import find_layers, refuse_layers, unbound_taps

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Interventions:
    """Device state of steering and capture of one worker, and the map of this step's tokens."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._steering = config.steering_config.enable_steering
        self._capture = config.capture_config.enabled
        self._requests: dict[str, WorkerRequest] = {}
        self._wanted: dict[str, np.ndarray] = {}
        self.sites: dict[Site, int] = {}
        self.table: dict[Site, torch.Tensor] = {}
        self._steered_tokens = 0
        self._captured_tokens = 0
        self._pending: StepRows | None = None
        self.captures_here = False
        self.shape: TapShape | None = None
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
        refuse_layers(layers, model_config.dtype)
        self.shape = TapShape(
            hidden_size=model_config.get_hidden_size(),
            dtype=str(model_config.dtype).removeprefix("torch."),
            points={index: unbound_taps(layer).points for index, layer in layers.items()},
        )
        sites = [(p, n) for n in sorted(layers) for p in self.shape.points[n]]
        self.sites = {site: i for i, site in enumerate(sites)}
        self._allocate(self.shape)
        for index, layer in layers.items():
            taps = BoundTaps(*(self._tap(point, index) for point in POINTS))
            layer.taps = taps  # type: ignore[assignment]

    def _allocate(self, shape: TapShape) -> None:
        max_tokens = self._config.scheduler_config.max_num_batched_tokens
        hidden, dtype, device = shape.hidden_size, shape.torch_dtype, self._device
        self.slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        if self._steering:
            num_slots = self._config.steering_config.max_steering_configs + 1
            for site in self.sites:
                if site[0] in self._config.steering_config.steering_points:
                    self.table[site] = torch.zeros(num_slots, hidden, dtype=dtype, device=device)
        self.arena: torch.Tensor | None = None
        self.dest: torch.Tensor | None = None
        if self._capture:
            rows = self._config.capture_config.capture_buffer_bytes // shape.row_bytes
            # The stream is the same on every tensor-parallel rank: the first one captures.
            self.captures_here = get_tensor_model_parallel_rank() == 0
            self.arena = torch.zeros(
                rows if self.captures_here else 1, hidden, dtype=dtype, device=device
            )
            self.dest = torch.full(
                (len(self.sites), max_tokens), -1, dtype=torch.int32, device=device
            )
            self._dest_host = np.full(tuple(self.dest.shape), -1, dtype=np.int32)

    def _tap(self, point: str, layer: int) -> PassTap | SiteTap:
        site = (point, layer)
        if site not in self.sites:
            return PassTap()
        dest = None if self.dest is None else self.dest[self.sites[site]]
        return SiteTap(self.table.get(site), self.slots, self.arena, dest)

    @contextmanager
    def probing(self, site: Site, vector: torch.Tensor | None) -> Iterator[None]:
        """Within, dummy forwards steer their first token at `site` and capture it into row 0.

        Args:
            vector: [hidden], or None to steer nothing.
        """
        if vector is not None:
            self.table[site][1].copy_(vector)
        if self.captures_here:
            assert self.arena is not None
            self.arena[0].fill_(float("nan"))
        self._probe = lambda: self._map_probe(site, steer=vector is not None)
        try:
            yield
        finally:
            self._probe = None
            self.map_dummy()
            if vector is not None:
                self.table[site][1].zero_()

    def _map_probe(self, site: Site, steer: bool) -> None:
        if steer:
            self.slots[0] = 1
            self._steered_tokens = 1
        if self.captures_here:
            assert self.dest is not None
            self.dest[self.sites[site], 0] = 0
            self._captured_tokens = 1

    # -- per step ---------------------------------------------------------------------------

    def apply_updates(self, scheduler_output: "SchedulerOutput") -> None:
        """Take over what the scheduler decided. Everything was validated: this cannot fail."""
        for req_id in scheduler_output.finished_req_ids:
            self._requests.pop(req_id, None)
        step = scheduler_output.interventions
        self._wanted = step.rows if step is not None else {}
        if step is not None:
            self._requests.update(step.admitted)
            for slot, content in step.contents:
                self._write(slot, content)

    def _write(self, slot: int, content: Content) -> None:
        assert self.shape is not None
        rows = rows_of(content, self.shape)
        if self._device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self._device, non_blocking=True)
        index = {site: i for i, site in enumerate(content.sites)}
        for site, table in self.table.items():
            if site in index:
                table[slot].copy_(rows[index[site]])
            else:
                table[slot].zero_()

    def map_dummy(self) -> None:
        """Before a dummy forward: no token is steered or captured, but by the start-up check."""
        if self.sites:
            self._clear_slots(0)
            self._clear_dest()
            if self._probe is not None:
                self._probe()

    def map_rows(self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor) -> None:
        """Before a forward: which slot and which arena rows this step's tokens get.

        Args:
            req_ids: in batch order.
            num_tokens: int [len(req_ids)], scheduled tokens of each.
            positions: int [>= total tokens] on the device, the *true* position of each token; the
                host's are only optimistic under speculation.
        """
        if not self.sites:
            return
        self._map_slots(req_ids, num_tokens, positions)
        self._map_dest(req_ids, num_tokens, positions)

    def _map_slots(
        self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor
    ) -> None:
        known = [self._requests.get(req_id) for req_id in req_ids]
        if not any(r is not None and (r.prefill_slot or r.decode_slot) for r in known):
            self._clear_slots(0)
            return
        per_request = np.array(
            [
                (r.prefill_slot, r.decode_slot, r.num_prompt_tokens) if r is not None else (0, 0, 0)
                for r in known
            ],
            dtype=np.int32,
        )
        per_token = self._upload(np.repeat(per_request, num_tokens[: len(known)], axis=0))
        total = len(per_token)
        in_prompt = positions[:total] < per_token[:, 2]
        self.slots[:total] = torch.where(in_prompt, per_token[:, 0], per_token[:, 1])
        self._clear_slots(total)

    def _clear_slots(self, total: int) -> None:
        # Graphs replay with more tokens than the step has: the tail must be slot 0.
        if self._steered_tokens > total:
            self.slots[total : self._steered_tokens].zero_()
        self._steered_tokens = total

    def _map_dest(
        self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor
    ) -> None:
        self._clear_dest()
        if not self._wanted or not self.captures_here:
            return
        assert self.dest is not None and self.arena is not None
        starts = np.cumsum(num_tokens[: len(req_ids)]) - num_tokens[: len(req_ids)]
        # Requests that want the same sites share one dense block of the arena.
        blocks: dict[tuple[Site, ...], list[tuple[str, np.ndarray]]] = {}
        for req_id, start in zip(req_ids, starts, strict=True):
            offsets = self._wanted.get(req_id)
            if offsets is not None:
                sites = self._requests[req_id].capture_sites
                blocks.setdefault(sites, []).append((req_id, start + offsets))
        pending = StepRows()
        num_rows = 0
        for sites, members in blocks.items():
            tokens = np.concatenate([t for _, t in members])
            index = [self.sites[site] for site in sites]
            rows = np.arange(num_rows, num_rows + len(sites) * len(tokens), dtype=np.int32)
            self._dest_host[np.ix_(index, tokens)] = rows.reshape(len(sites), len(tokens))
            pending.add_block(len(sites), members, num_rows)
            num_rows += len(rows)
        total = int(num_tokens[: len(req_ids)].sum())
        self.dest[:, :total] = self._upload(self._dest_host[:, :total])
        self._captured_tokens = total
        pending.take_positions(positions, self._upload(pending.token_index()))
        self._pending = pending

    def _clear_dest(self) -> None:
        if self._captured_tokens and self.dest is not None:
            self.dest[:, : self._captured_tokens].fill_(-1)
            self._dest_host[:, : self._captured_tokens] = -1
        self._captured_tokens = 0

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return host.clone()
        # A fresh pinned tensor each time: the previous step's copy may still be reading its own.
        return host.pin_memory().to(self._device, non_blocking=True)

    def collect(self) -> StepRows | None:
        """After the forward: this step's rows, on their way to the host."""
        pending, self._pending = self._pending, None
        if pending is not None:
            assert self.arena is not None
            pending.take_rows(self.arena)
        return pending
