# SPDX-License-Identifier: Apache-2.0
"""Engine options of activation capture."""

from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import Field

from vllm.config.utils import config

if TYPE_CHECKING:
    from vllm.v1.capture.registry import ConsumerSpec

SCHEMA = 1
"""Part of the compile-cache key: raise it when traced tap code or an op's meaning changes."""


@config
class CaptureConfig:
    """Activation capture: read rows of the residual stream, per request."""

    capture_consumers: list[str] = Field(default_factory=list)
    """Who may get rows: `inline` returns them with the request's output."""

    capture_buffer_bytes: int = Field(default=256 << 20, ge=1)
    """Device memory for the rows of one step. Prompts whose rows do not fit at once are computed
    in more, smaller steps."""

    capture_inline_max_bytes: int = Field(default=64 << 20, ge=1)
    """Most bytes of rows one request may return inline."""

    @property
    def enabled(self) -> bool:
        return bool(self.capture_consumers)

    def __post_init__(self) -> None:
        _ = self.consumers  # a wrong spec is an error at start-up

    @cached_property
    def consumers(self) -> "dict[str, ConsumerSpec]":
        """name -> spec, of `capture_consumers`."""
        from vllm.v1.capture.registry import parse_consumers

        return parse_consumers(self.capture_consumers)

    def compute_hash(self) -> str:
        """Everything that changes the traced code or the shapes in it."""
        from vllm.config.utils import hash_factors

        if not self.enabled:
            return "off"
        return hash_factors({"schema": SCHEMA, "buffer_bytes": self.capture_buffer_bytes})
