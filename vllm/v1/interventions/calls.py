# SPDX-License-Identifier: Apache-2.0
"""Calls of the engine core that frontends make: changes of global state, ends of captures."""

from typing import Literal

import msgspec

from vllm.v1.interventions.global_state import Change

FeaturePhase = Literal["load", "loaded", "unload"]
"""Steps of workers with an autoencoder that is to get a name: they begin to load it, say whether
they have, and drop it."""

RoomPhase = FeaturePhase | Literal["claim"]
"""Steps of an engine core likewise: between the first two it takes a place for `reconstruct`."""


class SteeringCall(msgspec.Struct, frozen=True):
    """A call about the global state. A change is prepared, then committed or cancelled; "state" and
    "news" only read; and what workers need for a change of names of autoencoders is loaded before.
    """

    phase: Literal["state", "news", "prepare", "commit", "cancel"] | RoomPhase
    token: str = ""
    """Names a change from its preparation to its end."""
    change: Change | None = None
    since: int = 0
    """Number of changes that the frontend knows, for "news"."""
    num_bytes: int = 0
    """Bytes that the autoencoder of `change` takes, for "load"."""


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
