# SPDX-License-Identifier: Apache-2.0
"""From requests' segments to what each token of a step gets: its table row and its program."""

import numpy as np
import torch

from vllm.v1.interventions.messages import WorkerRequest

_SHIFT = 40
"""Bits of a position: (request << _SHIFT) + position is one number, so one sorted search serves a
whole batch."""

_PLAIN = (np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros(1, np.int32))


class TokenMap:
    """The rows of this step's tokens, on the device.

    The row follows from the token's *true* position, which only the device knows in time: the
    host's is optimistic under speculation and asynchronous scheduling.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The table row of each token; 0 for padding and plain tokens."""
        self.program = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        """The program of each token; 0 for no ops."""
        self._requests: dict[str, WorkerRequest] = {}
        self._mapped = 0
        self._batch: tuple[list[str], np.ndarray, list[torch.Tensor]] | None = None

    def update(self, finished: set[str], admitted: dict[str, WorkerRequest]) -> None:
        """Forget requests that ended, and keep those admitted ones that are steered."""
        for req_id in finished:
            self._requests.pop(req_id, None)
        for req_id, request in admitted.items():
            self._batch = None
            if request.table_rows.any() or request.programs.any():
                self._requests[req_id] = request
            else:
                self._requests.pop(req_id, None)

    def steers(self, req_ids: list[str]) -> bool:
        """Whether any of these requests is steered at any position."""
        return not self._requests.keys().isdisjoint(req_ids)

    def map(self, req_ids: list[str], num_tokens: np.ndarray, positions: torch.Tensor) -> None:
        """Set `slots` and `program` for a batch.

        Args:
            req_ids: in batch order.
            num_tokens: int [len(req_ids)], scheduled tokens of each.
            positions: int [>= total tokens] on the device.
        """
        if not self.steers(req_ids):
            self.clear(0)
            return
        base, keys, table_rows, programs = self._uploaded(req_ids, num_tokens)
        total = len(base)
        segment = torch.searchsorted(keys, base + positions[:total], right=True) - 1
        self.slots[:total] = table_rows[segment]
        self.program[:total] = programs[segment]
        self.clear(total)

    def _uploaded(self, req_ids: list[str], num_tokens: np.ndarray) -> list[torch.Tensor]:
        """The batch on the device: request << _SHIFT of each token; of each segment (request <<
        _SHIFT) + first position, table row and program."""
        batch = self._batch
        # While nothing but positions changes, as in steady decoding, nothing is sent.
        if batch is not None and batch[0] == req_ids and np.array_equal(batch[1], num_tokens):
            return batch[2]
        segments = [
            (r.firsts, r.table_rows, r.programs)
            if (r := self._requests.get(req_id)) is not None
            else _PLAIN
            for req_id in req_ids
        ]
        requests = np.arange(len(req_ids), dtype=np.int64) << _SHIFT
        counts = [len(firsts) for firsts, _, _ in segments]
        arrays = [
            np.repeat(requests, num_tokens),
            np.repeat(requests, counts) + np.concatenate([s[0] for s in segments]),
            np.concatenate([s[1] for s in segments]),
            np.concatenate([s[2] for s in segments]),
        ]
        uploaded = [self._upload(array) for array in arrays]
        self._batch = (list(req_ids), num_tokens.copy(), uploaded)
        return uploaded

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.slots.device)

    def clear(self, total: int) -> None:
        """Give tokens from `total` on no row: graphs replay with more tokens than the step has."""
        if self._mapped > total:
            self.slots[total : self._mapped].zero_()
            self.program[total : self._mapped].zero_()
        self._mapped = total

    def forget(self) -> None:
        """Zero all that is on the device: its memory was lost."""
        self.slots.zero_()
        self.program.zero_()
        self._mapped, self._batch = 0, None

    def probe(self, table_row: int) -> None:
        """Give the first token a row, until `clear`."""
        self.slots[0] = table_row
        self._mapped = 1


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, in stream order."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host.clone()
    # A fresh pinned tensor each time: the previous step's copy may still be reading its own.
    return host.pin_memory().to(device, non_blocking=True)
