# SPDX-License-Identifier: Apache-2.0
"""The consumers that run in one process, engine core or frontend, and the rows that they get."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.capture.consumer import ConsumerContext
from vllm.v1.capture.copies import CopyThreads
from vllm.v1.capture.registry import INLINE
from vllm.v1.capture.transport.feed import Feed, request_info
from vllm.v1.capture.transport.host import SHUTDOWN_SECONDS, ConsumerHost, Report
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HostedConsumers:
    """The consumers of one process.

    Args:
        threads: the name of the threads that copy rows for them.
    """

    def __init__(self, threads: str) -> None:
        self.hosts: dict[str, ConsumerHost] = {}
        """Name -> the host of a consumer that was started."""
        self.threads = CopyThreads(threads)

    def start(self, config: "VllmConfig", report: Report, *, in_frontend: bool) -> None:
        """Make and start the consumers that run here; none in an engine without taps.

        Args:
            in_frontend: whether this process is a frontend, or else an engine core.

        Raises:
            ValueError: a consumer cannot be made.
        """
        shape = config.tap_shape
        index = 0 if in_frontend else config.parallel_config.data_parallel_index
        for name, spec in config.capture_config.consumers.items():
            if shape is not None and name != INLINE and spec.in_frontend == in_frontend:
                consumer = spec.make()
                consumer.start(ConsumerContext(name, config.model_config.model, shape, index))
                self.hosts[name] = ConsumerHost(spec, consumer, report)

    def shutdown(self) -> None:
        """Let the consumers finish what they have, and write what is left."""
        for host in self.hosts.values():
            host.shutdown(SHUTDOWN_SECONDS)


class Feeds:
    """Rows of one completion on their way to the consumers of this process; true while there are
    consumers that get some.

    A session is opened when it gets something for the first time, or by `open`.
    """

    def __init__(
        self,
        hosted: HostedConsumers,
        request_id: str,
        plan: CapturePlan,
        prompt: list[int],
        hold: bool = False,
    ) -> None:
        """Feed the consumers of the plan that run here.

        Args:
            prompt: its tokens, `NO_TOKEN` for embeddings.
            hold: as for `Feed`.
        """
        self._hosts, self._request_id, self._plan = hosted.hosts, request_id, plan
        self._prompt = prompt
        self._feeds = {
            name: Feed(plan, name, prompt, hosted.threads, hold=hold)
            for name in plan.consumers
            if name in hosted.hosts
        }
        self._open: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def open(self, consumer: str) -> ConsumerHost:
        """Return a consumer's host, in which it has a session for this completion."""
        host = self._hosts[consumer]
        if consumer not in self._open:
            self._open.add(consumer)
            host.open(request_info(self._request_id, self._plan, consumer, self._prompt))
        return host

    def drop(self, consumer: str) -> None:
        """Give a consumer nothing, not even the end; no session of it may be open."""
        self._feeds.pop(consumer, None)

    def deliver(self, chunk: CapturedChunk, output_token_ids: Sequence[int]) -> None:
        """Give each consumer the rows of a step that it can have now; the arguments are those of
        `Feed.deliver`."""
        for name, feed in self._feeds.items():
            delivery = feed.deliver(chunk, output_token_ids)
            if delivery is not None:
                self.open(name).rows(self._request_id, *delivery)

    def finish(self, num_tokens: int, aborted: bool, failed: str) -> None:
        """End the completion for all consumers, once; the arguments are those of `Feed.finish`."""
        feeds, self._feeds = self._feeds, {}
        for name, feed in feeds.items():
            feed.finish(self.open(name), self._request_id, num_tokens, aborted, failed)
