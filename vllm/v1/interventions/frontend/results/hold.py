# SPDX-License-Identifier: Apache-2.0
"""Keeps a request's last outputs back until the captures that end in them are complete."""

from collections.abc import Callable
from typing import Any

from vllm.outputs import RequestOutput

Deliver = Callable[[Any], None]
"""Takes a `RequestOutput`, or an exception that ends the request."""


class OutputHold:
    """Holds outputs of one request back until the captures of the completions that end in them are
    complete.

    `RequestState.queue` is one, or upstream's queue, or None. `OutputProcessor` asks of it only
    whether it is None, and to `put`; `tests/interventions/frontend/test_results.py` reads its
    source for more.

    Args:
        deliver: where complete outputs go.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._held: list[RequestOutput] = []
        self.waits: dict[int, Callable[[], bool]] = {}
        """Index of the completion -> whether results of its capture are still to come."""
        self.transfer: dict[str, Any] = {}
        """Parameters out of results, which the last output has among its `kv_transfer_params`."""

    def put(self, output: Any) -> None:
        """Take an output, to be delivered in its time; an exception is delivered at once."""
        if isinstance(output, RequestOutput):
            self._held.append(output)
            self.release()
        else:
            self._deliver(output)

    def release(self) -> None:
        """Deliver what is complete; the request's last output after all others."""
        waiting: list[RequestOutput] = []
        for output in self._held:
            ended = [self.waits[c.index] for c in output.outputs if c.finished()]
            if any(waits() for waits in ended) or (output.finished and waiting):
                waiting.append(output)
            else:
                if output.finished and self.transfer:
                    output.kv_transfer_params = {
                        **(output.kv_transfer_params or {}),
                        **self.transfer,
                    }
                self._deliver(output)
        self._held = waiting
