# SPDX-License-Identifier: Apache-2.0
"""The results that a user gets back: a `CaptureResult` per consumer, `CapturedRows` per site."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

SHARED_BYTES = 1 << 20
"""The size from which the rows of a site are not copied when they are read."""

CaptureStatus = Literal["ok", "partial_error", "error"]
"""How a capture ended: with all rows, without some that were asked for, or without a payload."""


@dataclass
class CaptureResult:
    """The result of one consumer for one completion."""

    status: CaptureStatus
    error: str | None
    """The reason why the status is not "ok"."""
    payload: Any
    """The consumer's own result; that of `inline` is a dict (point, layer) -> `CapturedRows`."""


class CapturedRows:
    """The rows of one site, in position order.

    Args:
        values: [n, width], or what returns them, called when they are first read.
        heads: whose rows lie one after the other in `values`.
    """

    positions: np.ndarray
    """The positions of the rows, int64 [n]. A row has read its token and predicts the next."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]."""
    versions: np.ndarray
    """The version of the global steering that each row ran under, int64 [n], see `llm.steering`."""
    heads: tuple[int, ...]
    """The numbers of the heads, at q, k, v and z; empty at points of the residual stream."""

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        values: torch.Tensor | Callable[[], torch.Tensor],
        versions: np.ndarray,
        heads: tuple[int, ...] = (),
    ) -> None:
        self.positions, self.token_ids, self.versions = positions, token_ids, versions
        self.heads = heads
        self._values = self._by_head(values) if isinstance(values, torch.Tensor) else values

    def _by_head(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(1, (len(self.heads), -1)) if self.heads else values

    @property
    def values(self) -> torch.Tensor:
        """The rows, [n, hidden] on the CPU in the model's dtype, at q, k, v, z [n, heads, width];
        with `project` their scores, float32 [n, k]. From `SHARED_BYTES` on they are a view of
        memory that they share with other sites, and as a rule with other requests, and one that is
        kept, or saved by `torch.save`, is all of it: clone() what is to stay alone."""
        if not isinstance(self._values, torch.Tensor):
            values = self._by_head(self._values())
            small = values.nbytes < SHARED_BYTES
            self._values = values.clone(memory_format=torch.contiguous_format) if small else values
        return self._values

    def __repr__(self) -> str:
        """Say how many rows these are and where, not what they hold."""
        return f"CapturedRows({len(self)} rows, positions={self.positions})"

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Return the values for `numpy.asarray`, as `numpy` does."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.positions)

    def __getstate__(self) -> dict[str, Any]:
        # All sites share memory, and a pickled view is a pickle of all of it.
        own = self.values.clone(memory_format=torch.contiguous_format)
        return {**self.__dict__, "_values": own}

    def numpy(self) -> np.ndarray:
        """Return the values, of the same shape; bfloat16, which numpy lacks, becomes float32."""
        values = self.values
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def at(self, position: int) -> torch.Tensor:
        """Return the row of one absolute position, [width] or [heads, width].

        Raises:
            KeyError: that position was not captured.
        """
        found = np.flatnonzero(self.positions == position)
        if not len(found):
            raise KeyError(f"position {position} was not captured, these were: {self.positions}")
        return self.values[int(found[0])]


def stack(
    outputs: "Sequence[RequestOutput | CompletionOutput]",
    point: str,
    layers: Sequence[int],
    position: int = -1,
    consumer: str = "inline",
) -> torch.Tensor:
    """Put one row per output and layer into one tensor, as a probe is trained on.

    Args:
        outputs: the outputs of `LLM.generate`, or completions.
        point: the point of the rows.
        layers: their layers, in the order wanted.
        position: an absolute position, or negative: counted from the end of the rows captured
            (-1 is the last captured row).
        consumer: the consumer whose result has the rows.

    Returns:
        [outputs, layers, hidden] in the model's dtype; at q, k, v and z [outputs, layers, heads,
        width]; with `project` [outputs, layers, k].

    Raises:
        ValueError: an output lacks the rows, or did not finish its capture.
    """
    if not outputs or not layers:
        raise ValueError(f"stack: no {'layers' if outputs else 'outputs'}")
    per_output = []
    for i, output in enumerate(outputs):
        result = (output.capture_results or {}).get(consumer)
        if result is None or result.status == "error":
            reason = result.error if result is not None else f"no {consumer!r} capture"
            raise ValueError(f"stack: output {i} has no rows: {reason}")
        rows = []
        for layer in layers:
            site = result.payload.get((point, layer))
            if site is None:
                raise ValueError(f"stack: output {i} captured no {point} at layer {layer}")
            if position >= 0:
                if position not in site.positions:
                    raise ValueError(f"stack: output {i} did not capture position {position}")
                rows.append(site.at(position))
            elif len(site) >= -position:
                rows.append(site.values[position])
            else:
                raise ValueError(f"stack: output {i} has {len(site)} rows, asked for {position}")
        per_output.append(torch.stack(rows))
    return torch.stack(per_output)


def merged(
    old: dict[str, CaptureResult] | None, new: dict[str, CaptureResult] | None
) -> dict[str, CaptureResult] | None:
    """Join the results of two successive deltas of one completion: rows of `new` follow `old`'s."""
    if old is None or new is None:
        return new if old is None else old
    # A consumer's result comes once, with the last delta; inline rows come with each.
    return {
        name: _merged_result(old[name], result) if name in old else result
        for name, result in new.items()
    }


def _merged_result(old: CaptureResult, new: CaptureResult) -> CaptureResult:
    payload = {
        site: CapturedRows(
            np.concatenate([old.payload[site].positions, rows.positions]),
            np.concatenate([old.payload[site].token_ids, rows.token_ids]),
            torch.cat([old.payload[site].values, rows.values]).flatten(1),
            np.concatenate([old.payload[site].versions, rows.versions]),
            rows.heads,
        )
        for site, rows in new.payload.items()
    }
    return CaptureResult(new.status, new.error, payload)


def results_of_only_completion(
    outputs: "Sequence[CompletionOutput]",
) -> dict[str, CaptureResult] | None:
    """Return the results of a request's only completion, `RequestOutput.capture_results`.

    Raises:
        ValueError: there are several completions, each with results of its own.
    """
    if len(outputs) > 1:
        raise ValueError(
            f"this request has {len(outputs)} completions: use .outputs[i].capture_results"
        )
    return outputs[0].capture_results if outputs else None
