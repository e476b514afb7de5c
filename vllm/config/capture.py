# SPDX-License-Identifier: Apache-2.0
"""Engine options of activation capture."""

import re
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from vllm.config.points import ATTENTION_POINTS, CAPTURE_POINTS, FINAL, HEAD_POINTS, STREAM_POINTS
from vllm.config.steering import refuse_unknown
from vllm.config.utils import config

if TYPE_CHECKING:
    from vllm.v1.capture.registry import ConsumerSpec

PROJECTION_ROWS = 1024
"""Rows of all `project` matrices in use at once; a matrix that requests share counts once. A
request waits until its own have room."""

LOGIT = "logit"
"""The lens that is the model's own final norm and head."""

SCHEMA = 6
"""Part of the compile-cache key: raise it when traced tap code or an op's meaning changes."""

OverloadPolicy = Literal["block", "drop"]


@config
class CaptureConfig:
    """Activation capture: read rows of the residual stream, per request."""

    capture_consumers: list[Any] = Field(default_factory=list, repr=False, exclude=True)
    """Consumers that may get rows: `inline` returns them with the request's output,
    `filesystem:root=PATH` writes files, `logging` logs; or an installed plug-in. Each is `name` or
    `name:key=value,key=value`, in Python also a dict, a function or an instance of
    `CaptureConsumer`. See docs/capture.md."""

    capture_points: list[str] = Field(default_factory=lambda: [*STREAM_POINTS, FINAL], min_length=1)
    """The points that can be captured, of pre_attn, post_attn and post_block, of q, k, v and z, the
    heads of attention, of mlp_in, which the MLP reads, of mlp_act, the activations of a dense MLP,
    of router_logits, by which experts are chosen, and final. Fewer cost less, but for final, which
    costs nothing until it is asked for. Does not limit steering."""

    capture_buffer_bytes: int = Field(default=1 << 30, ge=1)
    """Device memory for the rows of one step; a GPU takes half as much again, from which they leave
    while the next step runs. Prompts whose rows do not fit at once are computed in more, smaller
    steps."""

    capture_landing_bytes: int | None = Field(default=None, ge=0)
    """Host memory of a pipeline stage in which rows arrive, and where results and consumers read
    them; tensor-parallel ranks that send rows have equal parts of it. By default a quarter of what
    the machine has free, 32 GiB at most. Results may hold three quarters of it, or half where steps
    are large; the rows of further ones are copied to memory of their own."""

    capture_inline_max_bytes: int = Field(default=64 << 20, ge=1)
    """Most bytes of rows one request may return inline."""

    capture_overload_policy: OverloadPolicy = "block"
    """Treatment of a request that may come to more bytes than a consumer has room for
    (`pending_bytes`): the request waits (block), or that capture is an error and the request runs
    (drop)."""

    capture_lens: list[str] = Field(default_factory=list)
    """The lenses that rows can be read under: `logit`, the model's own final norm and head, and
    `NAME=FILE.safetensors`, which has matrices that rows are multiplied with before. Nothing is
    reserved without. See docs/capture.md."""

    capture_lens_rows: int = Field(default=512, ge=1)
    """Number of rows that a step may read under lenses: each goes through the head. What does not
    fit is computed in more, smaller steps."""

    capture_stop_after: int | None = Field(default=None, ge=0)
    """Number of the last layer that is loaded and run: the engine then captures and generates
    nothing, needs neither memory nor time for the layers behind it and the head, and takes requests
    with max_tokens=1 alone, whose answers are empty. See docs/capture.md."""

    capture_keep_bytes: int = Field(default=0, ge=0)
    """Host memory of an engine for rows of blocks that the prefix cache holds: a request that finds
    such blocks gets their rows from there, and does not compute them again for their sake. 0 keeps
    none. See docs/capture.md."""

    rules: str | None = None
    """A file of rules that hold for all requests, which cannot turn them off: JSON,
    `{"rules": [...]}`. Also has all API servers ask, for each request, which rules are set now. See
    docs/capture.md."""

    @property
    def enabled(self) -> bool:
        """True if there are consumers."""
        return bool(self.capture_consumers)

    def __post_init__(self) -> None:
        refuse_unknown("capture_points", self.capture_points, CAPTURE_POINTS)
        _ = self.lens_files
        inline = any(spec.cls is None for spec in self.consumers.values())
        if self.capture_lens and not inline:
            raise ValueError("capture_lens needs 'inline' among capture_consumers")
        if self.capture_stop_after is not None and not self.enabled:
            raise ValueError(
                "capture_stop_after: needs capture_consumers (--capture-consumers inline)"
            )
        if self.capture_keep_bytes and not self.enabled:
            raise ValueError(
                "capture_keep_bytes: needs capture_consumers (--capture-consumers inline)"
            )
        for option in ("capture_lens", "rules"):
            if self.capture_stop_after is not None and getattr(self, option):
                raise ValueError(
                    f"capture_stop_after: {option} needs the whole model; leave one of them out"
                )
        if self.rules is not None and not self.enabled:
            raise ValueError("rules: needs capture_consumers (--capture-consumers inline)")

    @property
    def captures_heads(self) -> bool:
        """True if points of attention can be captured."""
        return self.enabled and not set(HEAD_POINTS).isdisjoint(self.capture_points)

    @property
    def reads_attention(self) -> bool:
        """True if weights of attention can be captured: of queries, and z is what proves them."""
        return self.enabled and set(ATTENTION_POINTS) <= set(self.capture_points)

    @property
    def shared(self) -> bool:
        """True if every tensor-parallel rank makes a part of something that is captured."""
        return self.reads_attention or bool(self.capture_lens)

    @cached_property
    def consumers(self) -> "dict[str, ConsumerSpec]":
        """Name -> spec, of `capture_consumers`."""
        from vllm.v1.capture.registry import parse_consumers

        return parse_consumers(self.capture_consumers)

    @cached_property
    def lens_files(self) -> dict[str, str]:
        """Name -> path, of all lenses but `logit`."""
        files: dict[str, str] = {}
        for entry in self.capture_lens:
            name, _, path = entry.partition("=")
            if entry == LOGIT:
                continue
            if name in (LOGIT, *files) or not re.fullmatch(r"[\w.-]{1,64}", name) or not path:
                raise ValueError(
                    f"capture_lens: {entry!r} is not 'logit' or NAME=FILE, with another name each"
                )
            files[name] = path
        return files

    def __getstate__(self) -> dict[str, Any]:
        """Return what the engine core gets: what the user made in Python stays in the frontend."""
        state = vars(self).copy()
        state["consumers"] = {name: s.portable() for name, s in self.consumers.items()}
        state["capture_consumers"] = list(self.consumers)
        return state

    def __copy__(self) -> "CaptureConfig":
        """Copy within this process, sharing the consumers: a copy must not go by a pickle."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "CaptureConfig":
        return copy(self)

    @cached_property
    def captures_all(self) -> bool:
        """True if a consumer captures of requests that do not name it."""
        return any(spec.capture is not None for spec in self.consumers.values())

    def without_captures(self) -> "CaptureConfig":
        """Return the configuration of code without taps for the model as it was loaded, which may
        end after a layer."""
        plain = CaptureConfig()
        plain.capture_stop_after = self.capture_stop_after
        return plain

    def compute_hash(self) -> str:
        """Hash of everything that changes the traced code or the shapes in it."""
        from vllm.config.utils import hash_factors

        if not self.enabled:
            return "off" if self.capture_stop_after is None else f"off@{self.capture_stop_after}"
        return hash_factors(
            {
                "schema": SCHEMA,
                "points": sorted({*self.capture_points} - {FINAL}),
                "buffer_bytes": self.capture_buffer_bytes,
                "stop_after": self.capture_stop_after,
            }
        )
