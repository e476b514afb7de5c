# SPDX-License-Identifier: Apache-2.0
"""Rows for a trainer, straight from an engine in another process that runs `feed`."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import zmq

FORMAT = "vllm-pilot-stream-2"
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
"""Name -> dtype, of values."""
RETRY_SECONDS = 5.0
"""Seconds of silence after which the trainer asks again: the engine was killed, or is busy."""
MAX_PLACE = 1 << 62

Place = tuple[int, int, int, int]
"""Place of a batch: number of its block, first example of that, rows of this to skip, number in the
block."""


class StreamError(ValueError):
    """Raised where rows cannot be streamed."""


class Batch(NamedTuple):
    """Rows of one site, shuffled."""

    values: torch.Tensor
    """[n, width], in the model's dtype."""
    examples: torch.Tensor
    """Number of each row's example in the data, int64 [n]."""
    positions: torch.Tensor
    """int64 [n]."""
    token_ids: torch.Tensor
    """The token that each row has read, int64 [n]."""


class Stream(Iterator[Batch]):
    """Batches of rows; to ask for the next one acknowledges those before. It is on its way while
    you work on the last one.

    An engine that ends is waited for. `state` says which batch is next: save it with a checkpoint
    of the trainer, and the trainer goes on there.
    """

    def __init__(self, address: str, state: Mapping[str, Any] | None, patience: float) -> None:
        need_address(address)
        self._address, self._patience = address, patience
        self._plan: str | None = None
        self._next: Place | None = None
        self._done: Place | None = None
        """Place of the last batch, which is acknowledged when the next one is wanted."""
        self._asked = False
        """True if an answer is on its way."""
        if state is not None:
            try:
                self._plan, self._next = str(state["plan"]), need_place(state["next"])
            except (KeyError, TypeError, ValueError) as error:
                raise StreamError(
                    "state: is none of a stream; give what Stream.state was, or None"
                ) from error
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def state(self) -> dict[str, Any] | None:
        """State that `stream` takes to go on behind the last batch, as plain data; None before the
        first one."""
        return None if self._next is None else {"plan": self._plan, "next": list(self._next)}

    def __next__(self) -> Batch:
        """Return the next batch, as soon as it is captured.

        Raises:
            StopIteration: all epochs are over.
            StreamError: the engine refuses `state`, or none answered for too long.
        """
        until = time.monotonic() + self._patience
        while True:
            parts = self._answer()
            said = json.loads(bytes(parts[0])) if parts else None
            if said is None and time.monotonic() > until:
                raise StreamError(
                    f"{self._address}: no engine answered for {self._patience:.0f} s; start one "
                    "that runs dataset.feed at this address"
                )
            if said is None or "wait" in said:
                until = time.monotonic() + self._patience if said else until
                continue
            if "refused" in said:
                raise StreamError(f"{self._address}: {said['refused']}; start with state=None")
            if "end" in said:
                if self._done not in (None, self._next):
                    self._done = self._next
                    continue
                self.close()
                raise StopIteration
            flat = [torch.frombuffer(part, dtype=torch.uint8) for part in parts[1:]]
            values = flat[0].view(DTYPES[said["dtype"]]).reshape(said["shape"])
            self._plan, self._done = said["plan"], need_place(said["at"])
            self._next = need_place(said["next"])
            self._ask()
            return Batch(values, *(column.view(torch.int64) for column in flat[1:]))

    def _ask(self) -> zmq.Socket[bytes]:
        """Ask for the next batch, unless it is on its way."""
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(self._address)
            self._asked = False
        if not self._asked:
            asked = {"plan": self._plan, "next": self._next, "done": self._done}
            self._socket.send(json.dumps(asked).encode())
            self._asked = True
        return self._socket

    def _answer(self) -> list[memoryview]:
        """Wait for the parts of an answer, which are not copied; nothing if there is none, and
        then the next one comes by another connection."""
        socket = self._ask()
        if socket.poll(int(RETRY_SECONDS * 1000)):
            self._asked = False
            return [part.buffer for part in socket.recv_multipart(copy=False)]
        socket.close()
        self._socket = None
        return []

    def close(self) -> None:
        """Close the connection; the engine keeps the batch that was not acknowledged."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._context.term()


def stream(address: str, state: Mapping[str, Any] | None = None, patience: float = 600.0) -> Stream:
    """Return the rows that an engine at `address` captures, batch by batch: `feed` in its process.

    Args:
        state: `Stream.state` of an earlier trainer, to go on behind it; None for the batch that was
            not acknowledged yet, which is the first one if there was no trainer before.
        patience: seconds for which an engine may be silent.

    Raises:
        StreamError: `address` or `state` is wrong.
    """
    return Stream(address, state, patience)


def need_address(address: str) -> None:
    """Raise StreamError if `address` is none that a stream has."""
    if not address.startswith(("ipc://", "tcp://")):
        raise StreamError(f"address: must be ipc:///path or tcp://host:port, got {address!r}")


def need_place(value: Any) -> Place:
    """Return the place that `value` says.

    Raises:
        ValueError: it says none.
    """
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != 4 or not all(type(n) is int and 0 <= n < MAX_PLACE for n in numbers):
        raise ValueError(f"{str(value)[:60]} is no place of a batch")
    return (numbers[0], numbers[1], numbers[2], numbers[3])
