# SPDX-License-Identifier: Apache-2.0
"""The results that a user gets back: a `CaptureResult` per consumer, `CapturedRows` per site."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch

from vllm.v1.capture.copies import joined
from vllm.v1.capture.made_rows import TokenRows
from vllm.v1.interventions.makings import AttentionRule

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

CaptureStatus = Literal["ok", "partial_error", "error"]
"""End of a capture: with all rows, without some that were asked for, or without a payload."""


@dataclass
class CaptureResult:
    """The result of one consumer for one completion."""

    status: CaptureStatus | None
    """None in an output that is not the completion's last: there is no verdict yet."""
    error: str | None
    """The reason why the status is not "ok"."""
    payload: Any
    """The consumer's own result; that of `inline` is a `SiteRows`."""


_R = TypeVar("_R")


class RowSource(ABC):
    """The rows of all sites together, from which those of each are made."""

    @abstractmethod
    def joined(self, later: Self) -> "SiteRows[Any]":
        """Return these rows and then `later`'s, which were captured next, in memory of their own.

        A slow reader has this done at each step: rows that are in memory of their own already are
        not copied again.
        """


class SiteRows(Mapping[Any, _R]):
    """Rows by site, {(point, layer): `CapturedRows`}; of attention `AttentionRows`, at the point
    "attn". A point alone is {layer: rows}.

    Args:
        sites: the keys, in order.
        make: returns the rows of one, called when they are first looked up.
        source: of rows that others may follow.
    """

    # Most results are read at a few sites: the rows of all are thousands of objects for a batch,
    # and have Python look through everything it holds for garbage.

    def __init__(
        self, sites: Iterable[Any], make: Callable[[Any], _R], source: RowSource | None = None
    ) -> None:
        self._sites = dict.fromkeys(sites)
        self._make: Callable[[Any], _R] | None = make
        self._source = source
        self._rows: dict[Any, _R] = {}
        """The rows that were made."""

    def __getitem__(self, key: Any) -> Any:
        if key not in self._sites:
            at_point = {layer: self[point, layer] for point, layer in self._sites if point == key}
            if not at_point:
                raise KeyError(f"{key!r} was not captured; keys are (point, layer): {list(self)}")
            return at_point
        make = self._make  # before the look: another thread may make the last
        if key not in self._rows:
            assert make is not None
            self._rows[key] = make(key)
            if len(self._rows) == len(self._sites):
                self._make = self._source = None  # with all that they hold
        return self._rows[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        """Return that of the mapping."""
        return repr(dict(self))

    def __getstate__(self) -> dict[str, Any]:
        return {"_sites": self._sites, "_rows": dict(self), "_make": None, "_source": None}

    def joined(self, later: "SiteRows[_R]") -> "SiteRows[_R]":
        """Return these rows and then `later`'s, at the same sites; nobody has read either."""
        assert self._source is not None and later._source is not None
        return self._source.joined(later._source)


OWN_BYTES = 1 << 20
"""The size below which what is taken out of larger rows, as `values[-1]`, is a copy."""


class _Landed(torch.Tensor):
    """A view of memory shared with other sites and requests, alone when it is saved or copied. A
    little that is taken out of it, as programs do in loops, does not keep the whole."""

    # As for torch.nn.Parameter: what is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = super().__getitem__(index)
        whole = self.untyped_storage()
        is_view = found.untyped_storage().data_ptr() == whole.data_ptr()
        return found.clone() if is_view and found.nbytes < OWN_BYTES <= whole.nbytes() else found

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def _own(self) -> torch.Tensor:
        return joined([self.as_subclass(torch.Tensor)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._own().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._own()


NO_TOKEN = -1
"""The token id of a row whose prompt has an embedding there in place of a token."""


class CapturedRows(TokenRows):
    """The rows of one site, in position order.

    Args:
        values: [n, width], or what returns them, called when they are first read.
        heads: whose rows lie one after the other in `values`.
        form: of their attention.
    """

    heads: tuple[int, ...]
    """The numbers of the heads, at q, k, v and z, or of the stream's lanes, where it has several;
    else empty."""
    form: AttentionRule | None
    """At q, how its products with keys become weights, where `LayerShape.rule` says it."""

    def __init__(
        self,
        positions: np.ndarray,
        token_ids: np.ndarray,
        values: torch.Tensor | Callable[[], torch.Tensor],
        versions: np.ndarray,
        heads: tuple[int, ...] = (),
        form: AttentionRule | None = None,
        texts: Callable[[], list[str]] | None = None,
    ) -> None:
        super().__init__(positions, token_ids, versions, texts)
        self.heads, self.form = heads, form
        self._values: torch.Tensor | Callable[[], torch.Tensor] = values
        if isinstance(values, torch.Tensor):
            self._values = self._by_head(values)

    def _by_head(self, values: torch.Tensor) -> _Landed:
        values = values.unflatten(1, (len(self.heads), -1)) if self.heads else values
        return values.as_subclass(_Landed)

    @property
    def values(self) -> torch.Tensor:
        """The rows, [n, hidden] on the CPU in the model's dtype, at q, k, v, z [n, heads, width],
        where the stream has lanes [n, lanes, hidden];
        with `project` their scores, float32 [n, k]. From a megabyte on they may be a view of
        memory that they share with other sites, and as a rule with other requests, and one that is
        kept keeps all of it: clone() what is to stay alone. Less than a megabyte that is indexed,
        as `values[-1]`, is a copy; so is what is pickled, or saved by `torch.save`."""
        if not isinstance(self._values, torch.Tensor):
            self._values = self._by_head(self._values())
        return self._values

    def __repr__(self) -> str:
        """Say how many rows these are and where, not what they hold."""
        return f"CapturedRows({len(self)} rows, positions={self.positions})"

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        """Return the values for `numpy.asarray`, as `numpy` does."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_values": self.values}

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
    outputs: "Sequence[RequestOutput | CompletionOutput] | RequestOutput | CompletionOutput",
    point: str,
    layers: int | Sequence[int] | Literal["all"] = "all",
    position: int | None = -1,
    consumer: str = "inline",
) -> torch.Tensor:
    """Put rows of outputs and layers into one tensor, as a probe is trained on.

    Args:
        outputs: the outputs of `LLM.generate`, or completions; or one of these.
        point: the point of the rows.
        layers: their layers, in the order wanted, or one; "all" are those that the first output
            has there.
        position: an absolute position, or negative: counted from the end of the rows captured
            (-1 is the last captured row); None for all rows, of which outputs must have as many.
        consumer: the consumer whose result has the rows.

    Returns:
        [outputs, layers, hidden] in the model's dtype, and with None as position
        [outputs, layers, rows, hidden]; with `project` k in place of hidden, at q, k, v and z
        [heads, width].

    Raises:
        ValueError: an output lacks the rows, or did not finish its capture.
    """
    per_output: list[torch.Tensor] = []
    if isinstance(layers, int):
        layers = [layers]
    for i, output in enumerate(outputs if isinstance(outputs, Sequence) else [outputs]):
        result = (output.capture_results or {}).get(consumer)
        if result is None or result.status == "error":
            reason = result.error if result is not None else f"no {consumer!r} capture"
            raise ValueError(f"stack: output {i} has no rows: {reason}")
        if layers == "all":
            layers = sorted(layer for at, layer in result.payload if at == point)
        rows = []
        for layer in layers:
            site = result.payload.get((point, layer))
            if not isinstance(site, CapturedRows):
                raise ValueError(f"stack: output {i} captured no {point} at layer {layer}")
            if position is None:
                rows.append(site.values)
            elif position >= 0:
                if position not in site.positions:
                    raise ValueError(
                        f"stack: output {i} did not capture position {position}, but "
                        f"{site.positions.tolist()}"
                    )
                rows.append(site.at(position))
            elif len(site) >= -position:
                rows.append(site.values[position])
            else:
                raise ValueError(f"stack: output {i} has {len(site)} rows, asked for {position}")
        if not rows:
            raise ValueError(f"stack: no layers; output {i} has {list(result.payload)}")
        per_output.append(torch.stack(rows))
        if per_output[i].shape != per_output[0].shape:
            raise ValueError(
                f"stack: output {i} has {len(rows[0])} rows, output 0 {per_output[0].shape[1]}: "
                "name a position"
            )
    if not per_output:
        raise ValueError("stack: no outputs")
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
    return CaptureResult(new.status, new.error, old.payload.joined(new.payload))


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
