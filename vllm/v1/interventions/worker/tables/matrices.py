# SPDX-License-Identifier: Apache-2.0
"""Device side of `project`: the matrices in use, and the scores of rows under them."""

import numpy as np
import torch

from vllm.config.capture import PROJECTION_ROWS
from vllm.utils.torch_utils import async_tensor_h2d

CHUNK_BYTES = 32 << 20
"""Device memory that rows may take as float32, at a time."""


class ProjectionTable:
    """The matrices, float32 [PROJECTION_ROWS, hidden]; the scheduler says where each lies."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._rows = torch.zeros(PROJECTION_ROWS, hidden_size, device=device)
        self._chunk = max(CHUNK_BYTES // (4 * hidden_size), 1)

    def write(self, placed: list[tuple[int, bytes]]) -> None:
        """Write new matrices, see `StepInterventions.placed`."""
        for first, data in placed:
            matrix = np.frombuffer(data, dtype=np.float32).reshape(-1, self._rows.shape[1])
            async_tensor_h2d(matrix.copy(), out=self._rows[first : first + len(matrix)])

    def forget(self) -> None:
        """Zero the table: the device's memory was lost."""
        self._rows.zero_()

    def scores(self, rows: torch.Tensor, projection: tuple[int, int], out: torch.Tensor) -> None:
        """Write `rows` times the transposed matrix to `out`, computed in float32.

        Args:
            rows: [n, ..., hidden] in the model's dtype, on the device.
            projection: where the matrix lies.
            out: float32 [n, ..., k], there too.
        """
        first, size = projection
        matrix = self._rows[first : first + size].T
        number = max(self._chunk // rows.shape[1:-1].numel(), 1)
        for chunk, into in zip(rows.split(number), out.split(number), strict=True):
            into.copy_(chunk.float() @ matrix)
