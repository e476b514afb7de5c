# SPDX-License-Identifier: Apache-2.0
"""The consumers an engine is started with: from `capture_consumers` to `ConsumerSpec`s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.capture.consumer import CaptureConsumer

INLINE = "inline"
"""Returns rows with the request's output. It has no class, as it needs no session."""


@dataclass(frozen=True)
class HostLimits:
    """Options every consumer has; its host keeps to them."""

    pending_bytes: int = 2 << 30
    """Most bytes of rows that may wait for the consumer, over all requests. A request reserves what
    it can come to when it starts, and gives it back with its result."""
    max_request_bytes: int = 1 << 30
    """Most bytes of rows of one completion."""
    timeout: float = 60.0
    """Seconds from a completion's end to its result before that is an error."""
    threads: int = 4


@dataclass(frozen=True)
class ConsumerSpec:
    """One consumer of an engine."""

    name: str
    """How requests name it."""
    cls: type[CaptureConsumer] | None = None
    """None for `inline`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the constructor."""
    instance: CaptureConsumer | None = None
    """Made by the user; always runs in the frontend."""
    capture: Mapping[str, Any] | None = None
    """What to capture of every request that does not name the consumer."""
    limits: HostLimits = HostLimits()

    @property
    def in_frontend(self) -> bool:
        return self.cls is None or self.instance is not None or self.cls.location == "frontend"


def parse_consumers(values: Sequence[Any]) -> dict[str, ConsumerSpec]:
    """name -> spec, in the order given.

    Raises:
        ValueError: unknown consumer, two of one name.
    """
    specs: dict[str, ConsumerSpec] = {}
    for value in values:
        if value != INLINE:
            raise ValueError(f"capture_consumers: unknown {value!r}, known are {(INLINE,)}")
        if value in specs:
            raise ValueError(f"capture_consumers: {list(values)} names one twice")
        specs[value] = ConsumerSpec(value)
    return specs
