# SPDX-License-Identifier: Apache-2.0
"""Runs a data set through an engine, and hands out what was captured in the order of the data."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.pilot.dataset.examples import Example
from vllm.pilot.records import DatasetError
from vllm.v1.capture.file_format import tensor_name
from vllm.v1.engine.exceptions import EngineDeadError

IN_FLIGHT = 1024
"""The most examples that the engine has at a time."""


@dataclass(frozen=True)
class Captured:
    """The captured rows of one example, and the text that the model generated after it."""

    example: Example
    positions: np.ndarray
    """int64 [n]."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]."""
    values: Mapping[str, torch.Tensor]
    """The rows of each site, `post_block.12`: [n, width]."""
    num_prompt_tokens: int
    num_generated: int
    text: str
    error: str | None
    """Reason why rows are absent; None if all are there."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows, with their positions, tokens and examples."""
        return sum(v.nbytes for v in self.values.values()) + 3 * self.positions.nbytes


class CaptureRun:
    """Sends examples to an engine with `capture_consumers=["inline"]`.

    Args:
        capture: the request: `hooks`, `positions`, and what else `inline` takes.
        max_tokens: how many tokens are generated, greedily.
        skip_refused: go on when the engine refuses an example; its `error` says why.
        buffer_bytes: how many bytes of rows may wait for an earlier example to end.
    """

    def __init__(
        self,
        llm: LLM,
        capture: Mapping[str, Any],
        max_tokens: int,
        skip_refused: bool,
        buffer_bytes: int,
    ) -> None:
        self._llm = llm
        self._params = SamplingParams(
            temperature=0, max_tokens=max_tokens, capture={"inline": dict(capture)}
        )
        self._skip_refused = skip_refused
        self._buffer_bytes = buffer_bytes
        self._pending: dict[str, tuple[Example, str]] = {}
        """The example, and the request's whole id, by the engine's number of the request."""
        self._done: dict[int, Captured] = {}
        self._done_bytes = 0

    def __call__(self, examples: Iterable[Example]) -> Iterator[Captured]:
        """Run the examples, and yield what was captured in their order.

        Raises:
            DatasetError: the engine refuses an example, or its capture failed; it names the
                example's place.
        """
        order: list[int] = []
        at = 0
        source = iter(examples)
        more = True
        try:
            while more or at < len(order):
                while more and self._has_room():
                    if (example := next(source, None)) is None:
                        more = False
                    else:
                        order.append(example.number)
                        self._send(example)
                if self._pending:
                    for output in self._llm.llm_engine.step():
                        if isinstance(output, RequestOutput) and output.finished:
                            self._receive(output)
                while at < len(order) and order[at] in self._done:
                    captured = self._done.pop(order[at])
                    self._done_bytes -= captured.num_bytes
                    at += 1
                    yield captured
                if at > IN_FLIGHT:
                    del order[:at]
                    at = 0
        finally:
            if self._pending:
                ids = [request_id for _, request_id in self._pending.values()]
                with contextlib.suppress(EngineDeadError):
                    self._llm.llm_engine.abort_request(ids, internal=True)
                self._pending.clear()
            self._done.clear()
            self._done_bytes = 0

    def _has_room(self) -> bool:
        # What waits are the ends of long examples' successors: without a bound one that generates
        # for minutes would gather all rows behind it.
        waiting = len(self._pending) + len(self._done)
        return waiting < IN_FLIGHT and self._done_bytes < self._buffer_bytes

    def _send(self, example: Example) -> None:
        prompt = example.prompt
        try:
            if isinstance(prompt, list) and isinstance(prompt[0], dict):
                chat: Any = [prompt]
                (request_id,) = self._llm.enqueue_chat(chat, self._params, use_tqdm=False)
            else:
                text: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                (request_id,) = self._llm.enqueue([text], self._params, use_tqdm=False)
        except (ValueError, VLLMValidationError) as error:
            if not self._skip_refused:
                raise DatasetError(
                    f"{example.place}: the engine refuses it: {error}; shorten or remove it, or "
                    "have such examples skipped (--skip-refused)"
                ) from error
            empty = np.zeros(0, np.int64)
            self._done[example.number] = Captured(
                example, empty, empty, {}, 0, 0, "", f"refused: {error}"
            )
            return
        # The requests of an `LLM` are numbered; the engine puts something random behind.
        self._pending[request_id.partition("-")[0]] = example, request_id

    def _receive(self, output: RequestOutput) -> None:
        example, _ = self._pending.pop(output.request_id)
        result = (output.capture_results or {}).get("inline")
        if result is None or result.status == "error":
            reason = result.error if result is not None else "no capture"
            raise DatasetError(f"{example.place}: its capture failed: {reason}")
        rows = result.payload
        first = next(iter(rows.values()))
        captured = Captured(
            example,
            first.positions,
            first.token_ids,
            {tensor_name(site): site_rows.values for site, site_rows in rows.items()},
            len(output.prompt_token_ids or ()),
            len(output.outputs[0].token_ids),
            output.outputs[0].text,
            result.error,
        )
        self._done[example.number] = captured
        self._done_bytes += captured.num_bytes
