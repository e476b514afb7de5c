# SPDX-License-Identifier: Apache-2.0
"""Rows of many stored requests as one table, for numpy, torch and pandas."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.v1.capture.results import CapturedRows

if TYPE_CHECKING:
    import pandas

    from vllm.v1.capture.stored_request import StoredRequest


@dataclass(frozen=True)
class Table:
    """Rows of one site. The lists and arrays have an entry for each row."""

    requests: list["StoredRequest"]
    """The request that a row is of."""
    positions: np.ndarray
    """int64 [n]."""
    token_ids: np.ndarray
    """The token that a row has read, int64 [n]."""
    values: torch.Tensor
    """The rows, [n, width], in the dtype they were captured in."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def ids(self) -> list[str]:
        """The id of each row's request, as it was given."""
        return [request.id for request in self.requests]

    def labels(self, key: str) -> np.ndarray:
        """Return what the requests' `metadata` have under a key, [n].

        Raises:
            KeyError: a request has no such key; the message names it.
        """
        for request in self.requests:
            if key not in request.metadata:
                raise KeyError(f"{request!r} has no {key!r} in its metadata")
        return np.array([request.metadata[key] for request in self.requests])

    def numpy(self) -> np.ndarray:
        """Return the rows, [n, width]; bfloat16, which numpy lacks, becomes float32, exactly."""
        values = self.values
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def pandas(self) -> "pandas.DataFrame":
        """Return a frame with a row for each: tag, id, prompt, sample, position, token_id, values
        (an array [width] each), and a column for each key of the metadata.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        facts: list[dict[str, Any]] = [
            {
                **request.metadata,
                "tag": request.tag,
                "id": request.id,
                "prompt": request.record.prompt,
                "sample": request.sample,
            }
            for request in self.requests
        ]
        frame = pandas.DataFrame(facts)
        frame["position"], frame["token_id"] = self.positions, self.token_ids
        frame["values"] = list(self.numpy())
        return frame


def read_table(
    requests: Iterable["StoredRequest"], point: str, layer: int, position: int | None = None
) -> Table:
    """Read rows of many requests.

    Args:
        requests: such as `reader.open(root)`, or some of it; the rows keep their order.
        position: one row of each request, by its position; negative counts from the last row that
            was captured. None for all rows that were captured.

    Raises:
        ValueError: there are no requests, or their rows differ in width or dtype.
        KeyError: a request did not capture the site or the position.
        CaptureFileError: a file is damaged.
    """
    of_row: list[StoredRequest] = []
    positions: list[np.ndarray] = []
    token_ids: list[np.ndarray] = []
    values: list[torch.Tensor] = []
    kinds: set[tuple[Any, ...]] = set()
    for request in requests:
        rows = request.rows(point, layer)
        chosen = slice(None) if position is None else _row(rows, position, request)
        # Copies: a system allows some ten thousand memory-mapped files.
        positions.append(rows.positions[chosen].copy())
        token_ids.append(rows.token_ids[chosen].copy())
        values.append(rows.values[chosen].clone())
        kinds.add((str(rows.values.dtype), *values[-1].shape[1:], *rows.heads))
        of_row += [request] * len(positions[-1])
    if not values:
        raise ValueError("table: no requests")
    if len(kinds) > 1:
        raise ValueError(f"table: rows are of several kinds: {sorted(kinds)}")
    return Table(of_row, np.concatenate(positions), np.concatenate(token_ids), torch.cat(values))


def _row(rows: CapturedRows, position: int, request: "StoredRequest") -> slice:
    """Return the slice with the row at a position, where a negative one counts from the last row;
    raise KeyError if there is no such row."""
    if position < 0:
        at = len(rows.positions) + position
        found = at >= 0
    else:
        at = int(np.searchsorted(rows.positions, position))
        found = at < len(rows.positions) and rows.positions[at] == position
    if not found:
        raise KeyError(f"{request!r} has no row at {position}, it has {rows.positions}")
    return slice(at, at + 1)
