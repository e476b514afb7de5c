# SPDX-License-Identifier: Apache-2.0
"""Calls of the engine core that frontends make: changes of global steering, ends of captures."""

from typing import Literal

import msgspec

from vllm.v1.interventions.plan import VectorSet
from vllm.v1.steering.modules import Module


class Change(msgspec.Struct, frozen=True):
    """What to do; checked by the frontend."""

    action: Literal["set", "clear", "register", "unregister"]
    tiers: dict[str, VectorSet] = {}
    """set: the vectors of each tier."""
    replace: bool = False
    """set: whether all that is not named goes."""
    tier: str | None = None
    """clear: one tier; None for all."""
    name: str = ""
    module: Module | None = None


class SteeringCall(msgspec.Struct, frozen=True):
    """A call of the engine core. Reading needs no phases."""

    phase: Literal["state", "modules", "prepare", "commit", "cancel"]
    token: str = ""
    """Names a change from its preparation to its end."""
    change: Change | None = None
    known: dict[str, str] = {}
    """modules: name -> digest of those the frontend has."""


class CaptureEnd(msgspec.Struct, frozen=True):
    """The frontend's word on a completion: it alone knows where stop strings and aborts end it."""

    num_tokens: int
    """Prompt and generated tokens of the final sequence."""
    aborted: bool
    failed: str = ""
    """Why the request failed, if it did: nothing of it is to be published."""


class CaptureCall(msgspec.Struct, frozen=True):
    """A call of the engine core. Engines that do not have the request are called too."""

    request_id: str
    end: CaptureEnd | None = None
    released: str = ""
    """A consumer of the frontend that has given its result."""
