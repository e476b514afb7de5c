# SPDX-License-Identifier: Apache-2.0
"""Calls of the engine core that frontends make: changes of global steering, ends of captures."""

from typing import Literal

import msgspec

from vllm.v1.interventions.plan import VectorSet
from vllm.v1.steering.modules import Module

GLOBAL_OPS = "_set"
"""The name of the module that has the operations of `llm.steering.set`. Nobody else can give it: it
begins with an underscore."""


class Change(msgspec.Struct, frozen=True):
    """A change of global tiers or of named modules, checked by the frontend that asks for it."""

    action: Literal["set", "clear", "register", "unregister"]
    tiers: dict[str, VectorSet] = {}
    """The vectors of each tier, for "set"."""
    replace: bool = False
    """True if "set" clears all that it does not name."""
    tier: str | None = None
    """The tier to "clear"; None for all."""
    name: str = ""
    """The module's, for "register" and "unregister"; `GLOBAL_OPS` where "set" or "clear" changes
    the operations of all requests, `OPERATOR_RULES` where their rules are registered."""
    module: Module | None = None
    """The module to register; with the name `GLOBAL_OPS`, the operations to set, None for none."""


class SteeringCall(msgspec.Struct, frozen=True):
    """A call about global steering. A change is prepared, then committed or cancelled; "state" and
    "modules" only read."""

    phase: Literal["state", "modules", "prepare", "commit", "cancel"]
    token: str = ""
    """Names a change from its preparation to its end."""
    change: Change | None = None
    since: int = 0
    """Number of changes of modules that the frontend knows, for "modules"."""


class CaptureEnd(msgspec.Struct, frozen=True):
    """End of a completion. Only the frontend knows it: the frontend finds stop strings and
    aborts."""

    num_tokens: int
    """Prompt and generated tokens of the final sequence."""
    aborted: bool
    failed: str = ""
    """Reason why the request failed, "" if it did not: nothing of a failed request is published."""


class CaptureCall(msgspec.Struct, frozen=True):
    """A call about one request's captures. Engines that do not have the request are called too."""

    request_id: str
    end: CaptureEnd | None = None
    released: str = ""
    """Name of a consumer in the frontend that has given its result."""
