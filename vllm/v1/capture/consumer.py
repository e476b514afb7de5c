# SPDX-License-Identifier: Apache-2.0
"""What a capture consumer is: a class that gets the rows of requests and returns a result for each.

A consumer is found by name (entry-point group `vllm.capture_consumers`) or given as an instance to
`LLM(capture_consumers=[...])`. `vllm.v1.capture.transport.host` runs it: in threads of its own,
each session by one thread at a time, so a slow consumer delays nothing but the last output of its
own requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch

from vllm.v1.interventions.errors import reject, show_key
from vllm.v1.interventions.plan import Site, TapShape

Location = Literal["engine", "frontend"]
"""The process a consumer runs in. "engine": the engine core, which rows reach without leaving their
process where there is one GPU; results must be plain data. "frontend": the process that holds the
`LLM` or serves HTTP; rows are relayed to it."""


@dataclass(frozen=True)
class ConsumerContext:
    """Where a consumer runs."""

    name: str
    """How requests name it, and results report it."""
    model: str
    """Name or path of the model."""
    shape: TapShape
    engine_index: int
    """Of the data-parallel engine it runs beside; 0 in a frontend."""


@dataclass(frozen=True)
class RequestInfo:
    """One completion that captures for this consumer."""

    request_id: str
    """The engine's own: unique, also among the completions of a request."""
    external_id: str
    """As the caller knows it; may be chosen by a client, so no path may be made of it as it is."""
    sample: int
    num_samples: int
    prompt_token_ids: list[int]
    sites: tuple[Site, ...]
    """In layer order; the first axis of `RowBatch.values`."""
    width: int
    """hidden_size; with `project` the number of its rows."""
    dtype: torch.dtype
    """Of the values: the model's; with `project` float32."""
    projected: bool
    max_rows: int
    """Most rows a site can come to."""
    fields: Mapping[str, Any]
    """What `CaptureConsumer.check_request` made of the request's own fields."""
    prompt: int | None = None
    """Which of the prompts that were sent with the same parameters; None if there was one."""

    @property
    def max_bytes(self) -> int:
        return len(self.sites) * self.max_rows * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class RowBatch:
    """Rows of one completion. Batches come in position order, each selected position once."""

    positions: np.ndarray
    """int64 [n]."""
    token_ids: np.ndarray
    """int64 [n]: the token each row has read."""
    versions: np.ndarray
    """int64 [n], of the global steering each row ran under."""
    values: torch.Tensor
    """[sites, n, width] on the CPU; the consumer's own to keep, not to change."""


@dataclass(frozen=True)
class RequestEnd:
    """All rows have been handed over."""

    num_tokens: int
    """Prompt and generated tokens of the final sequence."""
    error: str | None = None
    """Why rows the request asked for are absent: it stopped before them, or was aborted."""


class CaptureSession(ABC):
    """One completion's rows. Methods are called in order, by one thread at a time.

    What a method raises ends the session as an error with that text; `failed` follows.
    """

    @abstractmethod
    def rows(self, batch: RowBatch) -> None:
        """Take rows."""

    @abstractmethod
    def done(self, end: RequestEnd) -> Any:
        """The completion is over: make the result.

        Returns:
            The payload of the `CaptureResult`, or a `Future` of it. The result is reported when it
            is there, so whatever it promises must be durable by then.
        """

    def aborted(self, end: RequestEnd) -> Any:
        """In place of `done` when the request was cut off by its caller."""
        return self.done(end)

    def failed(self, reason: str) -> None:  # noqa: B027
        """Nothing of this session will be reported: drop what was made of it."""


class CaptureConsumer(ABC):
    """Makes sessions. Its constructor takes the options of its spec (`name:key=value`) as keywords;
    their values are strings where they come from a command line."""

    location: ClassVar[Location] = "frontend"

    capture: Mapping[str, Any] | None = None
    """What to capture of every request that does not name this consumer: a capture request, such as
    `{"hooks": {"post_block": "all"}, "positions": "last_prompt"}`. None: nothing."""

    @classmethod
    def check_request(cls, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Check the fields of a capture request beside `hooks`, `positions` and `project`.

        Called in the frontend, before the request starts; pure.

        Returns:
            Plain data, `RequestInfo.fields`.

        Raises:
            ValueError: by `vllm.v1.interventions.errors.reject`, naming the field below `path`.
        """
        if fields:
            unknown = sorted(show_key(key) for key in fields)[:8]
            reject(path, f"unknown keys {unknown}, allowed are 'hooks', 'positions' and 'project'")
        return {}

    def start(self, context: ConsumerContext) -> None:  # noqa: B027
        """Called once, before the first session."""

    @abstractmethod
    def open(self, request: RequestInfo) -> CaptureSession:
        """A completion starts. Called in a thread of the consumer."""

    def shutdown(self) -> None:  # noqa: B027
        """Called once, after the last session: write what is left."""


class ConsumerResult(msgspec.Struct, frozen=True):
    """The result of one consumer for one completion, on its way to the frontend."""

    consumer: str
    status: Literal["ok", "partial_error", "error"]
    error: str | None = None
    payload: Any = None
    rows: int = 0
    """Rows taken, over all sites."""
    num_bytes: int = 0
    seconds: float = 0.0
    """From the completion's end to its result."""
    dropped: bool = False
    """The consumer had no room for the request (overload policy "drop"): sent when it starts."""
