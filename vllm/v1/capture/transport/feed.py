# SPDX-License-Identifier: Apache-2.0
"""A feed picks the rows of a completion that one consumer gets, as they come."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.capture.consumer import RequestEnd, RequestInfo, RowBatch
from vllm.v1.capture.copies import Copies, CopyThreads, empty
from vllm.v1.capture.results import NO_TOKEN
from vllm.v1.capture.transport.host import ConsumerHost
from vllm.v1.capture.transport.mean import RunningMean
from vllm.v1.capture.transport.selected import RowsLost, Selected
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, dtype_of
from vllm.v1.interventions.positions import Positions


def prompt_tokens(
    token_ids: list[int] | None, embeds: torch.Tensor | None, is_token: list[bool] | None
) -> list[int]:
    """Return the tokens of a prompt, `NO_TOKEN` where it has an embedding.

    Args:
        token_ids: None if all of it was given as embeddings.
        embeds: [tokens, hidden]; None if none of it was.
        is_token: which positions are tokens, where some are; None for all, or none.
    """
    if embeds is None:
        assert token_ids is not None
        return token_ids
    if token_ids is None or is_token is None:
        return [NO_TOKEN] * len(embeds)
    return [t if known else NO_TOKEN for t, known in zip(token_ids, is_token, strict=True)]


def request_info(
    request_id: str, plan: CapturePlan, consumer: str, prompt_token_ids: list[int]
) -> RequestInfo:
    """Describe a completion for the session of one of its consumers."""
    selection = plan.consumers[consumer]
    stream = plan.streams[selection.streams[0]]
    making = selection.making
    return RequestInfo(
        request_id=request_id,
        external_id=plan.external_id,
        sample=plan.sample,
        num_samples=plan.num_samples,
        prompt=plan.prompt,
        prompt_token_ids=prompt_token_ids,
        sites=tuple(map(making.named, selection.sites)),
        width=stream.width,
        dtype=dtype_of(stream.dtype),
        projected=making.projected,
        max_rows=1 if making.adds_up else Selected(selection, len(prompt_token_ids)).max_rows,
        fields=selection.fields,
        heads=tuple(selection.heads.get(s, ()) for s in selection.sites) if selection.heads else (),
        reduce="mean" if making.adds_up else "",
        made=making if making.fields else None,
    )


def reserved_bytes(info: RequestInfo, plan: CapturePlan, consumer: str, hold: bool) -> int:
    """Return the most bytes of rows that may wait for a consumer, with those that are held back.

    Args:
        hold: as for `Feed`.
    """
    selection = plan.consumers[consumer]
    if not (hold and selection.last_generated):
        return info.max_bytes
    return info.max_bytes // info.max_rows * len(Positions.from_flat(selection.runs))


class Delivery(NamedTuple):
    """A batch for a consumer, whose values may still be filled."""

    batch: RowBatch
    copies: list[Future[None]]
    """The copies that fill its values."""


class Feed:
    """Picks one consumer's rows of one completion.

    Each selected row is delivered once, in order, and none past the end of the final sequence.

    Args:
        threads: copy large rows; the caller does not wait for them.
        hold: keep rows of generated positions back until the end, because it may turn out to lie
            before them (stop strings are found by the frontend, after the engine sampled on).
    """

    def __init__(
        self,
        plan: CapturePlan,
        consumer: str,
        prompt_token_ids: list[int],
        threads: CopyThreads,
        *,
        hold: bool = False,
    ) -> None:
        selection = plan.consumers[consumer]
        [self._stream] = selection.streams
        stream = plan.streams[self._stream]
        order = stream.sites
        self._mean = RunningMean(stream) if stream.making.adds_up else None
        self._prompt = prompt_token_ids
        self._threads = threads
        self._selected = Selected(selection, len(prompt_token_ids))
        self._sites = torch.tensor([order.index(site) for site in selection.sites])
        self._all_sites = tuple(selection.sites) == order
        self._hold = hold
        self._held: list[RowBatch] = []
        self._last: list[RowBatch] = []
        self._arrived: list[np.ndarray] = []

    def deliver(self, chunk: CapturedChunk, output_token_ids: Sequence[int]) -> Delivery | None:
        """Return the new rows that the consumer can have now; None if there are none.

        Args:
            chunk: the rows of one step.
            output_token_ids: the generated tokens so far, at least to one past the last row.
        """
        if self._mean is not None:
            summed = chunk.positions if chunk.summed is None else chunk.summed
            self._mean.add(summed, chunk.stream(self._stream)[0], chunk.version)
            return None
        num_rows = self._selected.num_rows(len(self._prompt) + len(output_token_ids))
        positions = chunk.positions
        if self._selected.selection.last_generated:
            # Kept until it is known which one is the last; all of them if that may be an earlier.
            last = np.flatnonzero((positions < num_rows) & (positions >= len(self._prompt)))
            if len(last):
                kept = self._keep(chunk, last if self._hold else last[-1:], output_token_ids)
                self._last = [*(self._last if self._hold else ()), kept]
        at = np.flatnonzero(self._selected.mask(positions, num_rows))
        if not len(at):
            return None
        self._arrived.append(positions[at])
        if self._hold:
            generated = positions[at] >= len(self._prompt)
            if generated.any():
                self._held.append(self._keep(chunk, at[generated], output_token_ids))
                at = at[~generated]
        if not len(at):
            return None
        batch, copies = self._batch(chunk, at, output_token_ids)
        return Delivery(batch, self._threads.follow(copies))

    def end(self, num_tokens: int, aborted: bool) -> tuple[list[RowBatch], str | None]:
        """End the completion.

        Args:
            num_tokens: its prompt and generated tokens.

        Returns:
            The rows that were held back, and why rows that were asked for are absent (None if all
            are there).

        Raises:
            RowsLost: rows are absent that should be there.
        """
        num_rows = self._selected.num_rows(num_tokens)
        if self._mean is not None:
            return self._mean_of_all(self._mean, num_rows, aborted)
        rest = [_cut(batch, batch.positions < num_rows) for batch in self._held]
        for batch in self._last:
            rest.append(_cut(batch, self._selected.last(num_rows).mask(batch.positions)))
            self._arrived.append(rest[-1].positions)
        error = self._selected.missing(num_rows, self._arrived, aborted)
        return [batch for batch in rest if len(batch.positions)], error

    def _mean_of_all(
        self, mean: RunningMean, num_rows: int, aborted: bool
    ) -> tuple[list[RowBatch], str | None]:
        error = self._selected.missing(num_rows, [mean.positions], aborted)
        if (value := mean.value()) is None:
            return [], error
        at = mean.positions[-1:]
        ids = np.array([self._prompt[at[0]]], dtype=np.int64)
        return [RowBatch(at, ids, np.array([mean.version]), value[self._sites, None])], error

    def finish(
        self, host: ConsumerHost, request_id: str, num_tokens: int, aborted: bool, failed: str
    ) -> None:
        """End the completion, and hand what is left to the consumer's host.

        Args:
            failed: why the request failed; "" if it did not.
        """
        if failed:
            host.fail(request_id, failed)
            return
        try:
            rest, error = self.end(num_tokens, aborted)
        except RowsLost as lost:
            host.fail(request_id, str(lost))
            return
        for batch in rest:
            host.rows(request_id, batch)
        host.end(request_id, RequestEnd(num_tokens, error), aborted)

    def _keep(
        self, chunk: CapturedChunk, at: np.ndarray, output_token_ids: Sequence[int]
    ) -> RowBatch:
        """Copy rows `at` of a chunk now, to be kept until the end."""
        batch, copies = self._batch(chunk, at, output_token_ids)
        self._threads.run(copies)
        return batch

    def _batch(
        self, chunk: CapturedChunk, at: np.ndarray, output_token_ids: Sequence[int]
    ) -> tuple[RowBatch, Copies]:
        """Make a batch for rows `at` of a chunk, and the copies that fill its values: those of each
        sender."""
        positions = chunk.positions[at]
        parts = chunk.parts(self._stream)
        into = empty((len(self._sites), len(at), parts[0].shape[2]), parts[0].dtype)
        rows, places, first = [], [], 0
        for values in parts:
            stop = first + values.shape[1]
            if not self._all_sites:
                own = self._sites[(self._sites >= first) & (self._sites < stop)]
                values = values[:, own - first]
            if len(at) < len(chunk.positions):
                values = values[torch.from_numpy(at)]
            rows.append(values.transpose(0, 1))
            places.append(values.shape[1])
            first = stop
        known = len(self._prompt)
        ids = [self._prompt[p] if p < known else output_token_ids[p - known] for p in positions]
        versions = np.full(len(at), chunk.version, dtype=np.int64)
        batch = RowBatch(positions, np.array(ids, dtype=np.int64), versions, into)
        return batch, (list(into.split(places)), rows)


def _cut(batch: RowBatch, keep: np.ndarray) -> RowBatch:
    """Return the rows of a batch where bool [n] `keep` is true."""
    if keep.all():
        return batch
    return RowBatch(
        batch.positions[keep],
        batch.token_ids[keep],
        batch.versions[keep],
        batch.values[:, torch.from_numpy(keep)],
    )
