# SPDX-License-Identifier: Apache-2.0
"""A capture consumer is a class that gets the rows of requests and returns a result for each.

A consumer is found by name (entry-point group `vllm.capture_consumers`) or given as an instance to
`LLM(capture_consumers=[...])`. `vllm.v1.capture.transport.host` runs it: in threads of its own,
each session by one thread at a time, so a slow consumer delays nothing but the last output of its
own requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np
import torch

from vllm.v1.interventions.errors import refuse_unknown_keys
from vllm.v1.interventions.makings import MAKING_FIELDS, Making
from vllm.v1.interventions.plan import Site

if TYPE_CHECKING:
    from vllm.v1.interventions.shape import TapShape

SHARED_FIELDS = ("hooks", "lane", "positions", *MAKING_FIELDS)
"""Fields of a capture request that are not for one consumer alone; only `inline` takes `norms`,
`dose` and `lens`; `attention` and `features` are for `inline` and for classes that take them."""

Location = Literal["engine", "frontend"]
"""The process a consumer runs in.

"engine" is the engine core, which rows reach without leaving their process where there is one GPU;
results must be plain data. "frontend" is the process that holds the `LLM` or serves HTTP; rows are
relayed to it."""


@dataclass(frozen=True)
class ConsumerContext:
    """The engine that a consumer is started for."""

    name: str
    """The consumer's name in requests and results."""
    model: str
    """The name or path of the model."""
    shape: "TapShape"
    """The model's width, dtype, and the points of its layers."""
    engine_index: int
    """The number of the data-parallel engine it runs in; 0 in a frontend."""


@dataclass(frozen=True)
class RequestInfo:
    """One completion that captures for this consumer."""

    request_id: str
    """The engine's own id: unique, also among the completions of a request."""
    external_id: str
    """The id by which the caller knows the request. A client may have chosen it, so no path may be
    made of it as it is."""
    sample: int
    """The number of the completion among `num_samples` of its prompt, from 0."""
    num_samples: int
    prompt_token_ids: list[int]
    sites: tuple[Site, ...]
    """The sites of the rows in layer order, which is the first axis of `RowBatch.values`."""
    width: int
    """The length of a row: hidden_size, with `project` the number of scores, or of all heads chosen
    at a site together."""
    dtype: torch.dtype
    """The dtype of the rows: the model's, or with `project` and `reduce` float32."""
    projected: bool
    """True if the rows are scores, made by `project`."""
    max_rows: int
    """The most rows that a site can have."""
    fields: Mapping[str, Any]
    """The request's own fields, as `CaptureConsumer.check_request` returned them."""
    prompt: int | None = None
    """The number of the prompt among those sent with the same parameters; None if there was one."""
    heads: tuple[tuple[int, ...], ...] = ()
    """The numbers of the heads of each site, which lie one after the other in a row, or its
    lanes, where the stream has several; else empty."""
    reduce: str = ""
    """"mean" if a site has one row, the mean of the positions asked for, at the last of them."""
    made: Making | None = None
    """Content of the rows where the consumer `takes` such: they are float32; those of `Attention`
    have sites `("attn", layer)`."""

    @property
    def max_bytes(self) -> int:
        """The most bytes that the rows of all sites can have."""
        return len(self.sites) * self.max_rows * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class RowBatch:
    """Some rows of one completion. Batches come in position order, each selected position once."""

    positions: np.ndarray
    """The absolute positions of the rows, int64 [n]."""
    token_ids: np.ndarray
    """The token that each row has read, int64 [n]."""
    versions: np.ndarray
    """The version of the global steering that each row ran under, int64 [n]."""
    values: torch.Tensor
    """The rows, [sites, n, width] on the CPU, of `RequestInfo.dtype`. The consumer may keep but not
    change them."""


@dataclass(frozen=True)
class RequestEnd:
    """The end of a completion, after all its rows."""

    num_tokens: int
    """The number of prompt and generated tokens of the final sequence."""
    error: str | None = None
    """The reason why rows that were asked for are absent: the request stopped before them, or was
    aborted. None if all are there."""


class CaptureSession(ABC):
    """Takes one completion's rows. Methods are called in order, by one thread at a time.

    An exception of a method ends the session: its text is the error of the result, and `failed` is
    called.
    """

    @abstractmethod
    def rows(self, batch: RowBatch) -> None:
        """Take some rows."""

    @abstractmethod
    def done(self, end: RequestEnd) -> Any:
        """Make the result: the completion is over.

        Returns:
            The payload of the `CaptureResult`, or a `Future` of it. The result is reported when it
            is there, so whatever it promises must be durable by then.
        """

    def aborted(self, end: RequestEnd) -> Any:
        """Make the result, in place of `done`, of a request that its caller cut off."""
        return self.done(end)

    def failed(self, reason: str) -> None:  # noqa: B027
        """Drop what was made: the result of this session is an error, for this reason."""


class CaptureConsumer(ABC):
    """Makes a session for each completion that captures for it.

    Its constructor takes the options of its spec (`name:key=value`) as keywords. Their values are
    strings where they come from a command line.
    """

    location: ClassVar[Location] = "frontend"
    """The process it runs in."""

    takes: ClassVar[tuple[type[Making], ...]] = ()
    """Makings of several named fields that requests may ask of it, such as `Attention`."""

    transfer_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of a payload that the answer's `kv_transfer_params` gets too, where other programs look
    for them; of a request with one completion, whose payload is a mapping that has them."""

    capture: Mapping[str, Any] | None = None
    """The capture request of every request that does not name this consumer, such as
    `{"hooks": {"post_block": "all"}, "positions": "last_prompt"}`; None to capture nothing then."""

    @classmethod  # noqa: B027
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check what the constructor and `start` need: files, folders, other hosts.

        Called in the frontend before the model is loaded, so that a mistake costs no minutes.

        Args:
            options: the keywords of the constructor.

        Raises:
            Exception: they cannot work; the engine does not start, and its error has the text.
        """

    @classmethod
    def check_request(cls, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Check the fields of a capture request beside those that all consumers have.

        Called in the frontend before the request starts, so it must not change anything.

        Args:
            fields: the fields as the request gave them.
            path: where they stand in the request, for errors.

        Returns:
            Plain data, which sessions get as `RequestInfo.fields`.

        Raises:
            ValueError: a field is wrong. It is raised by `vllm.v1.interventions.errors.reject`,
                naming the field below `path`.
        """
        refuse_unknown_keys(fields, (), path, beside=SHARED_FIELDS)
        return {}

    def start(self, context: ConsumerContext) -> None:  # noqa: B027
        """Get ready. Called once, before the first session."""

    @abstractmethod
    def open(self, request: RequestInfo) -> CaptureSession:
        """Start the session of one completion. Called in a thread of the consumer."""

    def shutdown(self) -> None:  # noqa: B027
        """Write what is left. Called once, after the last session."""


class ConsumerResult(msgspec.Struct, frozen=True):
    """The result of one consumer for one completion, on its way to the frontend."""

    consumer: str
    """The consumer's name."""
    status: Literal["ok", "partial_error", "error"]
    error: str | None = None
    payload: Any = None
    rows: int = 0
    """Number of rows that it took, over all sites."""
    num_bytes: int = 0
    """The size of these rows."""
    seconds: float = 0.0
    """The time from the completion's end to its result."""
    dropped: bool = False
    """True if the consumer had no room for the request (overload policy "drop"). Such a result is
    sent when the request starts."""
