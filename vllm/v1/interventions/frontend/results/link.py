# SPDX-License-Identifier: Apache-2.0
"""Link of a frontend to the engine core's captures, and of threads that give it their results."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.consumer import ConsumerResult
from vllm.v1.capture.transport.landing import Places
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
)
from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, SyncMPClient
from vllm.v1.interventions.calls import CaptureCall

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import EngineCoreClient


class CaptureLink(ABC):
    """A frontend's way to the engine core, and into the stream of outputs that come from there.

    Neither `send` nor `post` waits for anything.
    """

    def opened(self) -> None:  # noqa: B027
        """Note that a request with consumers came; called where its outputs will be awaited."""

    @property
    @abstractmethod
    def places(self) -> list[Places]:
        """Places where rows from the engine core lie: those of steps, but for an engine core in
        this process that has had no rows, and those that are kept, if any are."""

    @abstractmethod
    def send(self, call: CaptureCall) -> None:
        """Tell the engine core, after all that was sent to it before."""

    @abstractmethod
    def add(self, request: EngineCoreRequest, wanted: Callable[[], bool]) -> None:
        """Send a request, unless it is no longer wanted when it is its turn: then it was aborted,
        and the engine was told so before it would have had it."""

    @abstractmethod
    def _put(self, outputs: EngineCoreOutputs) -> None:
        """Put outputs among those that come from the engine core; from any thread."""

    def post(self, request_id: str, result: ConsumerResult) -> None:
        """Report the result of a consumer of this process; from any thread."""
        output = EngineCoreOutput(request_id, [], capture_results=[result])
        self._put(EngineCoreOutputs(outputs=[output]))


class _InprocLink(CaptureLink):
    """Link to an engine core in this process."""

    def __init__(self, client: InprocClient) -> None:
        self._client = client

    def send(self, call: CaptureCall) -> None:
        self._client.engine_core.capture(call)

    def add(self, request: EngineCoreRequest, wanted: Callable[[], bool]) -> None:
        self._client.add_request(request)

    @property
    def places(self) -> list[Places]:
        scheduler: Any = self._client.engine_core.scheduler
        return scheduler.interventions.relay.encoder.places

    def _put(self, outputs: EngineCoreOutputs) -> None:
        scheduler: Any = self._client.engine_core.scheduler
        scheduler.interventions.captures.results.put((0, outputs))


class _SyncLink(CaptureLink):
    """Link of an `LLM` to an engine core in a process of its own."""

    def __init__(self, client: SyncMPClient) -> None:
        self._client = client

    @property
    def places(self) -> list[Places]:
        return self._client.row_places.places

    def send(self, call: CaptureCall) -> None:
        # A utility call whose answer nobody waits for.
        call_id = uuid.uuid1().int >> 64
        self._client.utility_results[call_id] = Future()
        message = (0, call_id, "capture", (call,))
        self._client._send_input(EngineCoreRequestType.UTILITY, message)

    def add(self, request: EngineCoreRequest, wanted: Callable[[], bool]) -> None:
        self._client.add_request(request)

    def _put(self, outputs: EngineCoreOutputs) -> None:
        self._client.outputs_queue.put_nowait(outputs)


class _AsyncLink(CaptureLink):
    """Link of an `AsyncLLM`."""

    def __init__(self, client: AsyncMPClient) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def places(self) -> list[Places]:
        return self._client.row_places.places

    def opened(self) -> None:
        self._loop = asyncio.get_running_loop()

    def send(self, call: CaptureCall) -> None:
        self._start(self._client.call_utility_all_async("capture", call))

    def add(self, request: EngineCoreRequest, wanted: Callable[[], bool]) -> None:
        async def send() -> None:
            if wanted():
                await self._client.add_request_async(request)

        self._start(send())

    def _start(self, sending: Coroutine[object, object, object]) -> None:
        task = asyncio.ensure_future(sending)
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # an engine that is gone is reported to all requests elsewhere

    def _put(self, outputs: EngineCoreOutputs) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._client.outputs_queue.put_nowait, outputs)


def capture_link(client: "EngineCoreClient") -> CaptureLink:
    """Make the link that fits a frontend's client."""
    if isinstance(client, InprocClient):
        return _InprocLink(client)
    if isinstance(client, SyncMPClient):
        return _SyncLink(client)
    assert isinstance(client, AsyncMPClient)
    return _AsyncLink(client)
