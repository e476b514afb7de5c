# SPDX-License-Identifier: Apache-2.0
"""The captured rows of one step on their way from the arena to their requests."""

from typing import Any

import numpy as np
import torch

from vllm.v1.interventions import CapturedChunk


class StepRows:
    """The rows of one step, for `ModelRunnerOutput`.

    On a GPU the copy to pinned memory is in flight when this object is handed on; reading or
    pickling it waits for the copy.

    Args:
        version: of the global steering that the step runs under.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._blocks: list[tuple[int, list[tuple[str, np.ndarray]], int]] = []
        self._chunks: dict[str, CapturedChunk] | None = None
        self._event: torch.cuda.Event | None = None

    def add_block(self, num_sites: int, members: list[tuple[str, np.ndarray]], row: int) -> None:
        """`members`' tokens at `num_sites` sites, arena rows from `row`: site, then token."""
        self._blocks.append((num_sites, members, row))

    def token_index(self) -> np.ndarray:
        """int [n]: this step's captured tokens, in block order."""
        return np.concatenate([t for _, members, _ in self._blocks for _, t in members])

    def take_positions(self, positions: torch.Tensor, token_index: torch.Tensor) -> None:
        self._positions = positions[token_index.long()].long()

    def take_rows(self, arena: torch.Tensor) -> None:
        num_rows = max(
            row + num_sites * sum(len(t) for _, t in members)
            for num_sites, members, row in self._blocks
        )
        if arena.is_cuda:
            # On the main stream: the next step cannot overwrite rows before they are copied.
            self._rows = arena[:num_rows].to("cpu", non_blocking=True)
            self._positions = self._positions.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._rows = arena[:num_rows].clone()

    def _resolve(self) -> dict[str, CapturedChunk]:
        if self._chunks is None:
            if self._event is not None:
                self._event.synchronize()
            self._chunks = {}
            positions = self._positions.numpy()
            seen = 0
            for num_sites, members, row in self._blocks:
                count = sum(len(tokens) for _, tokens in members)
                block = self._rows[row : row + num_sites * count]
                block = block.view(num_sites, count, -1)
                column = 0
                for req_id, tokens in members:
                    columns = slice(column, column + len(tokens))
                    at = positions[seen + columns.start : seen + columns.stop]
                    self._chunks[req_id] = CapturedChunk(at, [block[:, columns]], self._version)
                    column = columns.stop
                seen += count
        return self._chunks

    def of(self, request_id: str) -> CapturedChunk | None:
        """Views of the step's rows, good until the step's last reader has copied its own."""
        return self._resolve().get(request_id)

    def __getstate__(self) -> dict[str, Any]:
        # Copies: a slice would ship the whole step's storage.
        return {
            "_chunks": {
                req_id: CapturedChunk(
                    chunk.positions.copy(), [v.clone() for v in chunk.values], chunk.version
                )
                for req_id, chunk in self._resolve().items()
            }
        }
