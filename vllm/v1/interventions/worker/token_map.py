# SPDX-License-Identifier: Apache-2.0
"""From requests' segments to what each token of a step gets: its table row and its program."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.interventions.messages import WorkerRequest

_SHIFT = 40
"""Bits of a position: (request << _SHIFT) + position is one number, so one sorted search serves a
whole batch."""

_NOBODYS = np.zeros(1, np.int32)
_PLAIN = WorkerRequest(np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int32))


class _Uploaded(NamedTuple):
    """A batch on the device."""

    base: torch.Tensor
    """int64 [tokens], request << _SHIFT."""
    keys: torch.Tensor
    """int64 [segments], (request << _SHIFT) + first position."""
    table_rows: torch.Tensor
    """int32 [1 + segments], like the next two; the first is nobody's."""
    programs: torch.Tensor | None
    """None where no segment has one."""
    focus: torch.Tensor | None
    runs: torch.Tensor | None
    """int32 [tokens], as the first of `TokenMap.runs`; None where no request has gates that
    latch."""
    fixed_after: float
    """After how many steps of the batch no position changes a row: each request is in its last
    segment, and none has a focus or gates that latch."""


class TokenMap:
    """The rows of this step's tokens, on the device.

    The row follows from the token's *true* position, which only the device knows in time: the
    host's is optimistic under speculation and asynchronous scheduling.

    Args:
        grows: whether the positions of a request that runs only grow, so that one in its last
            segment stays there: without drafts, which may be rejected, and without a KV connector,
            which may fail to load.
        ahead: the most tokens of a request that a step computes and the next may compute again:
            drafts.
    """

    def __init__(
        self, max_tokens: int, device: torch.device, grows: bool = False, ahead: int = 0
    ) -> None:
        self._grows = grows
        self.depth = 1 + ahead
        """Number of positions up to the last one of which latched gates are kept."""
        self.slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The table row of each token; 0 for padding and plain tokens."""
        self.program = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The program of each token; 0 for no ops."""
        self.runs = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        """`TermTables.runs`."""
        self._latches = False
        """True if any token may have a run."""
        self.focus = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The focus program of each token; 0 for none."""
        self.requests = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The place in the batch of each token's request; of steps with focus."""
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        """The true position of each token; of steps with focus."""
        self.focuses = False
        """True if any token may have a focus program."""
        self._requests: dict[str, WorkerRequest] = {}
        self._mapped = 0
        self._programs = False
        """True if any token may have a program."""
        self._batch: tuple[list[str], np.ndarray, _Uploaded] | None = None
        self._placed: _Uploaded | None = None
        """The batch whose rows the tokens have, if no position changes them."""
        self._ran: dict[str, int] = {}
        """Tokens that ran of steered requests since they were admitted, before `_batch`: no more
        than their positions."""
        self._steps = 0
        """Steps of `_batch`."""

    def update(self, finished: set[str], admitted: dict[str, WorkerRequest]) -> None:
        """Forget requests that ended, and keep those admitted ones that are steered."""
        for req_id in finished:
            if self._requests.pop(req_id, None) is not None:
                self._end_batch()
                self._ran.pop(req_id, None)
        for req_id, request in admitted.items():
            self._end_batch()
            self._ran.pop(req_id, None)
            if request.table_rows.any() or request.programs.any() or any(request.focus):
                self._requests[req_id] = request
            else:
                self._requests.pop(req_id, None)

    def steers(self, req_ids: Iterable[str]) -> bool:
        """Tell whether any of these requests is steered at any position."""
        return not self._requests.keys().isdisjoint(req_ids)

    def map(self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor) -> None:
        """Set `slots` and `program` for a batch.

        Args:
            req_ids: in batch order.
            num_tokens: int [len(req_ids)], scheduled tokens of each.
            positions: int [>= total tokens] on the device.
        """
        if not self.steers(req_ids):
            if self._mapped or self.focuses or self._latches:
                self.clear(0)
                self._clear_focus()
                self._clear_runs()
            return
        batch = self._uploaded(req_ids, num_tokens)
        steps, self._steps = self._steps, self._steps + 1
        if batch is self._placed:
            return
        total = len(batch.base)
        segment = torch.searchsorted(batch.keys, batch.base + positions[:total], right=True)
        torch.index_select(batch.table_rows, 0, segment, out=self.slots[:total])
        if batch.programs is not None:
            torch.index_select(batch.programs, 0, segment, out=self.program[:total])
        elif self._programs:
            self.program.zero_()
        self._programs = batch.programs is not None
        self.clear(total)
        if steps >= batch.fixed_after:
            self._placed = batch
        if batch.runs is None:
            self._clear_runs()
        else:
            self._latches = True
            self.runs[0, :total] = batch.runs
            self.runs[1, :total] = positions[:total] % self.depth + 1
        if batch.focus is None:
            self._clear_focus()
            return
        self.focuses = True
        torch.index_select(batch.focus, 0, segment, out=self.focus[:total])
        self.requests[:total] = batch.base >> _SHIFT
        self.positions[:total] = positions[:total]

    def _uploaded(self, req_ids: list[str], num_tokens: np.ndarray) -> _Uploaded:
        batch = self._batch
        # While nothing but positions changes, as in steady decoding, nothing is sent.
        if batch is not None and batch[0] == req_ids and np.array_equal(batch[1], num_tokens):
            return batch[2]
        self._end_batch()
        told = [self._requests.get(req_id, _PLAIN) for req_id in req_ids]
        requests = np.arange(len(req_ids), dtype=np.int64) << _SHIFT
        counts = [len(r.firsts) for r in told]
        programs = np.concatenate([_NOBODYS, *(r.programs for r in told)])
        focus = None
        if any(any(r.focus) for r in told):
            rows = [r.focus or [0] * n for r, n in zip(told, counts, strict=True)]
            focus = self._upload(np.concatenate([_NOBODYS, *rows]).astype(np.int32))
        missing = np.array([int(r.firsts[-1]) for r in told])
        if self._grows:
            missing -= [self._ran.get(req_id, 0) for req_id in req_ids]
        steps = float((missing.clip(0) / num_tokens).max())
        runs = self._runs(told, num_tokens)
        if focus is not None or runs is not None or (steps and not self._grows):
            steps = float("inf")
        uploaded = _Uploaded(
            self._upload(np.repeat(requests, num_tokens)),
            self._upload(np.repeat(requests, counts) + np.concatenate([r.firsts for r in told])),
            self._upload(np.concatenate([_NOBODYS, *(r.table_rows for r in told)])),
            self._upload(programs) if programs.any() else None,
            focus,
            runs,
            steps,
        )
        self._batch = (list(req_ids), num_tokens.copy(), uploaded)
        return uploaded

    def _runs(self, told: list[WorkerRequest], num_tokens: np.ndarray) -> torch.Tensor | None:
        if not any(request.latches for request in told):
            return None
        runs = np.zeros(num_tokens.sum(), np.int32)
        ends = np.cumsum(num_tokens).tolist()
        for request, count, end in zip(told, num_tokens.tolist(), ends, strict=True):
            if request.latches:
                runs[end - count : end] = -1
                runs[end - count : end - count + 1] = count
        return self._upload(runs)

    def _end_batch(self) -> None:
        """Forget the batch on the device, as another follows."""
        if self._batch is not None:
            req_ids, num_tokens, _ = self._batch
            for req_id, ran in zip(req_ids, (num_tokens * self._steps).tolist(), strict=True):
                if req_id in self._requests:
                    self._ran[req_id] = self._ran.get(req_id, 0) + ran
        self._batch, self._steps = None, 0

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, self.slots.device)

    def clear(self, total: int) -> None:
        """Give tokens from `total` on no row: graphs replay with more tokens than the step has."""
        self._placed = None
        if self._mapped > total:
            self.slots[total : self._mapped].zero_()
            self.program[total : self._mapped].zero_()
            self.runs[:, total : self._mapped].zero_()
            self.focus[total : self._mapped].zero_()
        self._mapped = total

    def _clear_focus(self) -> None:
        if self.focuses:
            self.focus.zero_()
        self.focuses = False

    def _clear_runs(self) -> None:
        if self._latches:
            self.runs.zero_()
        self._latches = False

    def forget(self) -> None:
        """Zero all that is on the device: its memory was lost."""
        self.slots.zero_()
        self.program.zero_()
        self.runs.zero_()
        self.focus.zero_()
        self._end_batch()
        self._mapped, self._programs, self._placed = 0, False, None

    def load_kernels(self) -> None:
        """Map steps of nobody: CUDA loads a kernel when it first runs, and requests would wait."""
        every = np.ones(1, np.int32)
        self.update(set(), {"": WorkerRequest(np.zeros(1, np.int64), every, every, (), (1,), True)})
        for tokens in (1, 17):  # torch gathers more than 16 by another kernel
            tokens = min(tokens, len(self.slots))
            self.map([""], np.array([tokens]), torch.zeros_like(self.positions))
        self.update({""}, {})
        self.forget()

    def probe(self, table_row: int) -> None:
        """Give the first token a row, until `clear`."""
        self.slots[0] = table_row
        self._mapped = 1

    def probe_focus(self, program: int, position: int) -> None:
        """Focus the first token, which is the first request's, until `clear`."""
        self.focus[0], self.requests[0], self.positions[0] = program, 0, position
        self._mapped = 1
